"""Episodes that programs play, over HTTP with the official client, against a policy that replies with planned texts."""

import asyncio
import sys
import textwrap
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.agents.byte_model import write_byte_tokenizer
from titanrl.carriers.rewards import Answers, Scored
from titanrl.carriers.types import Completion, GenerationRequest, Group, OnTokens, Prompt
from titanrl.config import Config
from titanrl.config.errors import ConfigError
from titanrl.data.tokenizer import EOS_ID, Tokenizer, load_tokenizer
from titanrl.rollout.episodes import Episodes, start_episodes
from titanrl.serving.app import Limits
from titanrl.serving.http import listen

PROMPT = Prompt(index=3, task="sums", text="1+1=", token_ids=(7, 8), entry={"question": "1+1=", "answer": "2", "metadata": {}})
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    return load_tokenizer(folder)


class Policy:
    """Replies with given texts in turn, and records the requests with their completions."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts
        self.record: list[tuple[GenerationRequest, Completion]] = []
        self.sizes: list[int] = []

    async def __call__(self, requests: Sequence[GenerationRequest], *, on_tokens: OnTokens | None = None) -> list[Completion]:
        self.sizes.append(len(requests))
        await asyncio.sleep(0)
        completions = [self._complete(request) for request in requests]
        if on_tokens is not None:
            for token, logprob in zip(completions[0].token_ids[:-1].tolist(), completions[0].logprobs.tolist(), strict=False):
                on_tokens([token], [logprob])
                await asyncio.sleep(0.01)
        return completions

    def _complete(self, request: GenerationRequest) -> Completion:
        text, limit = self._texts[len(self.record) % len(self._texts)], request.sampling.max_new_tokens
        ids = [*self._tokenizer.encode(text), EOS_ID][:limit]
        completion = Completion(
            token_ids=np.array(ids),
            logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32),
            versions=np.full(len(ids), len(self.record)),
            finish_reason="stop" if ids[-1] == EOS_ID else "length",
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else np.full(len(request.token_ids) - 1, -2.0),
        )
        self.record.append((request, completion))
        return completion


def play(
    tokenizer: Tokenizer,
    program: Any,
    texts: Sequence[str] | Policy = ("2",),
    *,
    in_round: bool = False,
    num: int = 1,
    after: Callable[[], Awaitable[object]] | None = None,
    **environment: Any,
) -> tuple[Group, Policy]:
    """Play a group of `num` episodes; the configured reward is 1 for the answer 2. `after` runs before the endpoint closes."""
    section = {"renderer": "template", "program": program, "max_turns": 4, "retries": 0, "max_conversation_tokens": 900}
    values = {
        "name": "programs",
        "num_steps": 1,
        "model": {"recipe": {"max_positions": 1000}},
        "data": {"environment": {**section, **environment}},
        "rollout": {"max_new_tokens": 80},
        "trainer": {"row_tokens": 900},
    }
    config = Config.model_validate(values)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"group_size": num})})
    policy = texts if isinstance(texts, Policy) else Policy(tokenizer, texts)

    async def score(answers: Answers) -> list[Scored]:
        values = [float(text == "2") for text in answers.completions]
        return [Scored(reward=value, parts={"answer": value}) for value in values]

    async def run() -> Group:
        episodes: Episodes = await start_episodes(config, tokenizer, score, {})
        try:
            group = await asyncio.wait_for(episodes.roll_out(PROMPT, policy, in_round=in_round), 60)
            if after is not None:
                await after()
            return group
        finally:
            await episodes.close()

    return asyncio.run(run()), policy


def module(tmp_path: Path, code: str) -> str:
    """Write a program as an async function `play(task)`, with a client; return its import path."""
    lines = ["import asyncio, openai, httpx", "async def play(task):"]
    lines += ["    async with openai.AsyncOpenAI(base_url=task.url, api_key=task.key, max_retries=0) as client:"]
    lines += ["        create = client.chat.completions.create"]
    body = textwrap.indent(textwrap.dedent(code), "        ")
    file = tmp_path / f"program_{len(list(tmp_path.iterdir()))}.py"  # a file is imported once per process
    file.write_text("\n".join(lines) + "\n" + body)
    return f"{file}:play"


ASK = """
    messages = [{"role": "user", "content": task.question}]
    reply = await create(model=task.model, messages=messages)
