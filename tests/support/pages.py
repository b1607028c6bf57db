"""Blocks of the documentation's pages, and what they need to run."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_iris

from fleetfit.cli import main

# The pages that explain what every user needs, one after the other.
GUIDE_PAGES = ["run-file", "data", "models", "budgets", "devices", "engines", "runs", "experiments"]


def fenced(markdown: str, language: str) -> list[str]:
    """Return the bodies of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)


def file_name(block: str) -> str | None:
    """Return the name that the first line of a block gives it, as a comment."""
    match = re.match(r"# ([\w-]+\.(?:toml|py))\n", block)
    return match and match[1]


def write_files(markdown: str, folder: Path) -> None:
    """Write each block that has a name, with one round instead of many."""
    for block in [*fenced(markdown, "toml"), *fenced(markdown, "python")]:
        name = file_name(block)
        if name:
            (folder / name).write_text(re.sub(r"^rounds = \d+", "rounds = 1", block, flags=re.MULTILINE))


def shell_lines(block: str) -> list[str]:
    """Return the commands of a block of shell, each in one line, without comments above them."""
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def commands(markdown: str) -> list[list[str]]:
    """Return the arguments of each `fleetfit` command that is not marked as not run."""
    run = re.sub(r"^<!-- not run: [^\n]* -->\n```sh\n.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in fenced(run, "sh") for line in shell_lines(block)]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fleetfit ")]


def write_iris(folder: Path) -> None:
    """Write the tables of the page on data: iris.csv, more rows of the same kind, and rows without a label."""
    flowers = load_iris(as_frame=True)
    table = flowers.data.set_axis(["sepal_length", "sepal_width", "petal_length", "petal_width"], axis=1)
    table["species"] = flowers.target_names[flowers.target]
    table.to_csv(folder / "iris.csv", index=False)
    table.iloc[::5].to_csv(folder / "more-rows.csv", index=False)
    table.iloc[::7].drop(columns="species").to_csv(folder / "new-rows.csv", index=False)


def write_photos(folder: Path) -> None:
    """Write the images of the first page: two classes to train on, and two images without classes."""
    image = pytest.importorskip("PIL.Image", reason="the extra images is not installed")
    rng = np.random.default_rng(0)
    for channel, (kind, new) in enumerate((("cat", "a"), ("dog", "b"))):
        for path in [*(f"photos/{kind}/{i}.jpg" for i in range(30)), f"unsorted/{new}.jpg"]:
            pixels = rng.integers(0, 120, (24, 32, 3)).astype(np.uint8)
            pixels[..., channel] += 100
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels).save(folder / path)


def write_cameras(folder: Path) -> None:
    """Write the images of the page on devices: 20 cameras of two classes, new images without and with classes."""
    image = pytest.importorskip("PIL.Image", reason="the extra images is not installed")
    rng = np.random.default_rng(0)
    names = [f"cameras/cam-{camera + 1:02}/{kind}/{i:04}.jpg" for camera in range(20) for kind in ("empty", "parked")
             for i in range(1, 13)]  # fmt: skip
    for name in [*names, "new/a.jpg", "new/b.jpg", "next-week/empty/a.jpg", "next-week/parked/b.jpg"]:
        pixels = rng.integers(0, 90, (24, 32, 3)) + 110 * ("parked" in name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels.astype(np.uint8)).save(folder / name)


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)
