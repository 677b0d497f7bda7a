"""Sessions: running trainer and generator processes, and their clients, for custom training loops.

`connect` starts a trainer, generators, or both. `titanrl.grpo.GRPO` uses the same session, with rollout workers and a buffer.

First the model that a session starts from: a given directory, or a tiny model that is created, warm-started and cached. A warm
start is supervised training before RL, on generated demonstrations of the task. Then `Speaker`, the policy of a session as a
caller, which renders the calls of clients, samples, and reads the completions as messages. Then sessions.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from titanrl.base.arguments import check_count, check_list, check_number, check_type
from titanrl.base.errors import FaultError, TitanRLError
from titanrl.base.files import replace_text
from titanrl.base.ownership import is_only_user, own_flaw
from titanrl.base.plugins import Plugins, plugins_of_data
from titanrl.carriers.rewards import Answers, Scored, scorer_failed
from titanrl.carriers.types import (
    BASE,
    AdamParams,
    AdapterSpec,
    Completion,
    EvaluationResult,
    GenerationRequest,
    OnTokens,
    Prompt,
    SamplingParams,
    learning_rate,
)
from titanrl.config.errors import BrokenRule, BrokenRules
from titanrl.config.load import recorded_config
from titanrl.config.schema import Config
from titanrl.config.sections import GeneratorConfig, WarmStartConfig
from titanrl.data.entries import hinted_entry
from titanrl.data.examples import Demonstration, chain_sum_demonstrations, joined, mean_loss_data
from titanrl.data.mixture import Draw, make_mixture
from titanrl.data.streams import make_encoder, make_stream, open_prompts
from titanrl.data.tokenizer import MAX_TOKEN_CHARS, Tokenizer, load_tokenizer
from titanrl.environments.interface import Message
from titanrl.launch.assembly import Parts, Rollouts, SessionSetup, assemble, failures_of
from titanrl.launch.extensions import plugins_of, with_declared_traits
from titanrl.launch.generators import GeneratorMeshes, WeightSync
from titanrl.launch.preflight import policy_notes, preflight
from titanrl.launch.roles import Roles, RunFiles
from titanrl.launch.supervision import DeadlineError, start_request
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.metrics.console import Console
from titanrl.metrics.run_directory import claim_new_run
from titanrl.models.directory import ModelDirectory, open_model
from titanrl.rollout.open_tasks import EvaluationSets, OpenTask, RecordEvaluation, open_tasks
from titanrl.rollout.renderers import PlainRenderer, Renderer, make_renderer
from titanrl.serving.calls import MAX_SEED, Call, Refused, Reply, new_id
from titanrl.session.sampling import Sample, Sampler, SamplingClient
from titanrl.session.training import TrainingClient, check_name

logger = logging.getLogger(__name__)
_RECIPE_REVISION = 2
"""Increased when the recipe or the demonstrations change; cached models of other revisions are not used."""
_END_BYTES = 1 << 20
_SHOW_EVERY_STEPS = 10


@dataclass(frozen=True, slots=True)
class StartingModel:
    """Folders of the starting model."""

    initial: Path
    """Hugging Face directory before the warm start."""
    base: Path
    """Hugging Face directory that RL starts from; the same as `initial` without a warm start."""

    @property
    def is_ready(self) -> bool:
        """True if the base exists."""
        return (self.base / "config.json").is_file()


def prepare_starting_model(config: Config) -> StartingModel:
    """Return the run's model; create the recipe's random model if it is not cached."""
    if config.model.path is not None:
        initial = config.model.path.resolve()
    else:
        from titanrl.models.recipe import create_model

        made: dict[str, object] = config.model.recipe.model_dump(exclude_none=True)
        if config.model.family is not None:
            made["family"] = config.model.family
        initial = _cached("initial", config.cache_dir, made, config.seed)
        create_model(initial, config.model.recipe, config.seed, config.model.family)
    if config.warm_start is None:
        return StartingModel(initial, initial)
    settings: dict[str, object] = {
        "warm_start": config.warm_start.model_dump(),
        # Demonstrations do not depend on the excluded keys.
        "data": config.data.model_dump(mode="json", exclude={"rewards", "path", "mixture", "curriculum"}),
        "from": initial.name if config.model.path is None else _fingerprint(initial),
    }
    # The row layout changes the order of summation, so a base is reused only with the same trainer section.
    settings["trainer"] = config.trainer.model_dump(mode="json")
    return StartingModel(initial, _cached("base", config.cache_dir, settings, config.seed))


def _fingerprint(model_dir: Path) -> str:
    """Return a digest of a model directory's contents, independent of its path. Of large files, it covers both ends."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in model_dir.iterdir() if path.is_file()):
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(_END_BYTES))
            if path.stat().st_size > 2 * _END_BYTES:
                file.seek(-_END_BYTES, os.SEEK_END)
            digest.update(file.read())
    return digest.hexdigest()