"""


@pytest.mark.parametrize("in_round", [False, True])
def test_function_that_asks_once(tokenizer: Tokenizer, tmp_path: Path, in_round: bool) -> None:
    group, policy = play(tokenizer, module(tmp_path, ASK), ["2", "3"], in_round=in_round, num=4)
    assert not group.failures
    assert sorted(rollout.reward for rollout in group.rollouts) == [0.0, 0.0, 1.0, 1.0]
    for rollout in group.rollouts:
        assert (len(rollout.segments), rollout.finish_reason, rollout.metrics["calls"]) == (1, "stop", 1)
    requests = {tuple(request.token_ids): request for request, _ in policy.record}
    assert len(requests) == 1
    assert len({request.sampling.seed for request, _ in policy.record}) == 4
    recorded = sorted(rollout.sampled.token_ids.tolist() for rollout in group.rollouts)
    assert recorded == sorted(completion.token_ids.tolist() for _, completion in policy.record)
    if in_round:  # one call of the generators per turn and retry, also after the end
        assert policy.sizes == [4, 0, 0, 0]


def test_program_gets_the_log_probabilities_of_its_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = """
        reply = await client.completions.create(model=task.model, prompt="1 + 1", extra_body={"prompt_logprobs": 0})
        first, *rest = reply.choices[0].prompt_logprobs
        return {"reward": float(first is None and all(entry["logprob"] == -2.0 for each in rest for entry in each.values()))}
    """
    group, policy = play(tokenizer, module(tmp_path, code), ["2"], returns="rewards")
    assert not group.failures
    assert [rollout.reward for rollout in group.rollouts] == [1.0]
    assert [request.sampling.prompt_logprobs for request, _ in policy.record] == [0]


@pytest.mark.parametrize("retries", [0, 1])
def test_program_that_uses_all_of_its_calls_in_a_round(tokenizer: Tokenizer, tmp_path: Path, retries: int) -> None:
    options: dict[str, Any] = {"in_round": True, "max_turns": 1, "retries": retries}
    group, policy = play(tokenizer, module(tmp_path, ASK), ["2"], num=2, **options)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 1.0]
    assert policy.sizes == [2, *[0] * retries]
    group, policy = play(tokenizer, module(tmp_path, ASK + "    raise OSError"), num=2, **options)
    assert [failure.outcome for failure in group.failures] == ["environment_error"] * 2
    assert policy.sizes == [2] * (retries + 1)


def test_command_with_the_official_client(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text(
        "import os, openai\n"
        "client = openai.OpenAI()\n"  # OPENAI_BASE_URL and OPENAI_API_KEY
        "messages = [{'role': 'user', 'content': 'add'}]\n"
        "for content in ('so?', 'end'):\n"
        "    reply = client.chat.completions.create(model=os.environ['TITANRL_MODEL'], messages=messages)\n"
        "    messages += [reply.choices[0].message, {'role': 'user', 'content': content}]\n"
        "print(reply.choices[0].message.content)\n"
    )
    group, _ = play(tokenizer, f"{sys.executable} {file}", ["why", "2"], returns="answer")
    assert [failure.error for failure in group.failures] == []
    (rollout,) = group.rollouts
    assert (rollout.reward, len(rollout.segments), len(rollout.turns)) == (1.0, 1, 2)
    assert [message["role"] for message in group.conversations[0]] == ["user", "assistant"] * 2


def test_tools_streams_and_parallel_calls(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = f"""
        messages = [{{"role": "user", "content": task.question}}]
        tools = [{ADD!r}]
        stream = await create(model=task.model, messages=messages, tools=tools, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        name = calls[0].function.name
        arguments = "".join(call.function.arguments or "" for call in calls)
        said = {{"role": "assistant", "content": None, "tool_calls": [
            {{"id": calls[0].id, "type": "function", "function": {{"name": name, "arguments": arguments}}}}]}}
        result = {{"role": "tool", "tool_call_id": calls[0].id, "content": "2"}}
        both = await asyncio.gather(*(
            create(model=task.model, messages=[*messages, said, result, {{"role": "user", "content": text}}], tools=tools)
            for text in ("a", "b")
        ))
        again = [call.id for reply in both for call in reply.choices[0].message.tool_calls or []]
        return {{"reward": len({{calls[0].id, *again}})}}
    """
    group, policy = play(tokenizer, module(tmp_path, code), [CALL, CALL, "2"], returns="rewards")
    assert [failure.error for failure in group.failures] == []
    (rollout,) = group.rollouts
    assert rollout.reward_parts == {"program": 2.0}
    assert (len(rollout.segments), len(rollout.turns), rollout.metrics["segments"]) == (2, 3, 2)
    known = [(list(request.token_ids), completion) for request, completion in policy.record]
    first = known[0][0] + known[0][1].token_ids.tolist()
    assert all(ids[: len(first)] == first for ids, _ in known[1:])  # both extend the sampled tokens
    assert sum(int(segment.mask.sum()) for segment in rollout.segments) == sum(len(c.token_ids) for _, c in known)


STREAM = """
    messages = [{"role": "user", "content": task.question}]
    stream = await create(model=task.model, messages=messages, stream=True)
    texts = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices[0].delta.content]
