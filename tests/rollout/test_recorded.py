"""Recorded groups and samples, read back."""

import math
from pathlib import Path

import numpy as np
import pytest

from titanrl.base.files import DamagedError
from titanrl.carriers.record import parts_of
from titanrl.carriers.types import Completion, Group, Prompt, Rollout, ScorerFailure, Segment, Turn
from titanrl.config import load_config
from titanrl.data.tokenizer import Tokenizer
from titanrl.metrics.reading import RunNotFoundError, RunRecord, open_run
from titanrl.rollout.group import GroupRecorder

CONFIG = load_config("quickstart", ["logging.loggers=[]"])


def ids(tokenizer: Tokenizer, text: str) -> np.ndarray:  # type: ignore[type-arg]
    return np.array(tokenizer.encode(text), np.int64)


def segment(tokenizer: Tokenizer, before: str, sampled: str, version: int) -> Segment:
    first, then = ids(tokenizer, before), ids(tokenizer, sampled)
    mask = np.arange(len(first) + len(then)) >= len(first)
    return Segment(
        token_ids=np.concatenate([first, then]),
        mask=mask,
        logprobs=np.where(mask, -0.25, 0.0).astype(np.float32),
        versions=np.where(mask, version, -1),
    )


def sampled_group(tokenizer: Tokenizer, index: int = 17, version: int = 3) -> Group:
    """Return a group of an episode of two segments, a short completion, and one whose reward failed."""
    episode = Rollout(
        segments=(segment(tokenizer, "1+1=", "2", version - 1), segment(tokenizer, "2+2=", "5", version)),
        reward=0.5,
        reward_parts={"answer": 1.0, "bonus": math.nan},
        finish_reason="stop",
        turns=(Turn(segment=0, end=5, reward=0.0), Turn(segment=1, end=5, reward=0.5)),
        metrics={"calls": 2.0},
        token_rewards=np.array([0.125, 0.375]),
    )
    short = Rollout(
        segments=(segment(tokenizer, "1+1=", "3", version),), reward=0.0, reward_parts={"answer": 0.0}, finish_reason="length"
    )
    failed = ScorerFailure(
        completion=Completion(
            token_ids=ids(tokenizer, "7"),
            logprobs=np.array([-2.0], np.float32),
            versions=np.array([version]),
            finish_reason="stop",
        ),
        error="ZeroDivisionError: division by zero",
    )
    entry = {"question": "1+1=", "answer": "2", "metadata": {}}
    return Group(
        prompt=Prompt(index=index, task="sums", text="1+1=", token_ids=(), entry=entry),
        rollouts=(episode, short),
        failures=(failed,),
        conversations=(({"role": "user", "content": "1+1="},), ({"role": "user", "content": "1+1="},)),
        generate_s=1.5,
        score_s=0.25,
        counts={"turns": 3},
    )


def recorder(run_dir: Path, tokenizer: Tokenizer, process: str = "rollout_0") -> GroupRecorder:
    return GroupRecorder(run_dir, process, CONFIG, tokenizer)


def test_group_is_read_as_it_was_sampled(tmp_path: Path, tokenizer: Tokenizer) -> None:
    decode = tokenizer.decode_completion
    recorder(tmp_path, tokenizer).rollouts(
        sampled_group(tokenizer), decode, status="kept", version=3, environment="my_game.py:Game"
    )
    (group,) = RunRecord(tmp_path).groups()
    assert (group.index, group.task, group.version, group.status, group.environment) == (
        17,
        "sums",
        3,
        "kept",
        "my_game.py:Game",
    )
    assert (group.prompt, group.rendered, group.answer, group.counts) == ("1+1=", "1+1=", "2", {"turns": 3})
    assert (group.generate_s, group.score_s, group.process, group.set) == (1.5, 0.25, "rollout_0", None)
    episode, short, failed = group.completions
    assert (episode.text, episode.num_tokens, episode.reward, episode.finish_reason) == ("25", 2, 0.5, "stop")
    assert (episode.reward_parts, episode.metrics) == ({"answer": 1.0, "bonus": None}, {"calls": 2.0})
    assert episode.turns == [(0, 5, 0.0), (1, 5, 0.5)]
    assert episode.messages == [{"role": "user", "content": "1+1="}]
    assert [part.num_tokens for part in episode.segments] == [5, 5]
    assert (short.outcome, short.reward, short.finish_reason) == ("ok", 0.0, "length")
    assert (failed.outcome, failed.reward, failed.error) == ("reward_error", None, "ZeroDivisionError: division by zero")
    tokens = group.tokens()
    assert [len(segments) for segments in tokens] == [2, 1, 1]
    assert RunRecord(tmp_path).token_texts(tokens[0][1]["token_ids"]) == ["2", "+", "2", "=", "5"]
    assert tokens[0][0]["versions"].tolist() == [-1, -1, -1, -1, 2]
    assert tokens[0][1]["mask"].tolist() == [False, False, False, False, True]
    assert tokens[0][1]["rewards"].tolist() == [0.0, 0.0, 0.0, 0.0, 0.375]
    assert tokens[1][0]["logprobs"].tolist() == [0.0, 0.0, 0.0, 0.0, -0.25]
    assert (tokens[2][0]["mask"].tolist(), tokens[2][0]["logprobs"].tolist()) == ([True], [-2.0])


