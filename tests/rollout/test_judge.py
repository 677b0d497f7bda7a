"""The judge with a real HTTP server: grades, failures, retries and time limits."""

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.replying import ReplyingServer, replying
from titanrl.carriers.rewards import Answers, Scored
from titanrl.config.data import JudgeOptions
from titanrl.config.schema import Config
from titanrl.rollout.remote import JudgeError, criteria_of, grade_of, parts_of
from titanrl.rollout.scoring import Scoring

ANSWERS = Answers(
    entry={"question": "2 + 2 =", "answer": "4", "metadata": {"level": "easy"}},
    completions=("4", "{five}"),
    num_tokens=(2, 3),
    finish_reasons=("stop", "length"),
)


def saying(content: object) -> str:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@pytest.fixture
def server() -> Iterator[ReplyingServer]:
    """A local judge."""
    with replying(lambda request, number: (200, saying("Grade: 7"))) as server:
        yield server


def prompt_of(request: dict[str, Any]) -> str:
    prompt: str = request["messages"][-1]["content"]
    return prompt


def grades(port: int, *, weight: float = 1.0, **options: object) -> list[Scored]:
    """Score the answers with the judge, as a rollout worker does."""
    options = {"url": f"http://127.0.0.1:{port}/v1", "model": "grader", **options}
    rewards = {"judge": {"function": "judge", "weight": weight, "options": options}}
    config = Config.model_validate({"name": "a", "num_steps": 1, "data": {"rewards": rewards}})

    async def main() -> list[Scored]:
        scoring = Scoring(config, {})
        await scoring.start()
        try:
            return await scoring.score(ANSWERS)
        finally:
            await scoring.close()

    return asyncio.run(main())


def test_judge_is_called_once_per_completion_and_its_grade_is_scaled(
    server: ReplyingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server.reply = lambda request, number: (200, saying(f"Sound.\nGrade: {2.5 if '{five}' in prompt_of(request) else 10}"))
    first, second = grades(
        server.server_port,
        weight=2.0,
        prompt="{metadata[level]}: {question} Right: {answer}. Given: {completion} {{}}",
        system_prompt="Be strict.",
        key_variable="MY_KEY",
        request={"max_tokens": 9},
    )
    assert (first, second) == (Scored(reward=2.0, parts={"judge": 1.0}), Scored(reward=0.5, parts={"judge": 0.25}))
    asked = sorted(server.asked, key=lambda request: len(request[2]["messages"][1]["content"]))
    assert [(path, key) for path, key, _ in asked] == [("/v1/chat/completions", "Bearer secret")] * 2
    assert asked[0][2] == {
        "max_tokens": 9,
        "model": "grader",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "easy: 2 + 2 = Right: 4. Given: 4 {}"},
        ],
    }
    assert "Given: {five} {}" in asked[1][2]["messages"][1]["content"]


def test_default_prompt_contains_question_answer_and_completion(server: ReplyingServer) -> None:
    assert [scored.reward for scored in grades(server.server_port)] == [0.7, 0.7]
    path, key, request = next(asked for asked in server.asked if "{five}" in asked[2]["messages"][0]["content"])
    assert (path, key, request["temperature"]) == ("/v1/chat/completions", None, 0.0)
    for text in ("Question: 2 + 2 =", "Reference answer: 4", "Answer of the student: {five}"):
        assert text in request["messages"][0]["content"]


@pytest.mark.parametrize("status", [429, 503])
def test_request_is_retried_after_a_temporary_error(server: ReplyingServer, status: int) -> None:
    server.reply = lambda request, number: (status, "busy") if number <= 2 else (200, saying("Grade: 10"))
    assert [scored.reward for scored in grades(server.server_port)] == [1.0, 1.0]
    assert len(server.asked) == 4


def test_persistent_error_is_a_failure_after_all_attempts(server: ReplyingServer) -> None:
    server.reply = lambda request, number: (503, "busy") if "{five}" in prompt_of(request) else (200, saying("Grade: 0"))
    first, second = grades(server.server_port, num_retries=2)
    assert first.reward == 0.0  # a grade, not a failure
    assert (second.reward, second.parts) == (None, {})
    assert second.error == "judge: JudgeError: the judge replied with HTTP status 503 ('busy') (attempts: 3)"
    assert len(server.asked) == 1 + 3


def test_invalid_request_is_not_retried(server: ReplyingServer) -> None:
    server.reply = lambda request, number: (401, "no such key")
    for scored in grades(server.server_port):
        assert scored.reward is None
        assert scored.error == "judge: JudgeError: the judge replied with HTTP status 401 ('no such key')"
    assert len(server.asked) == 2