"""


@pytest.mark.parametrize(("in_round", "num_chunks"), [(False, 5), (True, 1)])
def test_tokens_are_streamed_while_they_are_sampled(
    tokenizer: Tokenizer, tmp_path: Path, in_round: bool, num_chunks: int
) -> None:
    code = STREAM + "    return {'rewards': {'chunks': len(texts), 'whole': ''.join(texts) == 'abcde'}}"
    group, policy = play(tokenizer, module(tmp_path, code), ["abcde"], returns="rewards", in_round=in_round)
    assert group.rollouts[0].reward_parts == {"chunks": num_chunks, "whole": 1.0}
    assert group.rollouts[0].sampled.token_ids.tolist() == policy.record[0][1].token_ids.tolist()


def test_stream_that_is_sampled_again_fails_and_is_not_trained_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A replica that dies may have streamed tokens that its replacement does not sample."""
    code = f"""
        try:
            {textwrap.indent(textwrap.dedent(STREAM), " " * 12).strip()}
        except openai.APIError as error:
            said = str(error)
        {ASK.strip().splitlines()[1].strip()}
        return {{"reward": "cancelled" in said}}
    """

    class Lost(Policy):
        async def __call__(
            self, requests: Sequence[GenerationRequest], *, on_tokens: OnTokens | None = None
        ) -> list[Completion]:
            if on_tokens is not None:
                on_tokens(self._tokenizer.encode("lost"), [0.0] * 4)
                on_tokens = None
            return await super().__call__(requests, on_tokens=on_tokens)

    group, policy = play(tokenizer, module(tmp_path, code), Lost(tokenizer, ["other", "2"]), returns="rewards")
    assert [failure.error for failure in group.failures] == []
    assert (group.rollouts[0].reward, len(policy.record)) == (1.0, 2)
    assert group.rollouts[0].sampled.token_ids.tolist() == [*tokenizer.encode("2"), EOS_ID]


def test_reply_without_a_required_call_succeeds_and_is_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = f"""
        messages, tools = [{{"role": "user", "content": task.question}}], [{ADD!r}]
        named = {{"type": "function", "function": {{"name": "add"}}}}
        for choice in ("required", named, "auto", "required"):
            reply = await create(model=task.model, messages=messages, tools=tools, tool_choice=choice)
            if choice == "required" and reply.choices[0].message.tool_calls is None:
                assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("2", "stop")
    """
    group, _ = play(tokenizer, module(tmp_path, code), ["2", "2", "2", CALL])
    assert [failure.error for failure in group.failures] == []
    assert (group.rollouts[0].metrics["calls"], group.rollouts[0].metrics["nonconforming_replies"]) == (4, 2)


CAUGHT = """
    for ask in (client.embeddings.create(model=task.model, input="a"), create(model="other", messages=[])):
        try:
            await ask
        except openai.NotFoundError:
            pass
"""


