"""Tic-tac-toe: legal and illegal moves, the end of a game, and an opponent that follows its seed."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.environments.episodes import episode, says
from titanrl.environments import Done, Observation, TicTacToe
from titanrl.environments.tic_tac_toe import best_moves, drawn, free_squares, read_move, winner


async def play(seed: int, choose: Any, **options: Any) -> tuple[list[str], float]:
    """Play a game; return the messages of the environment and the reward."""
    game = TicTacToe(**options)
    found: Observation | Done = await game.reset(episode("Play.", seed=seed))
    texts = []
    while isinstance(found, Observation):
        texts.append(found.messages[0]["content"])
        found = await game.step(says(choose(game._board)))
    await game.close()
    return texts, found.rewards["game"]


def randomly(seed: int) -> Any:
    generator = random.Random(seed)
    return lambda board: f"I choose <answer>{generator.choice(free_squares(board)) + 1}</answer>"


def perfectly(board: str) -> str:
    return str(best_moves(board, "X")[0] + 1)


def test_board_shows_the_numbers_of_free_squares() -> None:
    assert drawn("X..O.....") == "X 2 3\nO 5 6\n7 8 9"


@pytest.mark.parametrize(
    ("board", "expected"),
    [("XXX.OO...", "X"), ("O..O..O..", "O"), ("X...X...X", "X"), ("..O.O.O..", "O"), ("XOXXOOOXX", "."), ("XOX......", None)],
)
def test_winner(board: str, expected: str | None) -> None:
    assert winner(board) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", (4, "")),
        ("The middle. <answer> 5 </answer>", (4, "")),
        ("<answer>1</answer> or <answer>9</answer>", (8, "")),
        ("1 or 9", (None, "I need one number from 1 to 9 in answer tags.")),
        ("<answer>10</answer>", (None, "I need one number from 1 to 9 in answer tags.")),
        ("2", (None, "Square 2 is taken.")),
        ("", (None, "I need one number from 1 to 9 in answer tags.")),
    ],
)
def test_move_is_read(text: str, expected: tuple[int | None, str]) -> None:
    assert read_move(text, ".X.......") == expected


def test_best_moves_win_and_block() -> None:
    assert best_moves("OO.XX....", "O") == [2]
    assert best_moves("XX..O....", "O") == [2]


@given(st.integers(0, 2**63 - 1))
def test_perfect_opponent_never_loses(seed: int) -> None:
    _, reward = asyncio.run(play(seed, randomly(seed), skill=1.0))
    assert reward in (0.0, 0.5)


@given(st.integers(0, 2**63 - 1))
def test_perfect_policy_never_loses(seed: int) -> None:
    _, reward = asyncio.run(play(seed, perfectly, skill=0.3))
    assert reward in (0.5, 1.0)


def test_games_end_in_win_draw_and_loss() -> None:
    assert {asyncio.run(play(seed, randomly(seed)))[1] for seed in range(40)} == {0.0, 0.5, 1.0}


def test_seed_decides_the_game() -> None:
    games = [asyncio.run(play(seed, perfectly, skill=0.0)) for seed in (1, 1, 2, 3, 4)]
    assert games[0] == games[1]
    assert len({tuple(texts) for texts, _ in games}) > 2


def test_first_player_can_be_chosen() -> None:
    boards = [asyncio.run(play(0, perfectly, first=first))[0][0].split("\n\n")[-1] for first in ("policy", "opponent")]
    assert boards[0] == "1 2 3\n4 5 6\n7 8 9"
    assert boards[1].count("O") == 1


async def test_illegal_moves_are_explained_then_lose() -> None:
    game = TicTacToe(first="policy", max_illegal_moves=1, loss=-1.0)
    first = await game.reset(episode())
    found = await game.step(says("the middle"))
    assert isinstance(found, Observation)
    assert first.state == found.state == "." * 9, "the state is the board, not the message"
    assert found.messages[0]["content"].startswith("I need one number from 1 to 9 in answer tags. Choose another square.")
    assert await game.step(says("0")) == Done(rewards={"game": -1.0})


@pytest.mark.parametrize("options", [{"skill": 2.0}, {"first": "me"}, {"max_illegal_moves": -1}])
def test_options_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TicTacToe(**options)
