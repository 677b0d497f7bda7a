"""A teacher behind a real HTTP endpoint: log-probabilities, the check of its vocabulary, failures, keys and retries."""

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.replying import replying
from tests.serving.policies import Scripted
from tests.serving.servers import Server, serving
from titanrl.config.sections import TeacherConfig
from titanrl.data.tokenizer import Tokenizer
from titanrl.rollout.remote import RemoteTeacher, TeacherError
from titanrl.serving.app import App
from titanrl.serving.calls import Callers

T = TypeVar("T")
KEY = "distill.teacher"


class Served(Scripted):
    """A policy with a tokenizer, whose token `changed` has another text."""

    def __init__(self, tokenizer: Tokenizer, changed: int | None = None) -> None:
        super().__init__()
        self._tokenizer, self._changed = tokenizer, changed

    def token_text(self, token_id: int) -> str:
        return "other" if token_id == self._changed else self._tokenizer.token_text(token_id)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Server]:
    callers = Callers()
    callers.open(Served(tokenizer), "a key of sixteen")
    callers.open(Served(tokenizer, changed=40), "another vocabulary")
    with serving(App(callers.find, ["policy"])) as server:
        yield server


def ask(url: str, work: Callable[[RemoteTeacher], Coroutine[Any, Any, T]], **options: object) -> T:
    """Do some work with a teacher at a URL."""

    async def scenario() -> T:
        config = TeacherConfig.model_validate({"url": f"{url}/v1", "num_retries": 0, "timeout_s": 10.0, **options})
        teacher = RemoteTeacher(config, key=KEY)
        try:
            return await work(teacher)
        finally:
            await teacher.close()

    return asyncio.run(scenario())


def test_each_token_has_the_log_probability_that_the_endpoint_gives_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("a key of sixteen\n")
    monkeypatch.setenv("TEACHER_KEY", "a key of sixteen")
    sequences = [[5, 6, 7], [9, 8]]
    for options in ({"key_file": tmp_path / "key"}, {"key_variable": "TEACHER_KEY", "model": "policy", "max_num_seqs": 1}):
        first, second = ask(server.url, lambda teacher: teacher.compute_logprobs(sequences), **options)
        np.testing.assert_array_equal(first, np.array([np.nan, -1 / 8, -2 / 8], np.float32))
        np.testing.assert_array_equal(second, np.array([np.nan, -1 / 8], np.float32))


def test_most_likely_tokens_are_the_best_of_those_that_the_endpoint_returns(server: Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of sixteen")
    (top,) = ask(server.url, lambda teacher: teacher.compute_top([[5, 6, 1]], 3), key_file=tmp_path / "key")
    # The first token is likelier than the three that Scripted returns, and the second is one of them.
    assert top.token_ids.tolist() == [[6, 0, 1], [0, 1, 2]]
    np.testing.assert_array_equal(top.logprobs, np.array([[-1 / 8, -1, -2], [-1, -2, -3]], np.float32))


def test_vocabulary_is_compared_token_by_token(server: Server, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "same").write_text("a key of sixteen")
    (tmp_path / "other").write_text("another vocabulary")
    for longest in (2, 20, 500):
        ask(
            server.url,
            partial(RemoteTeacher.check, tokenizer=tokenizer, longest=longest, num_top=3),
            key_file=tmp_path / "same",
        )
    with pytest.raises(
        TeacherError, match=r"distill.teacher.url: .*vocabulary of the policy.* 1 of 1\d\d compared .* such as 40"
    ):
        ask(server.url, lambda teacher: teacher.check(tokenizer, 20, 0), key_file=tmp_path / "other")


def test_refusal_of_a_request_names_the_teacher_and_what_it_must_serve(server: Server, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a key of sixteen")
    with pytest.raises(
        TeacherError, match=r"status 400 .*must be at most 256.* prompts of 2 tokens of the policy's vocabulary"
    ):
        ask(server.url, lambda teacher: teacher.compute_logprobs([[5, 999]]), key_file=tmp_path / "key")
    with pytest.raises(TeacherError, match="status 401"):
        ask(server.url, lambda teacher: teacher.compute_logprobs([[5, 6]]))


def test_teacher_without_its_key_is_refused_before_any_request(tmp_path: Path) -> None:
    for options, problem in (
        ({"key_variable": "NO_SUCH_VARIABLE"}, "key_variable: the environment variable must hold the API key"),
        ({"key_file": tmp_path / "none"}, "key_file: cannot be read"),
    ):
        config = TeacherConfig.model_validate({"url": "http://127.0.0.1:9/v1", **options})
        with pytest.raises(ValueError, match=problem):
            RemoteTeacher(config, key=KEY)


def test_dead_teacher_is_an_error() -> None:
    with socket.socket() as closed:  # bound, so that nothing else gets the port, but not listening
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(TeacherError, match="the teacher cannot be reached: ConnectError"):
            ask(f"http://127.0.0.1:{closed.getsockname()[1]}", lambda teacher: teacher.compute_logprobs([[5, 6]]))


@pytest.fixture
def faulty() -> Iterator[Any]:
    """A server that gives some replies, and then none."""
    with replying(lambda request, number: server.replies.pop(0) if server.replies else None) as made:
        server: Any = made
        server.replies = []
        yield server


def scored(*entries: object) -> str:
    return json.dumps({"choices": [{"prompt_logprobs": [None, *entries]}]})


def test_slow_teacher_is_an_error_after_its_time_limit(faulty: Any) -> None:
    with pytest.raises(TeacherError, match=r"the teacher did not reply within timeout_s=0.3 \(attempts: 1\)"):
        ask(f"http://127.0.0.1:{faulty.server_port}", lambda teacher: teacher.compute_logprobs([[5, 6]]), timeout_s=0.3)


def test_repeated_requests_are_counted(faulty: Any) -> None:
    faulty.replies = [(503, "busy"), (429, "busy"), (200, scored({"6": {"logprob": -0.5}}))]

    async def work(teacher: RemoteTeacher) -> tuple[float, int, int]:
        ((_, logprob),) = await teacher.compute_logprobs([[5, 6]])
        return float(logprob), teacher.take_retries(), teacher.take_retries()

    assert ask(f"http://127.0.0.1:{faulty.server_port}", work, num_retries=2) == (-0.5, 2, 0)


@pytest.mark.parametrize(
    "body",
    [
        "<html>",
        "[" * 100_000,
        json.dumps({"choices": [{"text": "a server without prompt_logprobs"}]}),
        json.dumps({"choices": [{"prompt_logprobs": None}]}),
        scored(),
        scored({"7": {"logprob": -0.5}}),
        scored({"6": {"logprob": None}}),
        scored({"6": {"logprob": 0.5}}),
        scored({"6": {"logprob": -9999.0}}),
        scored({"6": {"logprob": -0.5}}, {"7": {"logprob": -0.5}}),
    ],
)
def test_reply_without_the_log_probability_of_each_token_is_an_error(faulty: Any, body: str) -> None:
    faulty.replies = [(200, body)]
    with pytest.raises(TeacherError, match="did not return the log-probability of each token of the prompt"):
        ask(f"http://127.0.0.1:{faulty.server_port}", lambda teacher: teacher.compute_logprobs([[5, 6]]))


def test_too_few_likely_tokens_are_an_error(faulty: Any) -> None:
    faulty.replies = [(200, scored({"6": {"logprob": -0.5}}))]
    with pytest.raises(TeacherError, match="must return the 2 most likely tokens, but returned 1"):
        ask(f"http://127.0.0.1:{faulty.server_port}", lambda teacher: teacher.compute_top([[5, 6]], 2))