def test_judge_that_never_replies_times_out(server: ReplyingServer) -> None:
    server.reply = lambda request, number: None if "{five}" in prompt_of(request) else (200, saying("Grade: 10"))
    first, second = grades(server.server_port, timeout_s=1.5, num_retries=0)
    assert first.reward == 1.0
    assert second.error == "judge: JudgeError: the judge did not reply within timeout_s=1.5 (attempts: 1)"


def test_timeout_is_retried(server: ReplyingServer) -> None:
    server.reply = lambda request, number: None if number <= 2 else (200, saying("Grade: 10"))
    assert [scored.reward for scored in grades(server.server_port, timeout_s=1.5, num_retries=1)] == [1.0, 1.0]


def test_unreachable_judge_is_a_failure() -> None:
    with socket.socket() as closed:  # bound, so that nothing else gets the port, but not listening
        closed.bind(("127.0.0.1", 0))
        for scored in grades(closed.getsockname()[1], num_retries=0):
            assert scored.reward is None
            assert scored.error.startswith("judge: JudgeError: the judge cannot be reached: ConnectError")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("<html>", "the judge did not reply with a chat completion (got '<html>')"),
        ("{}", "the judge did not reply with a chat completion (got '{}')"),
        (saying(None), "the judge did not reply with a chat completion (got "),
        (saying("It is right."), "the judge replied without a grade (got 'It is right.')"),
        (saying("Grade: 11"), "the grade must be from 0 to 10 (got 11)"),
        (saying("Grade: -1"), "the grade must be from 0 to 10 (got -1)"),
        ("[" * 100_000, "the judge did not reply with a chat completion (got '[[["),
        (saying("Grade: 7" + " " * (1 << 20)), "the judge's reply must not have more than 1048576 bytes (status 200)"),
    ],
)
def test_reply_without_a_valid_grade_is_a_failure(server: ReplyingServer, body: str, error: str) -> None:
    server.reply = lambda request, number: (200, body)
    for scored in grades(server.server_port):
        assert scored.reward is None
        assert scored.error.startswith(f"judge: JudgeError: {error}")
    assert len(server.asked) == 2


def options(**values: object) -> JudgeOptions:
    return JudgeOptions.model_validate({"url": "http://a", "model": "b", **values})


@pytest.mark.parametrize(
    ("text", "values", "grade"),
    [
        ("Grade: 7", {}, 0.7),
        ("Grade: 2? No. **Grade: 7.5**", {}, 0.75),  # the last one
        ("grade:\n**7**/10", {}, 0.7),
        ("**Grade**: 7", {}, 0.7),
        ("**Grade:** 7.", {}, 0.7),
        ("Grade: 7,5", {}, 0.75),
        ("Grade: $\\boxed{7}$", {}, 0.7),
        ("Grade: [[7]]", {}, 0.7),
        ("Grade: 7 out of 10", {}, 0.7),
        ("Grade: \uff17", {}, 0.7),
        ("Grade: 1,000", {"max_score": 1000}, 1.0),
        ("2", {"score_pattern": r"[1-5]", "min_score": 1, "max_score": 5}, 0.25),
        ("[[B]] 3", {"score_pattern": r"\[\[[AB]\]\] (\d)", "max_score": 4}, 0.75),
        ("0.4", {"score_pattern": r"[\d.]+", "min_score": -1, "max_score": 1}, 0.7),
    ],
)
def test_grade_is_the_last_match_scaled_by_the_bounds(text: str, values: dict[str, object], grade: float) -> None:
    assert grade_of(text, options(**values)) == pytest.approx(grade, rel=1e-15)


@pytest.mark.parametrize("text", ["Grade: 3/5", "Grade: **3** out of 5", "Grade: 3 / 100"])
def test_grade_out_of_another_maximum_is_an_error(text: str) -> None:
    with pytest.raises(JudgeError, match=r"^the grade must be out of 10, but the judge wrote 3 out of 5|100$"):
        grade_of(text, options())


def test_grade_is_found_in_linear_time() -> None:
    with pytest.raises(JudgeError, match="without a grade"):
        grade_of("grade:" + " " * 100_000 + "x", options())  # a pattern with three runs of spaces would take minutes