@contextmanager
def new_base(model: StartingModel) -> Iterator[Path]:
    """Let the body create the base in a temporary folder; then rename it to `model.base`.

    If several processes do this at the same time, the first to finish provides the base.

    Yields:
        Path at which to create the base; it does not exist yet.
    """
    base = model.base
    base.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{base.name}-", dir=base.parent) as scratch:
        made = Path(scratch) / base.name
        yield made
        try:
            made.rename(base)
        except OSError:  # another process was faster
            if not model.is_ready:
                raise


def _cached(kind: str, cache_dir: Path, settings: dict[str, object], seed: int) -> Path:
    """Return the cache folder of a model created with these settings, unless another user could have put another one there."""
    text = json.dumps([_RECIPE_REVISION, seed, settings], sort_keys=True)
    folder = cache_dir.resolve() / f"{kind}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    if folder.exists() and not is_only_user() and (found := own_flaw(folder)):
        rule = f"a cached model must have been made by you ({found})"
        raise BrokenRules(BrokenRule({"cache_dir": str(cache_dir)}, rule, "set it to a folder of yours"))
    return folder


async def _warm_start(
    training: TrainingClient, config: Config, settings: WarmStartConfig, tokenizer: Tokenizer, console: Console
) -> None:
    """Warm-start the policy on demonstrations. While one step is computed, the next is already queued at the trainer."""
    stream = make_stream(config.data, tokenizer, config.seed)
    environment = config.data.environment
    calls_tools = settings.tool_calls
    if calls_tools is None:
        calls_tools = environment is not None and environment.function == "calculator"
    demonstrate = partial(_tool_demonstration, tokenizer) if calls_tools else None

    async def train(step: int, batch: Sequence[Demonstration]) -> None:
        passes = training.forward_backward(mean_loss_data(batch), "cross_entropy")
        rate = learning_rate(
            step,
            peak=settings.learning_rate,
            num_warmup_steps=settings.num_warmup_steps,
            decay="linear",
            num_steps=settings.num_steps,
        )
        options = AdamParams(learning_rate=rate, beta1=0.9, beta2=0.95, eps=1e-8, max_grad_norm=1.0)
        output, _ = await asyncio.gather(passes, training.optim_step(options))
        if step % _SHOW_EVERY_STEPS == 0 or step + 1 == settings.num_steps:
            console.progress("warm start", step + 1, settings.num_steps, f"loss {output.metrics['loss:sum']:.3f}")

    queued = asyncio.create_task(asyncio.sleep(0))
    for step, batch in enumerate(chain_sum_demonstrations(stream, tokenizer, settings, config.seed, demonstrate)):
        running, queued = queued, start_request(train(step, batch), f"warm start {step}")
        await running
    await queued


def _tool_demonstration(tokenizer: Tokenizer, prompt: Prompt, short: bool) -> Demonstration:
    """Return a demonstration that answers a sum with a tool call; if `short`, without the call."""
    renderer = PlainRenderer(tokenizer)
    answer, stop = str(prompt.entry["answer"]), list(renderer.stop_ids[:1])
    reply = [*tokenizer.encode(f"<answer>{answer}</answer>"), *stop]
    if short:
        return joined(prompt.token_ids, [(reply, True)])
    expression = prompt.entry["metadata"]["expression"].replace(" ", "")
    call = [*tokenizer.encode(f"<tool_call>{expression}</tool_call>"), *stop]
    response = renderer.render([{"role": "tool", "content": answer}], ())
    return joined(prompt.token_ids, [(call, True), (response, False), (reply, True)])


