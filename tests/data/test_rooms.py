"""The names that a run file may give to data: they stay, whichever file they stand in; twins differ as they should."""

import pytest
from support import raises

from fleetfit import names
from fleetfit.cli.listing import make_key_table, make_list_table
from fleetfit.errors import ConfigError
from fleetfit.factories import call_factory

NAMES = ("ag_news", "arrays", "cifar10", "cifar100", "digits", "fashion_mnist", "femnist", "imagenet", "images",
         "mnist", "plain_text", "shakespeare", "sounds", "speech_commands", "sst2", "table", "text",
         "widar")  # fmt: skip


def test_names_stay() -> None:
    assert names.list_names("data") == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_function_of_that_name(name: str) -> None:
    assert names.resolve("data", name).__name__ == name


@pytest.mark.parametrize("name", ["cache", "cifar", "dataset", "detect", "files", "folders", "image_reader", "parquet",
                                  "partition", "sets", "short_texts", "tokens"])  # fmt: skip
def test_modules_of_readers_are_not_sets(name: str) -> None:
    with raises(ConfigError, f'"{name}"', "ag_news, arrays, cifar10"):
        names.resolve("data", name)


def test_each_set_says_how_large_it_is() -> None:
    assert len(make_list_table("data").rows) == len(NAMES)
    rows = {name: rest for name, *rest in make_list_table("data").rows}
    assert rows["cifar10"] == ["50,000", "10,000", "10", "32x32"]
    assert rows["cifar100"] == ["50,000", "10,000", "100", "32x32"]
    assert rows["mnist"] == rows["fashion_mnist"] == ["60,000", "10,000", "10", "28x28"]
    assert rows["ag_news"][0] == "120,000" and rows["sst2"][0] == "67,349"


def test_twins_have_the_keys_that_mean_something() -> None:
    keys = {name: [row[0] for row in make_key_table("data", name).rows] for name in NAMES}
    assert "coarse" in keys["cifar100"] and set(keys["cifar10"]) == set(keys["cifar100"]) - {"coarse"}
    assert keys["mnist"] == keys["fashion_mnist"] and keys["ag_news"] == keys["sst2"]
    assert not {"name", "mean", "std", "repository", "class_names"} & {*keys["mnist"], *keys["sst2"]}
    with raises(ConfigError, "cifar10", '"coarse"'):
        call_factory(names.resolve("data", "cifar10"), "cifar10", "[data]", {"coarse": True})
