"""Checks before a run on Kubernetes, and its section of the configuration."""

import pytest

from titanrl.config import ConfigError, load_config
from titanrl.hosts.kubernetes.rules import broken_by_kubernetes, broken_by_pods

GOOD = (
    "device=cpu",
    "hosts.kind=kubernetes",
    "hosts.trusted_network=true",
    "hosts.kubernetes.image=titan",
    "hosts.kubernetes.volumes=[{claim: shared, mount_path: /mnt/titan}]",
)


def rules(*overrides: str) -> list[str]:
    return [rule.rule for rule in broken_by_kubernetes(load_config("configs/quickstart.yaml", [*GOOD, *overrides]))]


@pytest.fixture
def in_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.hosts.remote_rules.addresses_of", lambda name: ["10.0.0.7"])


@pytest.mark.usefixtures("in_pod")
def test_pod_can_start_a_run() -> None:
    assert rules() == []


@pytest.mark.usefixtures("in_pod")
@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("device=auto", "the pods may have a different one"),
        ("hosts.trusted_network=false", "can execute code as you"),
        ("hosts.kubernetes.image=null", "pods need an image"),
        ("hosts.kubernetes.volumes=[]", "pods need a volume to share the run directory, model and data"),
    ],
)
def test_missing_setting_is_named(override: str, rule: str) -> None:
    (found,) = rules(override)
    assert rule in found


@pytest.mark.usefixtures("in_pod")
def test_missing_package_is_named_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.hosts.kubernetes.api.find_spec", lambda name: None)
    assert rules() == ["kubernetes needs the package kubernetes, which is not installed"]


def test_name_that_pods_cannot_reach_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanrl.hosts.remote_rules.addresses_of", lambda name: ["127.0.1.1"])
    (rule,) = rules()
    assert rule.endswith("it resolves to 127.0.1.1")


def test_other_kinds_of_hosts_need_nothing() -> None:
    assert list(broken_by_kubernetes(load_config("quickstart"))) == []
    assert len(list(broken_by_pods(load_config("quickstart", ["hosts.kind=kubernetes"])))) == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory=64 GB", "hosts.kubernetes.memory"),
        ("volumes=[{claim: a, mount_path: mnt}]", "absolute path"),
        ("volumes=[{claim: a, mount_path: /mnt}, {claim: b, mount_path: /mnt}]", "a unique absolute path"),
        ("volumes=[{claim: a, mount_path: /dev/shm}]", "other than /dev/shm"),
        ("pod_spec={containers: []}", "the run sets this pod field itself"),
        ("env={TITANRL_TOKEN: x}", "must not start with a digit or TITANRL_"),
        ("tolerations=[{key: gpu, operator: Exists, value: x}]", "the operator Exists does not take a value"),
        ("tolerations=[{key: gpu, effect: Never}]", "NoSchedule"),
        ("port=80", "1,024"),
    ],
)
def test_wrong_setting_is_an_error_with_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config("configs/quickstart.yaml", [*GOOD, f"hosts.kubernetes.{override}"])
    assert message in str(error.value)
    assert "hosts.kubernetes" in str(error.value)


def test_arena_cannot_reach_other_pods() -> None:
    with pytest.raises(ConfigError, match="arena is shared memory of one host"):
        load_config("configs/quickstart.yaml", [*GOOD, "weights.transport=arena"])