class Speaker:
    """The policy of a session as a `Caller`. Each call is rendered on its own; the prefix cache keeps the computed tokens."""

    def __init__(self, sampler: Sampler, renderer: Renderer, *, version: int | None = None) -> None:
        """Use the sampler of a session.

        Args:
            sampler: Requests to the generators. The section `rollout` of its configuration has the defaults of sampling.
            renderer: Renderer of conversations.
            version: Version of weights that never change, which generators call 0; None keeps the versions of the generators.
        """
        self._sampler, self._renderer, self._version = sampler, renderer, version
        self._tokenizer, self._rollout = sampler.tokenizer, sampler.config.rollout
        self._max_tokens = sampler.config.max_sequence_tokens
        self.stop: tuple[str, ...] = self._rollout.stop_texts

    async def call(self, call: Call, on_tokens: OnTokens | None = None) -> Reply:
        """Return the policy's reply; raise `Refused` if the prompt does not fit, or the policy cannot be sampled."""
        prompt_ids = self._prompt(call)
        request = GenerationRequest(token_ids=prompt_ids, sampling=self._sampling(call, self._max_tokens - len(prompt_ids)))
        try:
            completion = await self._sampler.stream(request, on_tokens)
        except ValueError as error:
            raise Refused(str(error), param=_source(call)) from error
        except DeadlineError as error:
            raise Refused(str(error), status=504) from error
        except FaultError as error:
            raise Refused(f"the policy cannot be sampled: {error}", status=503) from error
        if completion.finish_reason == "abort":
            raise Refused("the completion was cancelled. Try again.", status=503)
        if self._version is not None:
            completion = replace(completion, versions=np.full_like(completion.versions, self._version))
        return Reply(prompt_ids=prompt_ids, completion=completion, message=self._message(call, completion))

    def refused(self, refused: Refused) -> None:
        """Do nothing: the metrics of the endpoint count errors."""

    def read(self, call: Call, token_ids: Sequence[int]) -> Message:
        """Return the message that the first tokens of a completion are read as."""
        parsed = None if call.messages is None else self._renderer.parse(token_ids, call.tools)
        if parsed is None or (parsed.get("tool_calls") and not call.tools):
            return {"role": "assistant", "content": self._text(call, token_ids)}
        if not self._stop(call):
            return parsed
        content, end = parsed["content"], self._tokenizer.decode_completion(token_ids)[len(self._text(call, token_ids)) :]
        end = end if content.endswith(end) else end.rstrip()  # a renderer may have trimmed the content
        return parsed | {"content": content.removesuffix(end)}

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, including special tokens."""
        return self._tokenizer.token_text(token_id)

    def _message(self, call: Call, completion: Completion) -> Message:
        """Return the message of a whole completion, with unique ids of its tool calls.

        If one of them has no name, the message is text, because no client could use the call.
        """
        token_ids = completion.token_ids.tolist()
        message = self.read(call, token_ids)
        calls = [each | {"id": new_id("call_")} for each in message.get("tool_calls", ())]
        if not all(each["function"]["name"] for each in calls):
            return {"role": "assistant", "content": self._text(call, token_ids)}
        return {**message, "tool_calls": calls} if calls else message

    def _text(self, call: Call, token_ids: Sequence[int]) -> str:
        """Return the text of a completion without the stop text that ended it."""
        return self._tokenizer.decode_completion(token_ids, self._stop(call))

    def _stop(self, call: Call) -> tuple[str | int, ...]:
        return (*self._rollout.stop, *call.stop, *call.stop_ids)

    def _prompt(self, call: Call) -> tuple[int, ...]:
        def render() -> Sequence[int]:
            if call.messages is not None:
                return self._renderer.render(call.messages, call.tools)
            return self._tokenizer.encode_start(call.text) if call.text is not None else call.prompt_ids or ()

        messages = call.messages or ()
        num_chars = len(call.text or "") + sum(len(message["content"]) for message in messages)
        if num_chars > self._max_tokens * MAX_TOKEN_CHARS:  # do not tokenize what cannot fit
            raise Refused(f"{_source(call)}: too long ({num_chars} characters). {self._room}", param=_source(call))
        try:
            prompt_ids = tuple(render())
        except Exception as error:  # a chat template may reject any message with any exception, and the tokenizer any text
            reason = str(error).removeprefix(f"{self._tokenizer.path}: ")  # a path is not the client's business
            raise Refused(f"{_source(call)}: cannot be encoded: {reason}", param=_source(call)) from error
        if not 0 < len(prompt_ids) < self._max_tokens:
            raise Refused(f"{_source(call)}: has {len(prompt_ids)} tokens. {self._room}", param=_source(call))
        return prompt_ids

    @property
    def _room(self) -> str:
        return f"Prompt and completion together may have 2 to {self._max_tokens} tokens."

    def _sampling(self, call: Call, room: int) -> SamplingParams:
        rollout = self._rollout
        temperature = rollout.temperature if call.temperature is None else call.temperature
        seed = secrets.randbelow(MAX_SEED) if call.seed is None else call.seed
        if call.top_p == 0:
            raise Refused("top_p: must be greater than 0 (got 0). Use temperature=0 for greedy decoding.", param="top_p")
        return SamplingParams(
            max_new_tokens=min(call.max_tokens or rollout.max_new_tokens, room),
            temperature=temperature,
            seed=seed if temperature > 0 else None,
            prompt_logprobs=call.prompt_logprobs,
            top_p=rollout.top_p if call.top_p is None else call.top_p,
            top_k=rollout.top_k if call.top_k is None else call.top_k,
            min_p=rollout.min_p if call.min_p is None else call.min_p,
            stop=(*rollout.stop_texts, *call.stop),
            stop_ids=(*(self._renderer.stop_ids if call.messages is not None else ()), *rollout.stop_ids, *call.stop_ids),
        )


def trained_renderer(config: Config, tokenizer: Tokenizer) -> Renderer:
    """Return the renderer of the first environment that the policy is trained in.

    Without an environment, the policy was trained on prompts, and conversations are rendered as these were: without a chat
    template, or with the chat template of the model and its variables. If no variables are set, the renderer of the model's
    family does the same and also reads reasoning and tool calls; it is used if it is installed.

    Raises:
        ValueError: The renderer cannot be used with the model.
    """
    first, *_ = tasks = list(config.data.tasks.values())
    for task in tasks:
        if task.environment is not None:
            return make_renderer(tokenizer, task.environment.renderer, task.environment.renderer_options)
    if first.chat_template == "never" or not tokenizer.chat_template:
        return make_renderer(tokenizer, "plain", {})
    if not first.chat_template_kwargs:
        with suppress(ValueError):  # none is known for the family, or its package is missing
            return make_renderer(tokenizer, "auto", {})
    return make_renderer(tokenizer, "template", first.chat_template_kwargs)


def _source(call: Call) -> str:
    return "messages" if call.messages is not None else "prompt"


class Task:
    """Prompts and rewards configured in the sections `data` and `sandbox`; create one with `Session.task`.

    Example:
        task = await session.task()
        prompts = task.prompts(32)
        groups = await session.sampling.sample(prompts, num_samples=8)
        rewards = await task.rewards(prompts, groups)
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, plugins: Plugins) -> None:
        """Open the prompts; `start` loads the rewards.

        Raises:
            ValueError: The data cannot be used.
        """
        self._encoders = {name: make_encoder(data, tokenizer) for name, data in config.data.tasks.items()}
        self._prompts = {
            name: open_prompts(name, data, self._encoders[name], config.seed, plugins_of_data(plugins, data.key(name)))
            for name, data in config.data.tasks.items()
        }
        self._config, self._tokenizer, self._plugins = config, tokenizer, plugins
        self._mixture, self._draws = make_mixture(config, plugins), list[Draw]()
        self._tasks: Mapping[str, OpenTask] = {}

    async def start(self) -> None:
        """Load the rewards, and start their sandbox processes.

        Raises:
            SandboxUnavailable: This machine cannot confine a process.
            ValueError: A reward cannot be loaded.
        """
        self._tasks = await open_tasks(self._config, self._tokenizer, self._plugins, prompts=self._prompts)
        self._sets = EvaluationSets(self._config, self._tokenizer, self._plugins, self._tasks)

    def prompts(self, num: int, *, start: int = 0) -> list[Prompt]:
        """Return `num` training prompts from position `start` of the prompt stream, which is reshuffled every epoch.

        With `data.mixture`, the tasks alternate in the ratio of their weights. A curriculum stays at its first level, because
        it receives no rewards.
        """
        check_count("num", num, "Give the number of prompts.", least=0)
        streams = list(self._prompts.values())
        while self._mixture.has_state and len(self._draws) < start + num:
            self._draws.append(self._mixture.draw(len(self._draws)))
        draws = {index: self._draws[index] if self._draws else Draw(index) for index in range(start, start + num)}
        return [streams[draw.task].prompt(index, draw.level, draw.stream_index) for index, draw in draws.items()]

    def heldout(self, num: int, *, task: str | None = None) -> list[Prompt]:
        """Return the first held-out prompts of a task; None means the first task.

        Raises:
            ValueError: There are none, or fewer than `num`, or there is no such task.
        """
        check_count("num", num, "Give the number of prompts.")
        name = next(iter(self._prompts)) if task is None else task
        if name not in self._prompts:
            raise ValueError(f"task: no such task (got {name!r}). Choose one of {', '.join(self._prompts)}.")
        prompts = self._prompts[name].stream.heldout(num)
        if len(prompts) < num:
            raise ValueError(
                f"num: task {name} has {len(prompts)} held-out prompts (got {num}). Lower it, or raise data.heldout_fraction."
            )
        return [replace(prompt, task=name) for prompt in prompts]

    def hinted(self, prompts: Sequence[Prompt], hint: str) -> list[list[int]]:
        """Return the tokens of each prompt with the question replaced by a hint; see `hinted_entry`.

        Raises:
            BadRow: The data has no column of a name in the hint, or the result cannot be tokenized.
        """
        return [list(self._encoders[prompt.task](hinted_entry(prompt.entry, hint))) for prompt in prompts]

    async def score(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Sample]]) -> list[list[Scored]]:
        """Score the samples of each prompt. A `Scored` has the reward and its parts, or the error of a failed reward.

        Raises:
            TypeError: A prompt is not a prompt of a task.
            ValueError: The numbers of prompts and groups differ.
        """
        for index, prompt in enumerate(prompts):
            check_type(f"prompts[{index}]", prompt, Prompt, "a prompt of a task", "Use those of task.prompts or task.heldout.")
        fix = "Give the groups that were sampled from these prompts, in their order."
        if len(prompts) != len(groups):
            raise ValueError(f"groups: must be one per prompt, {len(prompts)} (got {len(groups)}). {fix}")
        for index, group in enumerate(groups):
            check_list(f"groups[{index}]", group, "samples", fix)
        return await asyncio.gather(
            *(
                self._tasks[prompt.task].scoring.score(
                    Answers(
                        entry=prompt.entry,
                        completions=tuple(sample.text for sample in group),
                        num_tokens=tuple(len(sample.tokens) for sample in group),
                        finish_reasons=tuple(sample.finish_reason for sample in group),
                        token_ids=tuple(sample.tokens.tolist() for sample in group),
                        decode=self._tokenizer.decode,
                        decode_raw=self._tokenizer.decode_raw,
                    )
                )
                for prompt, group in zip(prompts, groups, strict=True)
            )
        )

    async def rewards(self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Sample]]) -> list[list[float]]:
        """Return the reward of each sample of each prompt.

        Raises:
            ScorerError: The reward failed on a sample. `score` returns such errors instead.
            TypeError: A prompt is not a prompt of a task.
            ValueError: The numbers of prompts and groups differ.
        """
        scored = await self.score(prompts, groups)
        errors = [score.error for group in scored for score in group if score.reward is None]
        if errors:
            raise scorer_failed(f"{len(errors)} of {sum(map(len, groups))} samples", errors[0])
        return [[score.reward for score in group if score.reward is not None] for group in scored]

    async def evaluate(
        self,
        client: SamplingClient,
        num_prompts: int | None = None,
        *,
        name: str | None = None,
        record: RecordEvaluation | None = None,
    ) -> EvaluationResult:
        """Sample completions of an evaluation set, and score them.

        Args:
            client: Client of the model to evaluate.
            num_prompts: Number of prompts; the set's `num_prompts` by default.
            name: Evaluation set; None means the first, which is the default set unless it was left out.
            record: Function that records the groups of the first `logging.evaluation_prompts` prompts.

        Raises:
            ScorerError: The reward failed on every completion.
            ValueError: There is no such set, or its data cannot be used.
        """
        if num_prompts is not None:
            check_count("num_prompts", num_prompts, "None uses that of the set.")
        return await self._sets.evaluate(name, client.generate, num_prompts, record=record)

    async def close(self) -> None:
        """Stop the reward processes."""
        await self._sets.close()
        for task in self._tasks.values():
            await task.close()