@pytest.mark.parametrize(
    ("code", "outcome", "problem"),
    [
        ("raise RuntimeError('boom')", "environment_error", "RuntimeError: boom (program_0.py:"),
        ("return 1.0", "environment_error", "made no call of the policy"),
        (
            CAUGHT + "    return 1.0",
            "environment_error",
            "no call of the policy that was answered; the last error was: model: must",
        ),
        (ASK + "    return 'many'", "reward_error", "finite number"),
        (ASK + "    return {'score': 1}", "environment_error", "must have the key"),
        (ASK + "    return float('nan')", "reward_error", "finite number"),
        (ASK + "    await asyncio.sleep(60)", "timeout", "did not end in time"),
        (ASK + "    raise asyncio.CancelledError", "environment_error", "CancelledError"),
        (ASK + "    raise SystemExit(3)", "environment_error", "SystemExit: 3"),
        (ASK + "    raise KeyboardInterrupt", "environment_error", "KeyboardInterrupt"),
    ],
)
@pytest.mark.parametrize("in_round", [False, True])
def test_failures_are_typed_retried_and_excluded(
    tokenizer: Tokenizer, tmp_path: Path, code: str, outcome: str, problem: str, in_round: bool
) -> None:
    path = module(tmp_path, code)
    limit_s = 0.4 if outcome == "timeout" else 30.0
    options: dict[str, Any] = {"returns": "rewards", "retries": 1, "episode_timeout_s": limit_s}
    group, _ = play(tokenizer, path, in_round=in_round, **options)
    assert group.rollouts == ()
    (failure,) = group.failures
    assert (failure.outcome, group.counts[outcome], group.counts["episodes"]) == (outcome, 2, 2)
    assert outcome != "timeout" or group.counts["environment_ms"] >= 790, "two episodes to their limit"
    assert problem in failure.error
    assert "data.environment: data.environment" not in failure.error


