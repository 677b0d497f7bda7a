"""Checks before a run on Slurm."""

import shutil

import pytest

from titanrl.config import load_config
from titanrl.hosts.remote_rules import addresses_of
from titanrl.hosts.slurm.rules import broken_by_slurm


def rules(*overrides: str) -> list[str]:
    config = load_config(
        "configs/quickstart.yaml", ["hosts.kind=slurm", "hosts.trusted_network=true", "device=cpu", *overrides]
    )
    return [rule.rule for rule in broken_by_slurm(config)]


@pytest.fixture
def login_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("titanrl.hosts.remote_rules.addresses_of", lambda name: ["127.0.1.1", "10.0.0.7"])


@pytest.mark.usefixtures("login_node")
def test_login_node_can_start_a_run() -> None:
    assert rules() == []


@pytest.mark.usefixtures("login_node")
def test_device_of_the_nodes_must_be_given() -> None:
    (rule,) = rules("device=auto")
    assert "the nodes may have a different one" in rule


@pytest.mark.usefixtures("login_node")
@pytest.mark.parametrize(
    ("addresses", "found"), [(["127.0.1.1", "::1"], "it resolves to 127.0.1.1, ::1"), ([], "it does not resolve")]
)
def test_name_that_others_cannot_reach_is_reported(monkeypatch: pytest.MonkeyPatch, addresses: list[str], found: str) -> None:
    monkeypatch.setattr("titanrl.hosts.remote_rules.addresses_of", lambda name: addresses)
    (rule,) = rules()
    assert rule.endswith(found)


@pytest.mark.usefixtures("login_node")
def test_missing_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "srun" else name)
    assert rules() == ["slurm requires the command srun, which is not on PATH"]


def test_addresses_of_names_are_found() -> None:
    assert "127.0.0.1" in addresses_of("127.0.0.1")
    assert addresses_of("no-such-host.invalid") == []
