"""Preflight checks of data and user-defined objects, each in a child process.

User or task code may crash or hang, so it does not run in the controller. The checks also run in parallel with the caller's
other work. This module does not import torch or vLLM.

User-defined rewards are called once, with sample completions: in the sandbox, or a trusted one in the child process. A return
value that can never be a reward is an error. An exception is only a warning, because the policy's completions are different.
"""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from titanrl.base.plugins import Plugin, Plugins, plugins_of_data, plugins_within
from titanrl.carriers.rewards import DENIED, INVALID, Answers, BoundReward, Score, custom_reward
from titanrl.config.data import ENVIRONMENTS, DataConfig, EvaluationSet, Split, data_file
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError, inline, rule_of, within
from titanrl.config.schema import Config
from titanrl.config.sizes import model_values
from titanrl.data.entries import FORMATS, Selection, data_digest
from titanrl.data.streams import Encode, PromptStream, make_encoder, make_gym_dataset, open_prompts, open_stream
from titanrl.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer
from titanrl.environments.factories import load_factory
from titanrl.environments.programs import checked_function
from titanrl.launch.extensions import config_of, point_of
from titanrl.processes.children import RespawnLimitError
from titanrl.processes.confine import SandboxUnavailable, end_with_parent, missing_for_programs
from titanrl.processes.sandbox import SandboxDied
from titanrl.processes.temporary import TemporaryFolder, delete_all
from titanrl.rollout.renderers import make_renderer
from titanrl.rollout.scoring import ScoringPool, TrustedReward, in_thread, reward_specs, weighted

Finding = str | Selection
"""A warning of a check, or the rows of a source by use."""

CHECK_LIMIT_S = 60.0
"""Time limit for importing a user-defined object, or for sampling from a task."""
BUSY_FACTOR = 5
"""Factor by which the time limits are extended on a busy machine."""
SAMPLED_PROMPTS = 100
"""Number of prompts of a generated task that are tried, to count those that are too long."""
HELDOUT_LIMIT_S = 2.0
"""Time after which the search for held-out prompts stops without an error."""

TRIAL_LIMIT_S = 10.0
"""Longest trial of a reward, in seconds, unless `sandbox.timeout_s` is shorter."""
_FIX = (
    "return a finite number, TokenRewards or a mapping of parts for every completion; return 0 for a wrong answer, and raise "
    "an exception if the reward is unknown"
)

_CHILD = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from titanrl.launch.child_checks import _serve; _serve()"
)


