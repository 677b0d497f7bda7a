"""Names of cached models, conversations with the policy of a session, and its tasks."""

import asyncio
import os
import shutil
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.agents.byte_model import write_byte_tokenizer
from tests.foreign import NOBODY, ROOT_ONLY, USER
from titanrl.carriers.types import Completion, FinishReason, GenerationRequest, OnTokens
from titanrl.config import Config, load_config
from titanrl.config.errors import BrokenRules
from titanrl.data.streams import make_encoder, make_stream
from titanrl.data.tokenizer import Tokenizer, load_tokenizer, write_tokenizer
from titanrl.environments import Tool
from titanrl.launch.supervision import ActorDiedError, DeadlineError
from titanrl.rollout.renderers import PlainRenderer, TemplateRenderer, make_renderer
from titanrl.serving.calls import Call, Feed, Refused
from titanrl.session.session import (
    Session,
    Speaker,
    StartingModel,
    Task,
    _warm_start,
    new_base,
    prepare_starting_model,
    trained_renderer,
)


def base_in(folder: Path, *overrides: str) -> StartingModel:
    return prepare_starting_model(load_config("configs/quickstart.yaml", [f"cache_dir={folder}", *overrides]))


def test_base_has_the_same_name_wherever_cache_and_model_lie(tmp_path: Path) -> None:
    first, second = base_in(tmp_path / "a"), base_in(tmp_path / "b")
    assert first.base.name == second.base.name
    copies = [shutil.copytree(first.initial, tmp_path / name) for name in ("copy", "other")]
    named = [base_in(tmp_path / "a", f"model.path={copy}").base.name for copy in copies]
    assert named[0] == named[1] != first.base.name
    with (copies[1] / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert base_in(tmp_path / "a", f"model.path={copies[1]}").base.name != named[0]
    assert base_in(tmp_path / "a", "warm_start.num_steps=469").base.name != first.base.name


def test_first_of_two_processes_provides_the_base(tmp_path: Path) -> None:
    model = StartingModel(tmp_path / "initial", tmp_path / "cache" / "base-1")
    with new_base(model) as slow:
        slow.mkdir()
        (slow / "config.json").write_text("slow")
        assert not model.is_ready
        with new_base(model) as fast:
            assert fast != slow
            fast.mkdir()
            (fast / "config.json").write_text("fast")
        assert model.is_ready
    assert (model.base / "config.json").read_text() == "fast"
    assert [path.name for path in model.base.parent.iterdir()] == ["base-1"]


@ROOT_ONLY
def test_cached_model_of_another_user_is_refused(tmp_path: Path) -> None:
    initial = base_in(tmp_path).initial
    os.chown(initial, NOBODY, NOBODY)
    with pytest.raises(BrokenRules, match=rf"cache_dir=.*must have been made by you \(.* belongs to the user {USER}\)"):
        base_in(tmp_path)


ADD = Tool(name="add", parameters={"properties": {"a": {}, "b": {}}})
ASKED = ({"role": "user", "content": "añ?"},)
LENGTHS = ("data.max_prompt_tokens=200", "rollout.max_new_tokens=100", "trainer.row_tokens=300")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text('{"eos_token_id": 1}')
    return load_tokenizer(folder)


class Said:
    """A sampler that returns a completion with a given text, and keeps the request."""

    def __init__(self, tokenizer: Tokenizer, text: str, reason: FinishReason = "stop", error: Exception | None = None) -> None:
        self.tokenizer, self.config, self.error = tokenizer, load_config("quickstart", LENGTHS), error
        token_ids = [*tokenizer.encode(text), *(tokenizer.eos_ids[:1] if reason == "stop" else ())]
        self.completion = Completion(
            token_ids=np.asarray(token_ids, np.int64),
            logprobs=np.zeros(len(token_ids), np.float32),
            versions=np.zeros(len(token_ids), np.int64),
            finish_reason=reason,
        )
        self.requests = list[GenerationRequest]()

    async def stream(self, request: GenerationRequest, on_tokens: OnTokens | None) -> Completion:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return self.completion

    def speaker(self, **options: Any) -> Speaker:
        return Speaker(self, make_renderer(self.tokenizer, "plain", {}), **options)  # type: ignore[arg-type]


def test_conversation_is_rendered_and_reply_read(tokenizer: Tokenizer) -> None:
    said = Said(tokenizer, "2 ñ")
    reply = asyncio.run(said.speaker(version=7).call(Call(messages=ASKED, max_tokens=5, temperature=0.0)))
    (request,) = said.requests
    assert reply.message == {"role": "assistant", "content": "2 ñ"}
    assert reply.prompt_ids == request.token_ids == tuple(tokenizer.encode_start("añ?"))
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.seed) == (5, 0.0, None)
    assert set(reply.completion.versions.tolist()) == {7}


