"""Networks of other people's packages are derived as recorded, and train at four levels; `make test-zoo` runs this."""

from pathlib import Path

import pytest
from bed.networks import NETWORKS, Network
from support.networks import BUDGETS, find_outcome, read_record

LEAST_DERIVED = 0.95
MEASURED = ("derived in s", "trained in s")  # which differ from machine to machine


def test_most_networks_are_derived_and_others_have_a_reason() -> None:
    record = read_record()
    assert record.keys() == {str(network) for network in NETWORKS}
    refused = {name for name, outcome in record.items() if "refused" in outcome}
    assert refused == {str(network) for network in NETWORKS if network.refused}
    assert len(refused) <= (1 - LEAST_DERIVED) * len(NETWORKS)
    assert all(len(outcome["levels"]) == len(BUDGETS) for name, outcome in record.items() if name not in refused)


@pytest.mark.zoo
@pytest.mark.filterwarnings("default")  # packages warn of what they do
@pytest.mark.parametrize("network", [pytest.param(network, id=str(network)) for network in NETWORKS])
def test_a_network_is_derived_and_trains(network: Network, tmp_path: Path) -> None:
    if not network.is_installed:
        pytest.skip(f"{network.package} is not installed")
    recorded, outcome = read_record()[str(network)], find_outcome(network, tmp_path)
    for key in recorded.keys() - {*MEASURED}:
        assert outcome.get(key) == recorded[key], key
