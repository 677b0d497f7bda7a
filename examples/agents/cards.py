"""Tasks of the agents in cards.yaml, and a script that plays their policy: look at a table, then name the card on it.

python examples/agents/scripted.py examples/agents/cards.yaml examples/agents/cards.py:reply --episodes 400 --steps 250

The script names the red card in most episodes. After learning from it, greedy decoding is right in a quarter of the episodes.
"""

import random
import re

CARDS = ("red", "blue", "green", "gold")
RNG = random.Random(0)
LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
FINAL = '<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{}"}}}}</tool_call>'
"""Format of answers in smolagents, which requires a tool call. Other frameworks expect text."""


def cards(seed: int, num_players: int) -> list[dict[str, str]]:
    """Return a question for each player. The answer is the card on the table."""
    rng = random.Random(seed)
    return [{"question": f"Name the card, player {number}.", "answer": rng.choice(CARDS)} for number in range(num_players)]


def reply(conversation: str) -> str:
    """Return a reply: look first, then name the red card, or sometimes the one on the table."""
    seen = re.search(rf"I see ({'|'.join(CARDS)})\.", conversation)
    if seen is None:
        return LOOK
    card = seen[1] if RNG.random() < 0.45 else CARDS[0]
    return FINAL.format(card) if '"final_answer"' in conversation else card