def test_number_of_episodes_does_not_limit_their_calls(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(listen.__kwdefaults__, "max_connections", 2)
    monkeypatch.setitem(Limits.__init__.__kwdefaults__, "max_calls", 2)
    group, policy = play(tokenizer, module(tmp_path, ASK), num=4, in_round=True)
    assert ([failure.error for failure in group.failures], policy.sizes[0]) == ([], 4)


def test_errors_that_a_program_catches_are_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    group, _ = play(tokenizer, module(tmp_path, CAUGHT + ASK))
    assert [(rollout.metrics["calls"], rollout.metrics["refused_calls"]) for rollout in group.rollouts] == [(1, 2)]


def test_malformed_calls_in_the_protocol_of_anthropic_do_not_branch(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = """
        messages = [{"role": "user", "content": task.question}]
        body = {"model": task.model, "max_tokens": 40, "messages": messages, "tools": [{"name": "f", "input_schema": {}}]}
        async with httpx.AsyncClient(headers={"x-api-key": task.key}) as http:
            for _ in range(3):
                said = (await http.post(task.url + "/messages", json=body)).json()["content"]
                results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "no"} for each in said if "id" in each]
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
    """
    texts = ["<tool_call>broken</tool_call>", "<tool_call></tool_call>", "2"]
    group, policy = play(tokenizer, module(tmp_path, code), texts)
    assert [(len(rollout.turns), len(rollout.segments)) for rollout in group.rollouts] == [(3, 1)]
    assert group.rollouts[0].segments[0].mask.sum() == sum(len(completion.token_ids) for _, completion in policy.record)


def test_limits_refuse_calls_and_end_the_episode(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = """
        said = []
        for content in ["a", "b", "c", "d" * 2000]:
            try:
                await create(model=task.model, messages=[{"role": "user", "content": content}])
            except openai.BadRequestError as error:
                said.append(str(error))
        return " ".join(said)
    """
    group, policy = play(tokenizer, module(tmp_path, code), returns="answer", max_turns=2)
    (rollout,) = group.rollouts
    assert (rollout.finish_reason, len(policy.record), group.counts["truncated"]) == ("length", 2, 1)
    group, policy = play(tokenizer, module(tmp_path, code), returns="answer", max_turns=4)
    assert (group.rollouts[0].finish_reason, len(policy.record)) == ("length", 3)
    # A program that does not handle the refusal is not at fault.
    code = "for _ in range(9): await create(model=task.model, messages=[{'role': 'user', 'content': 'a'}])"
    group, _ = play(tokenizer, module(tmp_path, code), max_turns=2, truncated_reward=-1.0)
    assert [(rollout.finish_reason, rollout.reward_parts) for rollout in group.rollouts] == [("length", {"truncated": -1.0})]


def test_cut_reply_is_reported_to_the_program(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = ASK + "    return {'reward': reply.choices[0].finish_reason == 'length'}"
    group, _ = play(tokenizer, module(tmp_path, code), ["x" * 200], returns="rewards")
    assert (group.rollouts[0].finish_reason, group.rollouts[0].reward) == ("length", 1.0)


@pytest.mark.parametrize(("size", "limit", "is_cut"), [(200, None, True), (200, 9, False), (9, None, False)])
def test_program_that_fails_after_a_cut_reply_is_truncated(
    tokenizer: Tokenizer, tmp_path: Path, size: int, limit: int | None, is_cut: bool
) -> None:
    # Clients such as `parse` of OpenAI raise an exception. Left out, such episodes never teach the policy to be brief.
    code = f"""
        messages = [{{"role": "user", "content": task.question}}]
        await create(model=task.model, messages=messages, max_tokens={limit})
        raise ValueError("no use")
    """
    group, _ = play(tokenizer, module(tmp_path, code), ["x" * size], truncated_reward=-1.0)
    assert [rollout.reward_parts for rollout in group.rollouts] == ([{"truncated": -1.0}] if is_cut else [])
    assert ["no use" in failure.error for failure in group.failures] == ([] if is_cut else [True])


def test_the_run_decides_how_it_samples(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = """
        messages = [{"role": "user", "content": task.question}]
        reply = await create(model=task.model, messages=messages, temperature=0.1, seed=3, stop=["!"], max_tokens=40)
        return reply.choices[0].message.content
    """
    group, policy = play(tokenizer, module(tmp_path, code), ["2!"], returns="answer")
    sampling = policy.record[0][0].sampling
    assert (sampling.temperature, sampling.stop, sampling.max_new_tokens) == (1.0, ("!",), 40)
    assert (group.rollouts[0].metrics["overridden_calls"], group.rollouts[0].reward) == (1, 1.0)


AT_ONCE = """
import concurrent.futures, http.client, json, os, pathlib, socket, sys, time, urllib.parse

task, folder = json.load(sys.stdin), pathlib.Path(sys.argv[1])
place = urllib.parse.urlsplit(task["url"])


def post(body, key=task["key"], path="/v1/chat/completions"):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        connection.request("POST", path, body, headers)
    except OSError:  # refused before the whole body was sent
        return 413, b""
    response = connection.getresponse()
    return response.status, response.read()


ask = json.dumps({"model": task["model"], "messages": [{"role": "user", "content": "a"}]})
for number in range(99):  # each episode does something else
    try:
        os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL))
        break
    except FileExistsError:
        pass
if number == 1:
    assert {post(ask, key)[0] for key in ("wrong", task["key"][:-1], "")} == {401}
elif number == 2:
    assert {post(b"x" * (20 << 20))[0] for _ in range(10)} == {413}
elif number == 3:
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        codes = [each[0] for each in pool.map(post, [ask] * 200)]
    (folder / "codes").write_text(" ".join(map(str, codes)))
elif number == 4:
    for half in (True, False):
        with socket.create_connection((place.hostname, place.port)) as stream:
            body = json.dumps(json.loads(ask) | {"stream": True})
            head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nAuthorization: Bearer {task['key']}\\r\\n"
            head += f"Content-Type: application/json\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n{body}"
            stream.sendall(head.encode() if half else head[:-3].encode())
            stream.shutdown(socket.SHUT_WR)
            stream.recv(1000)
elif number == 5:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            (folder / "survivor").write_text(str(os.getpid()))
            os.closerange(0, 3)
            time.sleep(600)
        os._exit(0)
    while not (folder / "survivor").exists() or not (folder / "survivor").read_text():
        time.sleep(0.01)
elif number == 6:
    for _ in range(1 << 10):
        sys.stdout.write("x" * (1 << 20))
elif number == 7:
    (folder / "kept").write_text(f"{task['url']} {task['key']}")
print("2" if number == 3 else json.loads(post(ask)[1])["choices"][0]["message"]["content"])
"""


def test_hostile_programs_at_once_lose_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Eight commands at the same time: an honest one, and seven that do what a broken or malicious agent could do."""
    (tmp_path / "agent.py").write_text(AT_ONCE)
    folder = tmp_path / "shared"
    folder.mkdir()
    late = []

    async def call() -> None:
        url, key = (folder / "kept").read_text().split()
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        async with httpx.AsyncClient() as http:
            late.append((await http.post(f"{url}/chat/completions", json=body, headers={"x-api-key": key})).status_code)

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at the present size
    before, policy = memory("VmRSS"), Policy(tokenizer, ["2"])
    program = f"{sys.executable} {tmp_path / 'agent.py'} {folder}"
    group, _ = play(tokenizer, program, policy, returns="answer", num=8, after=call, episode_timeout_s=50.0)
    grown = memory("VmHWM") - before
    assert [failure.outcome for failure in group.failures] == ["environment_error"]
    assert "printed more than 16 MiB" in group.failures[0].error
    assert [rollout.reward for rollout in group.rollouts] == [1.0] * 7
    codes = Counter((folder / "codes").read_text().split())
    assert (codes["200"], codes["400"] + codes["429"]) == (4, 196)  # max_turns
    calls = sorted(rollout.metrics["calls"] for rollout in group.rollouts)
    assert calls == [1, 1, 1, 1, 1, 1, 4]
    trained = sorted(tuple(rollout.sampled.token_ids.tolist()) for rollout in group.rollouts)
    assert trained == sorted((*tokenizer.encode("2"), EOS_ID) * count for count in map(int, calls))
    assert late == [410]
    assert not Path(f"/proc/{(folder / 'survivor').read_text()}").exists()
    assert grown < 64 << 20, "neither the large bodies nor the output are held in memory"


def memory(name: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def test_client_that_hangs_up_is_not_trained_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    is_asked, again, replied = tmp_path / "asked", asyncio.Event(), asyncio.Event()
    code = f"""
        import pathlib
        messages = [{{"role": "user", "content": task.question}}]
        call = asyncio.create_task(create(model=task.model, messages=messages))
        while not pathlib.Path({str(is_asked)!r}).exists():
            await asyncio.sleep(0.01)
        call.cancel()
        await create(model=task.model, messages=messages)
    """

    class Slow(Policy):
        async def __call__(
            self, requests: Sequence[GenerationRequest], *, on_tokens: OnTokens | None = None
        ) -> list[Completion]:
            if is_asked.exists():
                again.set()
                await replied.wait()
            else:
                is_asked.touch()
                await again.wait()  # the client has hung up
                await asyncio.sleep(0.2)
            replied.set()
            return await super().__call__(requests)

    group, policy = play(tokenizer, module(tmp_path, code), Slow(tokenizer, ["3", "2"]))
    assert [failure.error for failure in group.failures] == []
    assert len(policy.record) == 2
    assert (group.rollouts[0].reward, group.rollouts[0].metrics["abandoned_calls"]) == (1.0, 1)
    assert group.rollouts[0].sampled.token_ids.tolist() == [*tokenizer.encode("2"), EOS_ID]


def test_program_that_waits_for_no_reply_is_told_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    code = """
        try:
            await create(model=task.model, messages=[{"role": "user", "content": "a"}], timeout=0.5)
        except openai.APITimeoutError:
            pass
    """

    class Never(Policy):
        async def __call__(self, *_: Any, **options: Any) -> list[Completion]:
            return await asyncio.Future()

    group, _ = play(tokenizer, module(tmp_path, code), Never(tokenizer, []))
    (failure,) = group.failures
    assert "it made no call of the policy for whose reply it waited" in failure.error


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({}, "exactly one of function and program"),
        ({"function": "calculator", "program": "true"}, "exactly one of function and program"),
        ({"function": "calculator", "returns": "answer"}, "only a program has this key"),
        ({"program": "a.b:play", "confined": True}, "runs in the rollout worker"),
        ({"program": "true", "python": sys.executable, "num_processes": 64}, "names its own interpreter"),
    ],
)
def test_configuration_errors(section: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        Config.model_validate({"name": "p", "num_steps": 1, "data": {"environment": section}})


def test_command_is_split_like_a_shell_would() -> None:
    section = {"program": "python 'my agent.py' --url http://x:a"}
    config = Config.model_validate({"name": "p", "num_steps": 1, "data": {"environment": section}})
    assert config.data.environment.program == ("python", "my agent.py", "--url", "http://x:a")