class RunningCheck:
    """A running check in a child process."""

    def __init__(self, check: Callable[[], Sequence[Finding] | None], values: Mapping[str, object], limit_s: float) -> None:
        """Start the check, which raises `ValueError` if a rule is broken. `values` are the checked keys with their values."""
        self._values, self._limit_s = values, limit_s
        self.warnings: Sequence[str] = ()
        """Warnings of the check; set by `result`."""
        self.selections: tuple[Selection, ...] = ()
        """Rows of the checked sources by use, after `result`."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `result`
        with tempfile.TemporaryFile() as request:
            request.write(pickle.dumps(sys.path) + pickle.dumps((os.getpid(), check, values)))
            request.seek(0)
            command = [sys.executable, "-c", _CHILD]
            try:
                self._process = subprocess.Popen(command, stdin=request, stdout=subprocess.PIPE, stderr=self._errors)
            except OSError as error:
                raise ConfigError(
                    f"checks: a process must be started for each, but that fails: {error.strerror} (got {sys.executable}). "
                    "Free memory, or raise the limit of processes (ulimit -u)."
                ) from error

    def result(self) -> tuple[BrokenRule, ...]:
        """Wait for the check, and return the broken rules."""
        try:
            output = self._output()
        except subprocess.TimeoutExpired:
            late = self._late()
            self._process.kill()
            self._process.communicate()
            return (late,)
        finally:
            self._errors.seek(0)
            last_lines = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
            self._errors.close()
        if self._process.returncode == 0 and output:
            broken: tuple[BrokenRule, ...]
            found: Sequence[Finding]
            broken, found = pickle.loads(output)
            self.warnings = [text for text in found if isinstance(text, str)]
            self.selections = tuple(rows for rows in found if isinstance(rows, Selection))
            return broken
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        rule = f"loading it must not end the Python process ({', '.join([how, *last_lines])})"
        fix = "correct the module, the task or its options"
        if code == -signal.SIGKILL:
            fix = "free memory, or load less: the system kills a process when memory runs out"
        return (BrokenRule(values=self._values, rule=rule, fix=fix),)

    def _output(self) -> bytes:
        """Return what the check wrote. If a busy machine has given it little CPU time, wait `BUSY_FACTOR` times as long."""
        try:
            return self._process.communicate(timeout=self._limit_s)[0]
        except subprocess.TimeoutExpired:
            if not _is_busy() or self._cpu_s() > self._limit_s / 2:
                raise
        waited_s, self._limit_s = self._limit_s, BUSY_FACTOR * self._limit_s
        return self._process.communicate(timeout=self._limit_s - waited_s)[0]

    def _late(self) -> BrokenRule:
        """Return the rule that a check broke by taking too long, with advice that depends on what it did."""
        used_s = self._cpu_s()
        if used_s > self._limit_s / 2:
            fix = "it computes for too long: make the module, the task or its options load faster"
        elif _is_busy():
            fix = f"the machine is busy (load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores): try again when it is idle"
        else:
            fix = "it waits, perhaps for the network, a lock or another process: do this later than at import"
        took = f"longer than {self._limit_s:g} s (it used {used_s:.0f} s of CPU time)"
        rule = f"the check timed out: loading it must not take {took}"
        return BrokenRule(self._values, rule, fix)

    def _cpu_s(self) -> float:
        line = Path(f"/proc/{self._process.pid}/stat").read_bytes().rpartition(b")")[2]  # a name may contain spaces
        fields = line.split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_busy() -> bool:
    return os.getloadavg()[0] > (os.cpu_count() or 1)


def start_checks(config: Config, plugins: Plugins, *, with_data: bool, has_tokenizer: bool) -> list[RunningCheck]:
    """Start the checks of prompts (`with_data`), rewards, and user-defined objects given by import path.

    Without a usable tokenizer in `model.path`, the lengths of prompts are not checked.
    """
    checks: list[RunningCheck] = []
    if with_data:
        parts: list[tuple[str, DataConfig, Callable[..., Sequence[Finding]]]] = [
            (task.key(name), task, partial(check_data, config, plugins, name)) for name, task in config.data.tasks.items()
        ]
        for eval_set in config.evaluation_sets.values():
            if eval_set.has_own_data:
                parts.append((f"{eval_set.key}.data", eval_set.data, partial(check_set, config, plugins, eval_set)))
        for section, data, check in parts:
            values: dict[str, object] = {"source": data.source, "options": data.options}
            if data.source == "reasoning_gym":
                values = {"task": data.task, "task_config": data.task_config}
            elif data.path is not None:
                values = {"path": str(data.path)}
            limit_s = CHECK_LIMIT_S if data.source == "reasoning_gym" else config.timeouts.start_s
            keys = {f"{section}.{key}": value for key, value in values.items()}
            checks.append(RunningCheck(partial(check, has_tokenizer=has_tokenizer), keys, limit_s))
    by_module: dict[str, list[Plugin]] = defaultdict(list)  # so that each module is imported only once
    for plugin in plugins.values():
        # Python objects were checked before they were pickled.
        if not plugin.is_object and point_of(plugin.key).key != "data.source":
            by_module[plugin.name.rpartition(":")[0]].append(plugin)
    for same_module in by_module.values():
        names = {plugin.key: plugin.name for plugin in same_module}
        checks.append(RunningCheck(partial(check_plugins, same_module, config), names, CHECK_LIMIT_S))
    return checks


def check_plugins(plugins: Iterable[Plugin], config: Config) -> None:
    """Import the objects named by configuration keys, and check that each fits its extension point."""
    broken: list[BrokenRule] = []
    for plugin in plugins:
        try:
            point_of(plugin.key).check(plugin, config_of(plugin.key, config))
        except BrokenRules as error:
            broken += error.broken
        except ValueError as error:
            broken.append(rule_of(str(error), {plugin.key: plugin.name}))
    if broken:
        raise BrokenRules(*broken)


def check_data(config: Config, plugins: Plugins, name: str | None = None, *, has_tokenizer: bool = True) -> list[Finding]:
    """Read, split and tokenize the prompts of a task (by default the first) as a rollout worker does, and try its rewards.

    Return the rows by use, and warnings. Without a tokenizer, skip all that needs one. Raise `ValueError` for unusable data.
    """
    name = name or next(iter(config.data.tasks))
    data = config.data.tasks[name]
    section = data.key(name)
    try:
        encode, of_task = _encoder(config, data, has_tokenizer=has_tokenizer), plugins_of_data(plugins, section)
        stream = open_prompts(name, data, encode, config.seed, of_task).stream
        notes: list[str] = []
        if has_tokenizer and data.source != "reasoning_gym":
            notes += _long_answers(data, stream, policy_tokenizer(config), data.rollout(config.rollout).max_new_tokens)
        if data.source == "reasoning_gym":  # generate some prompts, to count those that are too long
            started = time.monotonic()
            for index in range(min(SAMPLED_PROMPTS, stream.num_prompts)):
                if time.monotonic() - started <= HELDOUT_LIMIT_S:
                    stream[index]
        for eval_set in config.evaluation_sets.values():
            if eval_set.task == name:
                notes += _few_prompts(eval_set, stream)
        found = _selection(data, stream, section, notes)
    except BrokenRules as error:
        raise within(error, section) from None
    return [found, *try_rewards(config.of_task(data), of_task, stream[0].entry, section)]


def check_set(config: Config, plugins: Plugins, eval_set: EvaluationSet, *, has_tokenizer: bool = True) -> list[Finding]:
    """Read the prompts of an evaluation set that has a separate data section, and try its rewards; see `check_data`."""
    plugins = plugins_within(plugins, eval_set.key)
    try:
        encode = _encoder(config, eval_set.data, has_tokenizer=has_tokenizer)
        stream = open_stream(eval_set.data, encode, config.seed, plugins, is_trained_on=False)
        notes = _few_prompts(eval_set, stream)
        first = stream.heldout(1, split=eval_set.split, key=eval_set.key)[0]
        found = _selection(eval_set.data, stream, f"{eval_set.key}.data", notes, eval_set.split)
    except BrokenRules as error:
        raise within(error, f"{eval_set.key}.data") from None
    of_set = config.model_copy(update={"data": eval_set.data})
    return [found, *try_rewards(of_set, plugins, first.entry, f"{eval_set.key}.data")]


def _selection(
    data: DataConfig, stream: PromptStream, section: str, notes: Sequence[str], split: Split | None = None
) -> Selection:
    """Return the rows of a source by use, with the digest of its files. `split` is None for a training task."""
    found = stream.selection
    key = found.key.replace("data", section, 1)
    heldout = found.num_heldout + (found.num_training if split == "all" else 0)
    left_out = {reason.replace("data.", f"{section}.", 1): number for reason, number in found.left_out.items()}
    if split is not None:
        found = replace(found, num_training=0, num_heldout=heldout, num_other=found.num_rows_used - heldout)
    found = replace(found, key=key, left_out=left_out, notes=(*found.notes, *notes))
    if data.path is not None:
        path = data_file(data.path)
        found = replace(found, source=str(path.absolute()), digest=data_digest(path, "data.path", FORMATS[data.source]))
    elif data.options:
        found = replace(found, source=f"{found.source} {inline(data.options)}")
    return found


def _few_prompts(eval_set: EvaluationSet, stream: PromptStream) -> list[str]:
    """Check that an evaluation set has a prompt, and return a note if it has fewer than it takes."""
    started = time.monotonic()
    found = len(stream.heldout(eval_set.num_prompts, split=eval_set.split, key=eval_set.key, limit_s=HELDOUT_LIMIT_S))
    if found == eval_set.num_prompts or time.monotonic() - started > HELDOUT_LIMIT_S:
        return []
    which = "held-out prompts" if eval_set.split == "heldout" else "prompts"
    return [
        f"{eval_set.key}.num_prompts is {eval_set.num_prompts:,}, but there are only {found:,} {which}, which are all evaluated"
    ]


def _long_answers(data: DataConfig, stream: PromptStream, tokenizer: Tokenizer, max_new_tokens: int) -> list[str]:
    """Return a note if no completion can equal some reference answers, which are too long; raise `BrokenRules` if all are."""
    if data.environment is not None or all(part.function != "exact" for part in data.reward_parts.values()):
        return []
    answers = [prompt.entry["answer"] for prompt in stream.training_prompts()]
    shown = data.path or data.source
    number = sum(_num_tokens(tokenizer, answer) > max_new_tokens for answer in answers)
    if number == len(answers):
        rule = f"no completion can equal a reference answer: all {number:,} have more tokens"
        fix = "raise it, or take a part of the answers with data.answer"
        values = {"rollout.max_new_tokens": max_new_tokens, "data.path" if data.path else "data.source": str(shown)}
        raise BrokenRules(BrokenRule(values, rule, fix))
    text = f"{number:,} of {len(answers):,} reference answers have more tokens than rollout.max_new_tokens={max_new_tokens}"
    return [f"{text}, so that no completion equals them"] if number else []


def _num_tokens(tokenizer: Tokenizer, answer: str) -> int:
    """Return the number of tokens of a reference answer; 0 if the tokenizer lacks a character of it."""
    try:
        return len(tokenizer.encode(" ".join(answer.split())))
    except ValueError:
        return 0


def _encoder(config: Config, data: DataConfig, *, has_tokenizer: bool) -> Encode:
    """Check environment and rewards, then return the function that tokenizes questions."""
    encode: Encode = lambda entry: []  # noqa: E731
    if has_tokenizer:
        try:
            tokenizer = policy_tokenizer(config)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise BrokenRules(rule_of(str(error), model_values(config))) from error
        known = set(tokenizer.vocabulary.values())
        if unknown := [token_id for token_id in config.rollout.stop_ids if token_id not in known]:
            rule = f"the tokenizer has no token with this id; its ids are 0 to {max(known)}"
            raise BrokenRules(BrokenRule({"rollout.stop": unknown[0]}, rule, "correct the id"))
        encode = make_encoder(data, tokenizer)
        if (environment := data.environment) is not None:
            try:
                make_renderer(tokenizer, environment.renderer, environment.renderer_options)
            except ValueError as error:
                key, _, text = str(error).partition(": ")
                rule, _, fix = text.rstrip(".").rpartition(". ")
                value = environment.renderer if key.endswith(".renderer") else environment.renderer_options
                raise BrokenRules(BrokenRule({key: value}, rule, fix[:1].lower() + fix[1:])) from error
            if isinstance(environment.program, str):
                checked_function(environment.program, environment.options)
            if environment.confined and (missing := missing_for_programs()):
                rule = f"confinement needs {', '.join(missing)}"
                raise BrokenRules(BrokenRule({"data.environment.confined": True}, rule, "remove confined"))
            if environment.python is None and environment.function in ENVIRONMENTS:  # others are extension points
                load_factory(environment.function, environment.options)
    if data.source != "reasoning_gym" and any(reward.function == "reasoning_gym" for reward in data.rewards.values()):
        make_gym_dataset(data.task, data.task_config, seed=0, size=1)
    return encode


def policy_tokenizer(config: Config) -> Tokenizer:
    """Return the policy's tokenizer. Raise `ValueError` if `model.path` has no usable tokenizer."""
    if config.model.path is not None:
        return load_tokenizer(config.model.path)
    folder = TemporaryFolder().path  # stays until the process exits, because a renderer reads the tokenizer again
    write_tokenizer(folder)
    return load_tokenizer(folder)


