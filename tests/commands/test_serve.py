"""The arguments of `titanrl serve`: keys, addresses and policies."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from titanrl.base.errors import TitanRLError
from titanrl.commands import serve
from titanrl.config import ConfigError
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model

KEY = "0123456789abcdef"


def keys_in(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_keys_are_read_with_their_lines(tmp_path: Path) -> None:
    assert serve.read_keys(keys_in(tmp_path, f"# of Ann\n{KEY}\n\n{KEY}b \n")) == {KEY: 2, f"{KEY}b": 4}


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        (KEY, 0o640, "only you may have access"),
        ("short", 0o600, "at least 16 ASCII characters"),
        (f"{KEY} {KEY}", 0o600, "no space"),
        (f"{KEY}\n{KEY}", 0o600, "keys must differ"),
        ("# none\n", 0o600, "must have a key"),
    ],
)
def test_wrong_keys_are_refused(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    with pytest.raises(TitanRLError, match=f"--keys: .*{problem}"):
        serve.read_keys(keys_in(tmp_path, text, mode))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_address_beyond_this_machine_requires_keys(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host: .*requires keys"):
        serve.check_host(host, has_keys=False)
    serve.check_host(host, has_keys=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_own_machine_needs_no_keys(host: str) -> None:
    serve.check_host(host, has_keys=False)


def test_address_must_be_valid() -> None:
    with pytest.raises(ConfigError, match="--host: must be an IP address"):
        serve.check_host("example.com", has_keys=True)


def test_address_in_use_is_refused_before_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match=r"--port: .*Address already in use"):
        serve.check_free(other.getsockname())
    serve.check_free(("127.0.0.1", 0))


def test_unix_socket_of_a_running_server_stays_its_own(tmp_path: Path) -> None:
    path = tmp_path / "policy"
    tmp_path.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match=r"--unix: .*Address already in use"):
            serve.check_free(path)
        assert path.exists()
    serve.check_free(path)  # the other server is gone
    assert not path.exists()
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match=r"--unix: .*only you may have access"):
        serve.check_free(path)
    tmp_path.chmod(0o700)
    for place, problem in {tmp_path / "none" / "policy": "No such file", tmp_path / ("a" * 120): "too long"}.items():
        with pytest.raises(ConfigError, match=f"--unix: .*{problem}"):
            serve.check_free(place)


def test_model_is_served_with_lengths_that_fit(tmp_path: Path) -> None:
    model = tmp_path / "model"
    create_model(model, RecipeConfig(), seed=3)
    served = serve.find_policy(model, None, ["generator.max_num_seqs=8"], tmp_path)
    assert (served.name, served.state, served.version) == ("model", None, 0)
    assert served.config.model.path == model
    assert served.config.generator.max_num_seqs == 8
    assert served.config.max_sequence_tokens <= 4096


@pytest.mark.parametrize(
    ("policy", "step", "problem"),
    [
        ("nowhere", None, "POLICY: it does not exist"),
        ("empty", None, "POLICY"),
        ("run", 3, "--step: the run has no checkpoint of this step; it has none"),
        ("run", None, "POLICY: no intact checkpoint"),
        ("run/checkpoints/best", None, "POLICY: must be a checkpoint"),
        ("run/checkpoints/step-3", None, "--step"),
        ("run/checkpoints/best", 3, "--step: a checkpoint has its own step"),
    ],
)
def test_missing_policy_is_refused(tmp_path: Path, policy: str, step: int | None, problem: str) -> None:
    for folder in ("empty", "run/checkpoints/best", "run/checkpoints/step-3"):
        (tmp_path / folder).mkdir(parents=True)
    if step is not None:
        (tmp_path / "run/checkpoints/step-3").rmdir()
    (tmp_path / "run/config.yaml").write_text("name: run\nnum_steps: 3\n")
    with pytest.raises(ConfigError, match=problem):
        serve.find_policy(tmp_path / policy, step, [], tmp_path)


def test_tinker_requires_its_package_and_keys_that_its_client_accepts() -> None:
    with pytest.raises(ConfigError, match="keys start with tml-" if find_spec("tinker") else "tinker is not installed"):
        serve.check_tinker([KEY], Path("keys"))


def test_tinker_serves_a_configuration_without_temperature(tmp_path: Path) -> None:
    served = serve.find_policy(Path("quickstart"), None, ["rollout.temperature=0.5"], tmp_path, tinker=True)
    assert (served.name, served.config.rollout.temperature, served.state) == ("quickstart", 1.0, None)
    with pytest.raises(ConfigError, match="--step: only a run has steps"):
        serve.find_policy(Path("quickstart"), 3, [], tmp_path, tinker=True)


def test_checkpoints_need_tinker(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve.parse(["model", "--checkpoints", "here"], prog="titanrl serve")
    assert "--checkpoints: only clients of Tinker save any" in capsys.readouterr().err
    parsed = serve.parse(["--tinker", "model", "--name", "n", "seed=1"], prog="titanrl serve")
    assert (parsed.policy, parsed.overrides) == (Path("model"), ["seed=1"])