class Session:
    """Running trainer and generators, and their clients."""

    def __init__(self, setup: SessionSetup, base: StartingModel, parts: Parts) -> None:
        self.config = setup.config
        self.run_dir = setup.run_dir
        self.tokenizer: Tokenizer = load_tokenizer(base.initial)
        """Tokenizer of the policy."""
        self._setup, self._base, self._parts = setup, base, parts
        self._tasks: list[Task] = []
        self._is_loaded = False
        self._sampler = None if parts.generators is None else Sampler(parts.generators, setup.config, self.tokenizer)
        weights = None if parts.trainer is None or parts.generators is None else parts.weights
        self._training = None if parts.trainer is None else TrainingClient(parts.trainer, self.run_dir, weights, self._sampler)

    def __repr__(self) -> str:
        clients = {"training": self._training, "sampling": self._sampler}
        usable = " and ".join(name for name, client in clients.items() if client is not None)
        return f"<Session for {usable} in {self.run_dir}{'' if self.fault is None else f', failed: {self.fault}'}>"

    @property
    def model(self) -> ModelDirectory:
        """Hugging Face directory of the policy, before a warm start."""
        return open_model(self._base.initial, self.config.model.family)

    @property
    def training(self) -> TrainingClient:
        """Client of the trainer.

        Raises:
            TitanRLError: The session has no trainer.
        """
        if self._training is None:
            raise TitanRLError("training: this session has no trainer. Connect with training=True.")
        return self._training

    async def new_model(
        self,
        name: str,
        *,
        rank: int | None = None,
        alpha: float | None = None,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = False,
    ) -> TrainingClient:
        """Create a LoRA adapter with an optimizer of its own on the session's base model; return its client.

        The adapters of a session share the frozen base. Each trains as if it were alone, bit for bit, and the trainer serves
        their requests in turn. States and exported models are written into the folder `models/NAME` of the run directory.

        Args:
            name: Name of the model, which is not in use.
            rank: Rank of the adapter, at most `trainer.lora.rank`, which is the default.
            alpha: Scale of the adapter, whose output is multiplied by alpha / rank; by default `trainer.lora.alpha`.
            seed: Seed of the initial adapter; by default that of the configuration.
            train_attn: True to train the projections of attention.
            train_mlp: True to train the projections of the feed-forward layers.
            train_unembed: Must be False: the output layer has no adapter.

        Raises:
            TitanRLError: The session has no trainer.
            TypeError: An argument has another type.
            ValueError: An argument is out of range, the session's trainer has no adapters (`trainer.lora`), there is a model of
                this name, or there are already `trainer.lora.max_models`.
        """
        if self._training is None:
            raise TitanRLError("new_model: this session has no trainer. Connect with training=True.")
        check_name(name)
        lora = self.config.trainer.lora
        if lora is None:
            raise ValueError("new_model: the trainer trains all weights (got trainer.lora=null). Set trainer.lora.")
        rank, alpha = lora.rank if rank is None else rank, lora.alpha if alpha is None else alpha
        check_count("rank", rank, f"Give a rank from 1 to {lora.rank}.", least=1)
        check_number("alpha", alpha, "Give a number above 0.", least=0.0)
        if alpha == 0.0:
            raise ValueError("alpha: must be above 0 (got 0). Give a number such as 32.")
        if seed is not None:
            check_count("seed", seed, "Give an integer, or None.", least=0)
        if train_unembed:
            raise ValueError("train_unembed: the output layer has no adapter (got True). Pass train_unembed=False.")
        if not (train_attn or train_mlp):
            raise ValueError("train_attn, train_mlp: nothing to train (got False and False). Set one of them to True.")
        spec = AdapterSpec(rank=rank, alpha=float(alpha), seed=seed, train_attn=bool(train_attn), train_mlp=bool(train_mlp))
        return TrainingClient(await self.trainer.new_model(name, spec), self.run_dir / "models" / name, sampler=self._sampler)

    @property
    def sampling(self) -> SamplingClient:
        """Client of the generators, which always samples with the newest published version.

        Raises:
            TitanRLError: The session has no generators.
        """
        if self._sampler is None:
            raise TitanRLError("sampling: this session has no generators. Connect with sampling=True.")
        return SamplingClient(self._sampler)

    async def use_temperature(self, temperature: float) -> None:
        """Divide the trainer's logits by another temperature, which is also the default of `sampling`.

        Raises:
            ValueError: It is not 0.01 to 2, the values of `rollout.temperature`.
        """
        check_number("temperature", temperature, "Give one such as 1.0.", least=0.01, most=2.0)
        await self.trainer.use_temperature(temperature)
        if self._sampler is not None:
            rollout = self._sampler.config.rollout.model_copy(update={"temperature": temperature})
            self._sampler.config = self._sampler.config.model_copy(update={"rollout": rollout})

    @property
    def base(self) -> SamplingClient:
        """Client of the model without the policy's LoRA adapter.

        Raises:
            TitanRLError: The generators do not have the model without its adapter.
        """
        if self._sampler is None or not self.config.publishes_adapters:
            raise TitanRLError("base: no generator serves the model without its adapter. Set weights.lora to adapters.")
        return SamplingClient(self._sampler, adapter=BASE)

    def speaker(self, *, version: int | None = None) -> Speaker:
        """Return the newest published version of the policy as a caller, for the HTTP endpoint.

        Args:
            version: Version of weights that never change; None keeps the versions of the generators.

        Raises:
            TitanRLError: The session has no generators.
            ValueError: No renderer is known for the model.
        """
        if self._sampler is None:
            raise TitanRLError("speaker: this session has no generators. Connect with sampling=True.")
        return Speaker(self._sampler, trained_renderer(self.config, self.tokenizer), version=version)

    async def task(self) -> Task:
        """Open the configured prompts, and start the reward processes, which run until the session closes.

        Raises:
            ValueError: The data or a reward cannot be used.
        """
        task = Task(self.config, self.tokenizer, self._setup.plugins)
        await task.start()
        self._tasks.append(task)
        return task

    async def teacher(self, path: str | Path, generator: GeneratorConfig | None = None) -> SamplingClient:
        """Start a generator with a frozen model in separate processes; it runs until the session closes.

        Args:
            path: Hugging Face directory of a model of a supported family. `data.max_prompt_tokens` and
                `rollout.max_new_tokens` also limit its sequences.
            generator: Engine options; the section `generator` by default. The teacher always has one replica.

        Raises:
            TypeError: `path` is not a path.
            ValueError: The directory has no complete model of a supported family.
        """
        check_type("teacher", path, (str, Path), "the directory of a model", "Give its path, such as teacher('models/large').")
        folder = Path(path).resolve()
        try:
            notes = list(open_model(folder).notes())
        except BrokenRules as error:
            raise BrokenRules(*(replace(rule, values={"teacher": str(path)}) for rule in error.broken)) from None
        for note in notes:
            self._setup.console.note(note)
        tokenizer = load_tokenizer(folder)
        files = RunFiles(run_dir=self.run_dir, model_dir=folder, stop_ids=tokenizer.stop_ids)
        config = self.config if generator is None else self.config.model_copy(update={"generator": generator})
        config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"routing": "own"})})  # not trained on
        generators = await self._parts.assembly.spawn_teacher(self._parts, config.generator, files)
        return SamplingClient(Sampler(generators, config, tokenizer))

    async def stop_for_restart(self) -> Parts | None:
        """Stop all processes except the generators, and return these for the next session of the run.

        If the generators have not started yet, or a host may have died, stop everything and return None.
        """
        have_started = self._is_loaded or self._setup.kept is not None
        if not (have_started and self._parts.can_keep_generators):
            await self.close()
            return None
        for task in self._tasks:
            await task.close()
        return await self._parts.stop_others()

    async def close(self) -> None:
        """Stop all processes. Problems are warnings, or log entries if a reported fault explains them."""
        problems = await failures_of(*(task.close() for task in self._tasks))
        problems += await self._parts.close(self.config.timeouts.close_s)
        report = self._setup.console.warn if self.fault is None else logger.info
        for problem in problems:
            report(f"while closing: {problem}")
        if self._setup.lock is not None:
            self._setup.console.close()
            self._setup.lock.release()

    @property
    def fault(self) -> FaultError | None:
        """Death or stall of a process that made all requests fail; None if there was none."""
        failure = self._parts.assembly.shared.supervisor.failure
        return failure if isinstance(failure, FaultError) else None

    async def failed(self) -> NoReturn:
        """Wait until the session fails, and raise the error, which all of its requests raise, too."""
        raise await self._parts.assembly.shared.supervisor.failed()

    # Components, for TitanRL's own loops

    @property
    def trainer(self) -> TrainerMesh:
        """Trainer ranks."""
        assert self._parts.trainer is not None, "this session has no trainer"
        return self._parts.trainer

    @property
    def generators(self) -> GeneratorMeshes:
        """Generator replicas."""
        assert self._parts.generators is not None, "this session has no generators"
        return self._parts.generators

    @property
    def evaluator(self) -> GeneratorMeshes:
        """Generator for background evaluations."""
        assert self._parts.evaluator is not None, "this session does not evaluate in the background"
        return self._parts.evaluator

    @property
    def rollouts(self) -> Rollouts:
        """Rollout workers and buffer."""
        assert self._parts.rollouts is not None, "this session has no rollouts"
        return self._parts.rollouts

    @property
    def weights(self) -> WeightSync:
        """Weight transfer from the trainer to the generators."""
        return self._parts.weights

    async def load(self) -> None:
        """Start the actors, and load or warm-start the policy. Generators have no weights before the first publication."""
        parts = self._parts
        loading = [] if self._training is None else [self._load_policy(self._training)]
        loading += [mesh.start() for mesh in (parts.generators, parts.evaluator) if mesh is not None]
        if parts.rollouts is not None:
            loading.append(parts.rollouts.workers.start())
        await asyncio.gather(*loading)  # raises the first error at once; `close` ends the others
        self._is_loaded = True

    async def _load_policy(self, training: TrainingClient) -> None:
        base, config = self._base, self.config
        await self.trainer.start()
        await self.trainer.load_model(base.base if base.is_ready else base.initial)
        if not base.is_ready and config.warm_start is not None:
            await _warm_start(training, config, config.warm_start, self.tokenizer, self._setup.console)
            with new_base(base) as folder:
                await self.trainer.export_model(folder, config.trainer.dtype)  # RL continues without rounding
            await self.trainer.start_over()


