"""The built-in rewards, called without a sandbox."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.utils import extract_answer

from tests.rollout.notations import NOTATIONS
from titanrl.carriers.rewards import Answers, BoundReward
from titanrl.rollout.scorers import (
    equal,
    exact,
    last_answer,
    last_boxed,
    math_verify,
    overlong,
    read,
    reasoning_gym,
    regex,
    repetition,
)


@given(st.lists(st.sampled_from(["<answer>", "</answer>", " ", "\n", "7", "x y"]), max_size=12).map("".join))
def test_last_answer_equals_reasoning_gyms_extraction(text: str) -> None:
    assert last_answer(text) == extract_answer(text)


def test_last_answer_takes_linear_time() -> None:
    assert last_answer("<answer>" * 200_000) is None  # a backtracking pattern would take minutes


@pytest.mark.parametrize(
    ("text", "expected", "reward"),
    [
        ("<answer>Paris</answer>", "Paris", 1.0),
        ("<answer>Rome</answer> or <answer> Paris </answer>.", "Paris", 1.0),
        ("Paris\n", "Paris", 1.0),
        ("It is Paris", "Paris", 0.0),
        ("<answer>Paris", "Paris", 0.0),
        ("<answer>paris</answer>", "Paris", 0.0),
        ("<answer>two\n words</answer>", "two  words", 1.0),
        ("<answer>1.50</answer>", "1.5", 1.0),
        ("<answer>1e3</answer>", 1000, 1.0),
        ("<answer>1 234,56</answer>", "1234.56", 1.0),
        ("<answer>1 234,56</answer>", "123456", 0.0),
        ("<answer>- 1,234</answer>", "-1234", 1.0),
        ("<think>4</think> <answer>7", "<answer>7", 1.0),
        ("<think>so <answer>7</answer></think>\n", "7", 1.0),
        ("<answer>0.1</answer>", 0.1, 1.0),
        ("<answer>1.5000000000000000001</answer>", "1.5", 0.0),
        ("<answer>NaN</answer>", "1", 0.0),
        ("<answer>sNaN</answer>", "1", 0.0),
        ("<answer>1e9999999999999999999</answer>", "1", 0.0),
        ("", "1", 0.0),
    ],
)
def test_exact_compares_words_and_numbers(text: str, expected: object, reward: float) -> None:
    assert exact()(text, {"answer": expected}) == reward


def test_reasoning_gym_scores_the_text_in_answer_tags() -> None:
    score = reasoning_gym("chain_sum", {"min_terms": 2})
    entry = {"question": "3 + 4 =", "answer": "7", "metadata": {}}
    assert score("so <answer>7</answer>", entry) == 1.0
    assert score("so 7", entry) == 0.0


@pytest.mark.parametrize(
    ("answer", "right", "reward"),
    [
        ("1,234", "1234", 1.0),
        ("1.234,56", "1234.56", 1.0),
        ("1 234,56", "1234.56", 1.0),
        ("1.234.567", "1234567", 1.0),
        ("**7**", "7", 1.0),
        ("\u22127", "-7", 1.0),
        ("$7$", "7", 1.0),
        ("7.", "7", 1.0),
        ("+7", "7", 1.0),
    ],
)
def test_reasoning_gym_scores_other_notations_of_a_number(answer: str, right: str, reward: float) -> None:
    entry = {"question": "", "answer": right, "metadata": {}}
    assert reasoning_gym("chain_sum", {})(f"<answer>{answer}</answer>", entry) == reward
    assert reasoning_gym("chain_sum", {})(f"<answer>{answer}9</answer>", entry) < 1.0


def test_malformed_answer_of_a_gym_task_is_wrong_not_an_error() -> None:
    score = reasoning_gym("prime_factorization", {})
    entry = {"question": "", "answer": "2 \u00d7 3", "metadata": {}}
    assert score("<answer>2 \u00d7 3</answer>", entry) == 1.0
    assert score("<answer>two</answer>", entry) == 0.0


def test_gym_scorer_that_fails_on_the_right_answer_raises() -> None:
    score = reasoning_gym("prime_factorization", {})
    with pytest.raises(ValueError, match="two times three"):
        score("<answer>2 \u00d7 3 \u00d7 x</answer>", {"question": "", "answer": "two times three", "metadata": {}})


def test_unknown_task_is_rejected() -> None:
    with pytest.raises(ValueError, match="chain_sam"):
        reasoning_gym("chain_sam", {})


# Length, repetition and format


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(1, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (19, -0.75), (20, -1.0), (21, -1.0), (4000, -1.0)],
)
def test_soft_overlong_penalty_is_equation_13_of_dapo(num_tokens: int, penalty: float) -> None:
    # L_max 20, L_cache 4: ((20 - 4) - length) / 4 between 16 and 20 tokens.
    score = BoundReward("short", overlong(cache_tokens=4, max_tokens=20))
    answers = Answers(entry={}, completions=("text",), num_tokens=(num_tokens,), finish_reasons=("stop",))
    assert score.call_one(answers, 0) == penalty


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 300))
def test_soft_overlong_penalty_never_grows_with_fewer_tokens(cache: int, free: int, num_tokens: int) -> None:
    score = overlong(cache_tokens=cache, max_tokens=cache + free)
    assert -1.0 <= score("", {}, num_tokens + 1) <= score("", {}, num_tokens) <= 0.0
    assert score("", {}, free) == 0.0
    assert score("", {}, cache + free) == -1.0


@pytest.mark.parametrize(
    ("text", "size", "unit", "penalty"),
    [
        ("a b c d", 2, "word", 0.0),  # ab, bc, cd
        ("a b a b a", 2, "word", -0.5),  # ab, ba, ab, ba: 2 of 4
        ("the The  THE\nthe", 1, "word", -0.75),
        ("so so", 3, "word", 0.0),
        ("so so so", 3, "word", 0.0),  # one n-gram
        ("so so so so", 3, "word", -0.5),
        ("", 1, "word", 0.0),
        ("哈哈哈哈", 2, "word", 0.0),  # one word
        ("哈哈哈哈", 2, "character", -2 / 3),
    ],
)
def test_repetition_is_the_fraction_of_repeated_n_grams(
    text: str, size: int, unit: Literal["word", "character"], penalty: float
) -> None:
    assert repetition(size, unit)(text, {}) == pytest.approx(penalty, rel=1e-15)


@given(st.lists(st.sampled_from("abc"), max_size=30), st.integers(1, 4))
def test_repetition_is_bounded_and_never_rises_when_text_repeats(words: list[str], size: int) -> None:
    score = repetition(size, "word")
    once, twice = score(" ".join(words), {}), score(" ".join(words * 2), {})
    assert -1.0 < once <= 0.0
    assert twice <= once or len(words) < size


@pytest.mark.parametrize(
    ("pattern", "match", "text", "reward"),
    [
        ("<think>.*</think> <answer>.*</answer>", "full", "<think>2 + 2</think> <answer>4</answer>", 1.0),
        ("<think>.*</think> <answer>.*</answer>", "full", "<think>2 +\n2</think> <answer>4</answer>", 0.0),
        ("(?s)<think>.*</think> <answer>.*</answer>", "full", "<think>2 +\n2</think> <answer>4</answer>", 1.0),
        (r"\d+", "full", "it is 4", 0.0),
        (r"\d+", "anywhere", "it is 4", 1.0),
        (r"\d+", "anywhere", "", 0.0),
    ],
)
def test_regex_matches_whole_text_or_any_part(
    pattern: str, match: Literal["full", "anywhere"], text: str, reward: float
) -> None:
    assert regex(pattern, match)(text, {}) == reward


# math-verify


@pytest.fixture(scope="module")
def verify_math() -> object:
    pytest.importorskip("math_verify")
    return math_verify(timeout_s=60)


@pytest.mark.parametrize(("completion", "answer", "right", "right_math"), NOTATIONS)
def test_notations_have_the_right_reward(
    verify_math, completion: str, answer: str, right: int | None, right_math: int | None
) -> None:
    assert right in (None, exact()(completion, {"answer": answer}))
    assert right_math in (None, verify_math(completion, {"answer": answer}))


def test_cases_of_other_people_have_the_right_reward(verify_math) -> None:
    cases = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
    assert len(cases) == 17
    for case in cases:
        assert case["exact"] in (None, exact()(case["completion"], case)), case
        assert case["math"] in (None, verify_math(case["completion"], case)), case


WRITTEN = [
    "{0}", "{0:,}", "{0}.", "{0}.0", "**{0}**", "${0}$", "{0} dollars", "${0}", "{0} km", "x = {0}", "\\boxed{{{0}}}", "{0}/1",
    "{0} million", "{0}e3", "{0}/3", "{0}00%", "1 {0}/99999", "-{0}", "({0}, 2)", "{{{0}}}", "{0}, 2", "{0},5", "0{0}",
    "{0} or 1",
]  # fmt: skip
VALUE = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 10**6, 1000, Fraction(1, 3), 1, None, -1, None, 1, None, None, 1, None]
"""Factors of the numbers in `WRITTEN`; None for other values."""


@given(st.data())
def test_wrong_number_never_equals_the_right_one(data: st.DataObject) -> None:
    number, other = data.draw(st.integers(1, 9999)), data.draw(st.integers(1, 9999))
    first, second = data.draw(st.sampled_from(range(len(WRITTEN)))), data.draw(st.sampled_from(range(len(WRITTEN))))
    right, answer = read(WRITTEN[first].format(number), is_reference=True), read(WRITTEN[second].format(other))
    values = VALUE[first], VALUE[second]
    is_share = "%" in right.text + answer.text
    if values[0] is not None and values[1] is not None and values[0] * number != values[1] * other and not is_share:
        assert not equal(right, answer, lambda one, two: False)
    if values[0] is None and values[1] is not None:
        assert not equal(right, answer, lambda one, two: False) or other == number


def test_right_notations_of_a_number_are_equal() -> None:
    for first, second in product(range(len(WRITTEN)), repeat=2):
        if VALUE[first] == VALUE[second] == 1 and {WRITTEN[first], WRITTEN[second]}.isdisjoint(("{0} km", "{0}00%")):
            right, answer = read(WRITTEN[first].format(1234), is_reference=True), read(WRITTEN[second].format(1234))
            assert equal(right, answer, lambda one, two: False), (right, answer)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1900,
        "(" * 900 + "1" + ")" * 900,
        "$" * 1999,
        "1," * 900,
        "1 and " * 300,
        r"\frac{" * 300,
        "x=" * 900,
        "a " * 900 + "1",
    ],
)
def test_hostile_answers_are_read_in_time(text: str) -> None:
    started_s = time.thread_time()
    assert not equal(read("18"), read(text), lambda one, two: False)
    assert time.thread_time() - started_s < 1.0


def test_completion_of_many_marks_is_searched_in_linear_time(verify_math) -> None:
    started_s = time.thread_time()
    for part in ("\\boxed{", "answer is ", "<answer>", "</think>", "{", "1 or "):
        assert verify_math(part * 30_000, {"answer": "18"}) == 0.0
        assert last_boxed(part * 30_000) is None
    for end in ("It is not 5" + "." * 19_000 + " so 7 it is", "1 or 1" + "," * 19_000 + "a5"):
        for _ in range(10):
            verify_math(end, {"answer": "18"})
    assert time.thread_time() - started_s < 20.0  # a quadratic search would take minutes


@pytest.mark.parametrize(("before", "after", "found"), [(r"\boxed{", "}", None), (r"\boxed{1} and ", r"\boxed{2}", "1, 2")])
def test_many_boxes_are_searched_in_linear_time(before: str, after: str, found: str | None) -> None:
    count = 300_000
    text = before * count + after * (count if found is None else 1)
    started_s = time.process_time()
    boxed = last_boxed(text)
    assert time.process_time() - started_s < 5.0  # a quadratic search would take more than three times as long
    assert boxed == (text[len(before) : -1] if found is None else found)


@pytest.mark.parametrize(
    ("between", "found"),
    [
        (" and ", "1, 2"),
        (", or\n", "1, 2"),
        ("$, $", "1, 2"),
        (" " * 30 + "or" + " " * 30, "1, 2"),
        ("", "2"),
        (" but finally ", "2"),
        (", " + " " * 25 + "but finally ", "2"),
    ],
)
def test_boxes_are_joined_only_by_a_conjunction(between: str, found: str) -> None:
    assert last_boxed(rf"so \boxed{{1}}{between}\boxed{{2}}.") == found


def test_long_marked_answer_is_wrong_and_not_parsed(verify_math) -> None:
    assert verify_math(f"<answer>{'(' * 3000}</answer>", {"answer": "18"}) == 0.0


@pytest.mark.parametrize(
    "code", ["__import__('os').abort()", r"\boxed{__import__('os').abort()}", "exit()", "1 if exit() else 2"]
)
def test_math_verify_executes_no_code(verify_math, code: str) -> None:
    for text in (code, f"<answer>{code}</answer>", f"The answer is {code}"):
        assert verify_math(text, {"answer": "18"}) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("so it is 36", "36", 1.0),
        ("<answer>36</answer>", "36", 1.0),
        ("<answer>35</answer> or <answer>36</answer>", "36", 1.0),
        (r"<answer>\boxed{36}</answer>", "36", 1.0),
        (r"hence $\boxed{0.5}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", "1/2", 1.0),
        (r"\boxed{2\sqrt{2}}", r"$\sqrt{8}$", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{\frac{1}{3}}", "1/2", 0.0),
        (r"\boxed{35} <answer>36", "36", 1.0),
        ("<answer>18 cm</answer>", r"Its side is $x = 3$, so that the area is $2x^2 = \boxed{18}$ by symmetry.", 1.0),
        ("Evelyn", r"The speed of Evelyn is the greatest, so that $\boxed{\text{Evelyn}}$ is right.", 1.0),
        ("<answer>3</answer>", r"Its side is $x = 3$, so that the area is $2x^2 = \boxed{18}$ by symmetry.", 0.0),
        (r"<answer>35 or \boxed{36}</answer>", "36", 1.0),
        ("The answer is:\n\n36\nor so", "36", 1.0),
        ("it is 35", "36", 0.0),
        ("I do not know", "36", 0.0),
        (r"\boxed{\frac{1}{", "36", 0.0),
        ("", "36", 0.0),
    ],
)
def test_math_verify_compares_expressions(verify_math, text: str, answer: str, reward: float) -> None:
    assert verify_math(text, {"answer": answer}) == reward


def test_math_verify_raises_if_a_comparison_takes_too_long(verify_math) -> None:
    with pytest.raises(TimeoutError, match=r"comparing two expressions took longer than 2 s"):
        math_verify(timeout_s=2)(r"\boxed{9^{9^{9^{9}}}}", {"answer": "36"})


def test_math_verify_raises_without_a_parsable_answer(verify_math) -> None:
    with pytest.raises(ValueError, match=re.escape("the expected answer must not be empty (got '')")):
        verify_math("36", {"answer": ""})
    with pytest.raises(ValueError, match="math-verify cannot parse the expected answer"):
        verify_math(r"\boxed{x}", {"answer": "costs $"})


def test_math_verify_raises_outside_of_the_main_thread(verify_math) -> None:
    entry = {"answer": r"2\sqrt{2}"}
    assert verify_math(r"\boxed{\sqrt{8}}", entry) == 1.0
    with ThreadPoolExecutor(1) as thread, pytest.raises(RuntimeError, match="only in the main thread"):
        thread.submit(verify_math, r"\boxed{\sqrt{8}}", entry).result()


def test_answers_of_a_level_are_scored_with_its_options() -> None:
    score = reasoning_gym("puzzle24", {"min_value": 1, "max_value": 5}, [{}, {"max_value": 10}])
    entry = {"answer": "24", "metadata": {"numbers": [9, 8, 1, 6]}}
    answer = "<answer>9 + 8 + 1 + 6</answer>"
    assert score(answer, {**entry, "level": 1}) == 1.0
    assert score(answer, entry) < 1.0  # of an evaluation: the options of the task, whose numbers are smaller
