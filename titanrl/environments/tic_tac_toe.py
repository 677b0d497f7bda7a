"""Tic-tac-toe against a scripted opponent, whose choices depend only on the seed of the episode."""

import random
import re
from collections.abc import Sequence
from functools import cache
from typing import Literal

from titanrl.environments.interface import Done, Episode, Limit, Message, Observation

POLICY, OPPONENT, FREE = "X", "O", "."
"""Symbols for the players and for a free square."""

RULES = """\
We play tic-tac-toe. You are X, I am O. Three in a row, column or diagonal win.
Reply with the number of a free square in answer tags, such as <answer>5</answer>."""

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_ANSWER = re.compile(r"<answer>\s*([^<]{1,20}?)\s*</answer>")


class TicTacToe:
    """A game of tic-tac-toe. Squares are numbered 1 to 9, row by row.

    The reward `game` is the value of `win`, `draw` or `loss`. The reply to an illegal move explains why it is illegal. If the
    policy makes more than `max_illegal_moves` of them, it loses the game. It also loses a game that a limit ends.

    Example: `TicTacToe(skill=0.5, first="random")`
    """

    def __init__(
        self,
        *,
        skill: float = 0.5,
        first: Literal["policy", "opponent", "random"] = "random",
        max_illegal_moves: int = 1,
        win: float = 1.0,
        draw: float = 0.5,
        loss: float = 0.0,
    ) -> None:
        """Check and keep the options.

        Args:
            skill: Probability that the opponent plays an optimal move instead of a random one. At 1 it cannot be beaten.
            first: Player who moves first.
            max_illegal_moves: Number of illegal moves allowed per episode.
            win: Reward for a win.
            draw: Reward for a draw.
            loss: Reward for a loss, including a loss by illegal moves.

        Raises:
            ValueError: An option is out of range.
        """
        if not 0.0 <= skill <= 1.0:
            raise ValueError(f"skill: must be a probability (got {skill}). Write a number from 0 to 1.")
        if first not in ("policy", "opponent", "random"):
            raise ValueError(f"first: no such player (got {first!r}). Write policy, opponent or random.")
        if max_illegal_moves < 0:
            raise ValueError(f"max_illegal_moves: must not be negative (got {max_illegal_moves}). Write 0 or more.")
        self._skill, self._first, self._max_illegal_moves = skill, first, max_illegal_moves
        self._rewards = {POLICY: win, OPPONENT: loss, FREE: draw}
        self._board = FREE * 9
        self._num_illegal = 0
        self._random = random.Random()

    async def reset(self, episode: Episode) -> Observation:
        """Return the question, the rules and the board. If the opponent moves first, its move is on the board."""
        self._random.seed(episode.seed)
        if self._first == "opponent" or (self._first == "random" and self._random.random() < 0.5):
            self._play(self._opponents_move(), OPPONENT)
        question = f"{episode.question}\n\n" if episode.question else ""
        return Observation(messages=[_user(f"{question}{RULES}\n\n{drawn(self._board)}")], state=self._board)

    async def step(self, message: Message) -> Observation | Done:
        """Play the policy's move and, unless the game is over, the opponent's reply."""
        square, problem = read_move(str(message.get("content") or ""), self._board)
        if square is None:
            self._num_illegal += 1
            if self._num_illegal > self._max_illegal_moves:
                return Done(rewards={"game": self._rewards[OPPONENT]})
            return Observation(messages=[_user(f"{problem} Choose another square.\n\n{drawn(self._board)}")], state=self._board)
        self._play(square, POLICY)
        if winner(self._board) is None:
            square = self._opponents_move()
            self._play(square, OPPONENT)
        if (end := winner(self._board)) is not None:
            return Done(rewards={"game": self._rewards[end]})
        return Observation(messages=[_user(f"I take {square + 1}.\n\n{drawn(self._board)}")], state=self._board)

    async def judge_truncated(self, message: Message | None, limit: Limit) -> Done:
        """Count the game as lost, because the policy did not move."""
        return Done(rewards={"game": self._rewards[OPPONENT]})

    async def close(self) -> None:
        """Release nothing."""

    def _play(self, square: int, player: str) -> None:
        self._board = played(self._board, square, player)

    def _opponents_move(self) -> int:
        is_best = self._random.random() < self._skill
        return self._random.choice(best_moves(self._board, OPPONENT) if is_best else free_squares(self._board))


def read_move(text: str, board: str) -> tuple[int | None, str]:
    """Return the index of the square that a message names, from 0; None and the reason if the move is not legal."""
    answers = _ANSWER.findall(text)
    move = answers[-1] if answers else text.strip()
    if not re.fullmatch("[1-9]", move):
        return None, "I need one number from 1 to 9 in answer tags."
    square = int(move) - 1
    return (square, "") if board[square] == FREE else (None, f"Square {move} is taken.")


def drawn(board: str) -> str:
    """Return the board as text. Free squares show their numbers."""
    cells = [str(square + 1) if cell == FREE else cell for square, cell in enumerate(board)]
    return "\n".join(" ".join(cells[row : row + 3]) for row in (0, 3, 6))


def played(board: str, square: int, player: str) -> str:
    """Return the board after a move."""
    return f"{board[:square]}{player}{board[square + 1 :]}"


def free_squares(board: str) -> list[int]:
    """Return the indices of the free squares, from 0."""
    return [square for square, cell in enumerate(board) if cell == FREE]


def winner(board: str) -> str | None:
    """Return the player who has won, or `FREE` for a draw; None if the game is not over."""
    for first, second, third in LINES:
        if board[first] != FREE and board[first] == board[second] == board[third]:
            return board[first]
    return None if FREE in board else FREE


def best_moves(board: str, player: str) -> list[int]:
    """Return the moves of a player with the best outcome against perfect play."""
    values = {square: _value(played(board, square, player), player, _other(player)) for square in free_squares(board)}
    return [square for square, value in values.items() if value == max(values.values())]


@cache  # at most 5,478 positions for each player
def _value(board: str, player: str, turn: str) -> int:
    """Return 1, 0 or -1 for a win, draw or loss of `player` under perfect play. `turn` is the player to move."""
    if (end := winner(board)) is not None:
        return 0 if end == FREE else 1 if end == player else -1
    values: Sequence[int] = [_value(played(board, square, turn), player, _other(turn)) for square in free_squares(board)]
    return max(values) if turn == player else min(values)


def _other(player: str) -> str:
    return OPPONENT if player == POLICY else POLICY


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