def try_rewards(config: Config, plugins: Plugins, entry: Mapping[str, Any], section: str) -> list[str]:
    """Call each user-defined reward of `config.data` once, with two completions of the prompt `entry`, and return warnings.

    Rewards that cannot be loaded in time are skipped: another check names them. `section` is the section in messages. Raise
    `BrokenRules` if a reward returned anything other than a reward, or needs what the sandbox denies.
    """
    answers = sample_answers(entry, with_tokens=config.data.environment is None)
    limit_s = min(config.sandbox.timeout_s, TRIAL_LIMIT_S)
    scores = asyncio.run(_scores(config, plugins, answers, limit_s))
    broken: list[BrokenRule] = []
    warnings = []
    for name, of_reward in scores.items():
        reward, key = config.data.reward_parts[name], f"{section}.rewards.{name}"
        scored = [weighted({name: score}, {name: reward}, answers, index) for index, score in enumerate(of_reward)]
        errors = [(index, one.error.removeprefix(f"{name}: ")) for index, one in enumerate(scored) if one.reward is None]
        if not errors:
            continue
        index, error = errors[0]
        sample = f"for the sample completion {answers.completions[index]!r:.60}"
        if DENIED in error:
            rule, _, fix = error.replace(" (the reward", ": the reward").partition("; ")
            broken.append(BrokenRule(values={key: reward.function}, rule=f"{rule} ({sample})", fix=fix.rstrip(")")))
        elif of_reward[index].status == "ok" or error.startswith(INVALID):
            broken.append(BrokenRule(values={key: reward.function}, rule=f"{error} ({sample})", fix=_FIX))
        else:
            warnings.append(
                f"{key}: the reward failed {sample} ({error}). If it fails on real completions, they have no reward."
            )
    if broken:
        raise BrokenRules(*broken)
    return warnings