def test_match_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(JudgeError, match=r"^score_pattern matched text that is not a number \(got 'good'\)$"):
        grade_of("good", options(score_pattern="good|bad"))
    with pytest.raises(JudgeError, match=r"\(got None\)$"):
        grade_of("good", options(score_pattern=r"(\d)|good"))


def test_missing_api_key_is_an_error_before_any_request(server: ReplyingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match=r"^data\.rewards\.judge\.options\.key_variable: .* \(got MY_KEY\)\. Export it"):
        grades(server.server_port, key_variable="MY_KEY")
    assert server.asked == []


RUBRIC = {
    "right": {"description": "The result is right.", "weight": 3},
    "steps": "It has steps.",
    "chatty": {"description": "It chats.", "weight": -2},
}


def test_one_request_decides_all_criteria_and_the_reward_is_their_weighted_mean(server: ReplyingServer) -> None:
    def reply(request: dict[str, Any], number: int) -> tuple[int, str]:
        is_second = "{five}" in prompt_of(request)
        verdicts = {"chatty": is_second, "right": True, "steps": 0.5 if is_second else 0}
        return 200, saying(f"The set {{1}} is right.\n```json\n{json.dumps(verdicts, indent=1)}\n```")

    server.reply = reply
    first, second = grades(server.server_port, weight=2.0, criteria=RUBRIC)
    # (3 + 0) / 4, and (3 + 0.5 - 2) / 4
    assert first.parts == pytest.approx({"judge/right": 0.75, "judge/steps": 0.0, "judge/chatty": 0.0})
    assert second.parts == pytest.approx({"judge/right": 0.75, "judge/steps": 0.125, "judge/chatty": -0.5})
    assert (first.reward, second.reward) == (1.5, pytest.approx(0.75))
    assert len(server.asked) == 2
    for text in ("- right: The result is right.\n- steps: It has steps.\n- chatty: It chats.\n", "Question: 2 + 2 ="):
        assert text in prompt_of(server.asked[0][2])
    assert '{"name": true}' in prompt_of(server.asked[0][2])


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ("All good.", "the judge replied without a JSON object of verdicts (got 'All good.')"),
        ('{"right": true, "steps": yes, "chatty": false}', "the judge replied without a JSON object of verdicts (got "),
        ('{"right": true, "steps": true}', "the judge must decide each of right, steps, chatty once (got "),
        ('{"right": 1, "steps": 1, "chatty": 0, "kind": 1}', "the judge must decide each of right, steps, chatty once (got "),
        ('{"right": 1, "steps": 1, "chatty": 0, "right": 0}', "the judge must decide each of right, steps, chatty once (got "),
        ('{"right": 1, "steps": 2, "chatty": 0}', "the verdict on steps must be true, false or a number from 0 to 1 (got 2)"),
        (
            '{"right": "yes", "steps": 1, "chatty": 0}',
            "the verdict on right must be true, false or a number from 0 to 1 (got 'y",
        ),
        (
            '{"right": NaN, "steps": 1, "chatty": 0}',
            "the verdict on right must be true, false or a number from 0 to 1 (got nan)",
        ),
        ('{"right": null, "steps": 1, "chatty": 0}', "the verdict on right must be true, false or a number from 0 to 1 (got N"),
    ],
)
def test_reply_without_valid_verdicts_is_a_failure(server: ReplyingServer, reply: str, error: str) -> None:
    server.reply = lambda request, number: (200, saying(reply))
    for scored in grades(server.server_port, criteria=RUBRIC):
        assert scored.reward is None
        assert scored.error.startswith(f"judge: JudgeError: {error}")


def test_criteria_of_a_prompt_are_a_field_of_its_metadata() -> None:
    field = options(criteria_field="rubric")
    criteria = criteria_of(
        {"metadata": {"rubric": {"right": "It is right.", "rude": {"description": "x", "weight": -1}}}}, field
    )
    assert parts_of('{"right": true, "rude": true}', criteria) == {"right": 1.0, "rude": -1.0}
    for metadata, problem in (
        ({}, r"^metadata\.rubric of the prompt: Input should be a valid dictionary \(got None\)$"),
        ({"rubric": {}}, r"at least 1 item"),
        ({"rubric": {"a b": "It is right."}}, r"String should match pattern"),
        ({"rubric": {"right": {"weight": 2}}}, r"^metadata\.rubric\.right\.description of the prompt: Field required"),
        ({"rubric": {"rude": {"description": "x", "weight": -1}}}, r"must include a positive one"),
    ):
        with pytest.raises(JudgeError, match=problem):
            criteria_of({"metadata": metadata}, field)