def test_conversation_is_rendered_as_in_training(tokenizer: Tokenizer) -> None:
    config = load_config("quickstart", ["data.environment={function: calculator, renderer: plain}"])
    assert isinstance(trained_renderer(config, tokenizer), PlainRenderer)
    config = load_config("quickstart", ["data.chat_template=never"])
    assert isinstance(trained_renderer(config, tokenizer), PlainRenderer)
    # The template of the tokenizer belongs to no family.
    assert isinstance(trained_renderer(load_config("quickstart"), tokenizer), TemplateRenderer)


def test_conversation_is_rendered_with_the_variables_of_the_template(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "chat_template.jinja").write_text("{{ mood }}: {{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(tmp_path)
    config = load_config("quickstart", ["data.chat_template_kwargs={mood: glad}"])
    rendered = trained_renderer(config, tokenizer).render(ASKED, ())
    assert rendered == make_encoder(config.data, tokenizer)({"question": "añ?"}) == tokenizer.encode_chat("glad: añ?")


def test_limits_default_to_those_of_the_run(tokenizer: Tokenizer) -> None:
    said = Said(tokenizer, "a")
    speaker = said.speaker()
    asyncio.run(speaker.call(Call(text="a")))
    asyncio.run(speaker.call(Call(prompt_ids=tuple([5] * 290))))
    asyncio.run(speaker.call(Call(text="a", max_tokens=1000, seed=3, stop=("x",), stop_ids=(9,), top_p=0.5)))
    first, second, third = (request.sampling for request in said.requests)
    assert (first.max_new_tokens, first.temperature) == (100, 1.0)
    assert first.seed is not None
    assert second.max_new_tokens == 10  # what is left
    assert (third.max_new_tokens, third.seed, third.stop, third.stop_ids, third.top_p) == (299, 3, ("x",), (9,), 0.5)


@pytest.mark.parametrize(
    ("call", "param", "problem"),
    [
        (Call(text=""), "prompt", "has 0 tokens"),
        (Call(prompt_ids=()), "prompt", "has 0 tokens"),
        (Call(text="a" * 300), "prompt", "has 300 tokens"),
        (Call(messages=({"role": "user", "content": "a" * 1_000_000},)), "messages", "too long"),
        (Call(text="a", top_p=0.0), "top_p", "greater than 0"),
    ],
)
def test_prompt_that_does_not_fit_is_refused(tokenizer: Tokenizer, call: Call, param: str, problem: str) -> None:
    with pytest.raises(Refused, match=problem) as refused:
        asyncio.run(Said(tokenizer, "a").speaker().call(call))
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError("prompt: token ids"), 400), (DeadlineError("late"), 504), (ActorDiedError("dead"), 503)],
)
def test_failures_have_a_status(tokenizer: Tokenizer, error: Exception, status: int) -> None:
    with pytest.raises(Refused) as refused:
        asyncio.run(Said(tokenizer, "a", error=error).speaker().call(Call(text="a")))
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("text", "tools", "content", "arguments"),
    [
        ('I <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', (ADD,), "I ", [{"a": 1}]),
        ('<tool_call>{"name": "add", "arguments": 3}</tool_call>', (ADD,), "", ["3"]),
        ("I <tool_call>add</tool_call> x", (ADD,), "I <tool_call>add</tool_call> x", []),  # without a name
        ('<tool_call>{"name": "add"}</tool_call>', (), '<tool_call>{"name": "add"}</tool_call>', []),
    ],
)
def test_tool_calls_are_read_if_the_client_has_tools(
    tokenizer: Tokenizer, text: str, tools: tuple[Tool, ...], content: str, arguments: list[Any]
) -> None:
    speaker = Said(tokenizer, text).speaker()
    replies = [asyncio.run(speaker.call(Call(messages=ASKED, tools=tools))) for _ in range(2)]
    message = replies[0].message
    assert message["content"] == content
    assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == arguments
    ids = [call["id"] for reply in replies for call in reply.message.get("tool_calls", ())]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("messages", [ASKED, None], ids=["chat", "text"])
def test_stop_text_is_no_part_of_the_reply(tokenizer: Tokenizer, messages: Any) -> None:
    call = Call(messages=messages, text=None if messages else "a", stop=("END",))
    reply = asyncio.run(Said(tokenizer, "one END", "length").speaker().call(call))
    assert reply.message["content"] == "one "


