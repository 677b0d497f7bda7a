"""An environment that allows a second try after a wrong answer."""

import re

from titanrl.environments import Done, Episode, Message, Observation


class SecondTry:
    """Asks the question, and repeats it after a wrong answer; a right second answer is worth 0.5."""

    async def reset(self, episode: Episode) -> Observation:
        """Ask the question."""
        self.episode, self.value = episode, 1.0
        return Observation(messages=[{"role": "user", "content": episode.question}])

    async def step(self, message: Message) -> Observation | Done:
        """Return the reward, or the question again after a wrong first answer."""
        answers = re.findall("<answer>(.*?)</answer>", str(message["content"]))
        is_solved = bool(answers) and answers[-1].strip() == self.episode.entry["answer"]
        if is_solved or self.value < 1.0:
            return Done(rewards={"solved": self.value * is_solved})
        self.value = 0.5
        return Observation(messages=[{"role": "user", "content": self.episode.question}])

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""