async def open_session(setup: SessionSetup) -> Session:
    """Start the processes of a session; `Session.load` starts their actors."""
    base = prepare_starting_model(setup.config)
    if not setup.roles.trainer and not base.is_ready:
        raise TitanRLError(
            f"training: False requires an existing model (got {base.base}, which a warm start would create). "
            "Set model.path, or remove warm_start."
        )
    model_dir = base.initial if setup.roles.trainer else base.base  # with a trainer, the base need not exist yet
    stop_ids = load_tokenizer(base.initial).stop_ids
    files = RunFiles(run_dir=setup.run_dir, model_dir=model_dir, stop_ids=stop_ids, plugins=setup.plugins)
    parts = await assemble(setup, files)
    return Session(setup, base, parts)


class Connection:
    """A session that starts when the connection is awaited or entered with `async with`."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Session]]) -> None:
        self._start = start
        self._session: Session

    def __await__(self) -> Generator[Any, None, Session]:
        """Start the session; the caller must close it."""
        return self._start().__await__()

    async def __aenter__(self) -> Session:
        self._session = await self._start()
        return self._session

    async def __aexit__(self, *raised: object) -> None:
        await self._session.close()


def connect(config: Config, *, training: bool = True, sampling: bool = True, console: Console | None = None) -> Connection:
    """Start a trainer, generators, or both for a custom loop, and stop them at the end of the `async with` body.

    With both, the generators start with the trainer's weights as version 0. In a notebook, where a body cannot span cells,
    await the result, and call `Session.close` at the end.

    Example:
        async with connect(load_config("quickstart")) as session:
            groups = await session.sampling.sample(["1 + 2 ="], num_samples=4)
            output = await session.training.forward_backward(data, "ppo")
            await session.training.optim_step(AdamParams(learning_rate=1e-4))
            client = await session.training.publish()

    Args:
        config: Configuration. The sections `data`, `rollout` and `algorithm` only set sequence lengths, sampling temperature
            and loss options.
        training: True to start a trainer.
        sampling: True to start generators. Without a trainer, they serve the configured model unchanged.
        console: Progress display; created from `config.logging` by default.

    Raises:
        TypeError: `config` is not a `Config`.
        ConfigError: The session cannot start on this machine.
    """
    check_type("connect", config, Config, "a Config", "Load it: connect(load_config('run.yaml')).")
    if not (training or sampling):
        raise TitanRLError("connect: nothing to start (got training=False, sampling=False). Set one of them to True.")
    return Connection(partial(_start, config, Roles(trainer=training, generators=sampling), console))


async def _start(config: Config, roles: Roles, console: Console | None) -> Session:
    """Start a session in a new run directory."""
    plugins = plugins_of(config, {})
    preflight(config, plugins=plugins, training=roles.trainer, sampling=roles.generators, rollouts=False)
    config = with_declared_traits(config, plugins)
    with contextlib.ExitStack() as undo:
        lock = claim_new_run(config.run_dir)
        undo.callback(lock.release)
        run_dir = lock.path.resolve()
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        replace_text(run_dir / "config.yaml", recorded_config(config))
        console = console or Console(config.logging.console, total_steps=0, title=config.name)
        undo.callback(console.close)
        for note in policy_notes(config):
            console.note(note)
        setup = SessionSetup(config=config, run_dir=run_dir, console=console, roles=roles, plugins=plugins, lock=lock)
        session = await open_session(setup)
        undo.pop_all()
    try:
        await session.load()
        if roles.trainer and roles.generators:
            await session.training.publish()
    except BaseException:  # including interrupts: no process may outlive a failed start
        await session.close()
        raise
    return session