def sample_answers(entry: Mapping[str, Any], *, with_tokens: bool = True) -> Answers:
    """Return a right and a wrong completion of a prompt. Each character is a token.

    Without tokens, as in an environment, they cannot be located in the text.
    """
    texts = (f"<answer>{entry.get('answer') or 'a sample'}</answer>", "I do not know.")
    return Answers(
        entry=entry,
        completions=texts,
        num_tokens=tuple(map(len, texts)),
        finish_reasons=("stop", "length"),
        token_ids=tuple([ord(char) for char in text] for text in texts),
        decode_raw=lambda ids: "".join(map(chr, ids)),
        decode=(lambda ids: "".join(map(chr, ids))) if with_tokens else None,
    )


async def _scores(config: Config, plugins: Plugins, answers: Answers, limit_s: float) -> dict[str, list[Score]]:
    scores: dict[str, list[Score]] = {}
    for name, reward in config.data.reward_parts.items():
        if reward.trusted:
            key = f"data.rewards.{name}"
            try:
                loading = in_thread(partial(custom_reward, plugins.get(key) or Plugin(key=key, name=reward.function)))
                function = await asyncio.wait_for(loading, CHECK_LIMIT_S)
            except Exception:  # importing a module may raise anything
                continue
            scores[name] = await TrustedReward(BoundReward(name, function), limit_s).score(answers)
    if specs := [spec for spec in reward_specs(config, plugins) if spec.is_custom]:
        pool = ScoringPool(specs, config.sandbox.model_copy(update={"timeout_s": limit_s, "num_processes": len(specs)}))
        try:
            await asyncio.wait_for(pool.start(), CHECK_LIMIT_S)
            found = await asyncio.gather(*(pool.score(answers, reward=index) for index in range(len(specs))))
            scores |= {spec.name: own for spec, own in zip(specs, found, strict=True)}
        except (RespawnLimitError, SandboxDied, SandboxUnavailable, TimeoutError, ValueError):
            return scores
        finally:
            await pool.close()
    return scores


def _serve() -> None:
    """Run one check in a child process: read it from stdin, then write the broken rules to stdout."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # imported modules may print
    parent_pid, check, values = pickle.load(sys.stdin.buffer)
    end_with_parent(parent_pid)
    broken: tuple[BrokenRule, ...] = ()
    found: Sequence[Finding] = ()
    try:
        found = check() or ()
    except BrokenRules as error:
        broken = error.broken
    except Exception as error:  # tasks and user modules may raise anything
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        broken = (rule_of(text, values),)
    with results:
        pickle.dump((broken, found), results)
    delete_all()
    os._exit(0)  # threads of imported modules must not delay the exit