@pytest.mark.parametrize(
    "text", ["añ€ 😀 <b> z ", 'so <tool_call>{"name": "add"}</tool_call>', "I <tool_call>add</tool_call> x"]
)
@pytest.mark.parametrize("step", [1, 3])
def test_pieces_of_a_stream_add_up_to_the_reply(tokenizer: Tokenizer, text: str, step: int) -> None:
    speaker, call = Said(tokenizer, text).speaker(), Call(messages=ASKED, tools=(ADD,))
    reply = asyncio.run(speaker.call(call))
    feed, token_ids = Feed(speaker, call, by_token=False), reply.completion.token_ids.tolist()
    pieces = [feed.take(token_ids[i : i + step], [0.0] * len(token_ids[i : i + step])) for i in range(0, len(token_ids), step)]
    last = feed.finish(reply)
    assert "".join(piece.text for piece in pieces if piece is not None) + last.text == reply.message["content"]
    assert [token for piece in [*pieces, last] if piece is not None for token in piece.token_ids] == token_ids
    assert step > 1 or any(piece is not None for piece in pieces)


SUMS = {"task_config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}, "num_prompts": 50}


def test_mixture_alternates_tasks_in_ratio_of_weights(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    mixture = {"sums": {"weight": 2.0}, "others": {}}
    task = Task(Config.model_validate({"name": "a", "num_steps": 1, "data": SUMS | {"mixture": mixture}}), tokenizer, {})
    prompts = task.prompts(60)
    assert [prompt.index for prompt in prompts] == list(range(60))
    assert [prompt.task for prompt in prompts].count("sums") == 40
    assert task.prompts(10, start=30) == prompts[30:40]
    assert {prompt.task for prompt in task.heldout(3, task="others")} == {"others"}
    assert task.heldout(3)[0].task == "sums"
    with pytest.raises(ValueError, match="no such task"):
        task.heldout(1, task="words")


def test_prompts_without_mixture_follow_the_stream(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    config = Config.model_validate({"name": "a", "num_steps": 1, "seed": 3, "data": SUMS})
    stream = make_stream(config.data, tokenizer, seed=3)
    assert Task(config, tokenizer, {}).prompts(4, start=60) == [stream[index] for index in range(60, 64)]


def session_of(**parts: Any) -> Session:
    """Return a session of parts that are no processes, with a trainer that never replies."""
    session = object.__new__(Session)
    console = SimpleNamespace(warn=print)
    session._parts = SimpleNamespace(**{"generators": None, "evaluator": None, "rollouts": None} | parts)  # type: ignore[assignment]
    session._setup = SimpleNamespace(console=console, lock=None)  # type: ignore[assignment]
    session._base, session._training = StartingModel(Path("initial"), Path("base")), object()  # type: ignore[assignment]
    session.config = load_config("configs/quickstart.yaml")
    return session


async def test_actor_that_fails_to_start_ends_the_start_while_the_policy_is_loaded() -> None:
    async def fail() -> None:
        raise ValueError("no engine")

    trainer = SimpleNamespace(start=asyncio.Event().wait)
    session = session_of(trainer=trainer, generators=SimpleNamespace(start=fail))
    with pytest.raises(ValueError, match="no engine"):
        await asyncio.wait_for(session.load(), 5)


async def test_session_stops_its_processes_although_a_reward_fails_to_close(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise OSError("the sandbox is gone")

    async def close(timeout_s: float) -> list[str]:
        return [f"closed within {timeout_s:g} s"]

    supervisor = SimpleNamespace(failure=None)
    session = session_of(close=close, assembly=SimpleNamespace(shared=SimpleNamespace(supervisor=supervisor)))
    session._tasks = [SimpleNamespace(close=fail)]  # type: ignore[list-item]
    await session.close()
    within = session.config.timeouts.close_s
    assert capsys.readouterr().out == f"while closing: the sandbox is gone\nwhile closing: closed within {within:g} s\n"


async def test_failed_warm_start_raises_its_error_itself(tokenizer: Tokenizer) -> None:
    class Training:
        def forward_backward(self, data: object, loss: str) -> "asyncio.Task[None]":
            return asyncio.create_task(self.fail())

        optim_step = partialmethod(forward_backward, loss="")

        async def fail(self) -> None:
            raise ActorDiedError("trainer_0_0 exited", "trainer")

    config = load_config("configs/quickstart.yaml", LENGTHS)
    assert config.warm_start is not None
    with pytest.raises(ActorDiedError):
        await _warm_start(Training(), config, config.warm_start, tokenizer, SimpleNamespace())  # type: ignore[arg-type]