def test_samples_of_an_evaluation_are_read_by_version(tmp_path: Path, tokenizer: Tokenizer) -> None:
    recording = recorder(tmp_path, tokenizer)
    for version in (4, 8, 4):  # a resumed run repeats an evaluation
        recording.evaluation(
            "hard", [sampled_group(tokenizer, index, version) for index in (1, 0)], tokenizer.decode_completion
        )
    recording.evaluation("easy", [sampled_group(tokenizer, 0, 4)], tokenizer.decode_completion)
    samples = RunRecord(tmp_path).evaluations("hard")
    assert [(sample.set, sample.version, sample.index) for sample in samples] == [
        ("hard", 4, 0),
        ("hard", 4, 1),
        ("hard", 8, 0),
        ("hard", 8, 1),
    ]
    assert len(RunRecord(tmp_path).evaluations()) == 5
    assert RunRecord(tmp_path).groups() == []


def test_group_that_was_sampled_again_is_read_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first, second = recorder(tmp_path, tokenizer), recorder(tmp_path, tokenizer, "rollout_1")
    for version, recording in ((1, second), (2, first)):
        recording.rollouts(sampled_group(tokenizer, 5, version), tokenizer.decode_completion, status="kept", version=version)
    assert [(group.version, group.process) for group in RunRecord(tmp_path).groups()] == [(2, "rollout_0")]


@pytest.mark.parametrize("damage", ["changed", "cut", "missing"])
def test_damaged_columns_are_not_returned(damage: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    recorder(tmp_path, tokenizer).rollouts(sampled_group(tokenizer), tokenizer.decode_completion, status="kept", version=3)
    (part,) = parts_of(tmp_path, "rollouts")
    content = part.columns.read_bytes()
    if damage == "missing":
        part.columns.unlink()
    else:
        part.columns.write_bytes(content[:-1] if damage == "cut" else b"\xff" + content[1:])
    (group,) = RunRecord(tmp_path).groups()
    with pytest.raises(DamagedError, match=r"rollouts-rollout_0\.000000\.bin"):
        group.tokens()


def test_numbers_that_no_file_can_have_are_damage(tmp_path: Path, tokenizer: Tokenizer) -> None:
    recorder(tmp_path, tokenizer).rollouts(sampled_group(tokenizer), tokenizer.decode_completion, status="kept", version=3)
    (part,) = parts_of(tmp_path, "rollouts")
    part.path.write_bytes(part.path.read_bytes().replace(b'"at":0', b'"at":' + b"9" * 30))
    (group,) = RunRecord(tmp_path).groups()
    with pytest.raises(DamagedError, match=f"at {'9' * 30} than were written"):
        group.tokens()
    (texts,) = parts_of(tmp_path, "vocabulary")
    texts.path.write_bytes(texts.path.read_bytes() + b'{"texts":{"' + b"9" * 5000 + b'":"x"}}\n')
    assert RunRecord(tmp_path).token_texts([999])[0] == "<id 999>"


def test_only_the_directory_of_a_run_is_opened(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"open_run: .*nothing does not exist\. Give the directory of a run"):
        open_run(tmp_path / "nothing")
    with pytest.raises(RunNotFoundError, match="is not the directory of a run"):
        open_run(tmp_path)
    (tmp_path / "config.yaml").write_text("name: mine\n")
    assert open_run(str(tmp_path)).config == "name: mine\n"
    assert open_run(tmp_path).groups() == open_run(tmp_path).events() == open_run(tmp_path).metrics() == []
