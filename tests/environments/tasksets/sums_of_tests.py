"""A taskset of verifiers for tests: sums, asked by a scripted user in several turns, with faults on demand."""

import asyncio
from typing import Any

import verifiers.v1 as vf

__all__ = ["SumsEnv", "SumsTaskset"]


class SumsData(vf.TaskData):  # type: ignore[misc]
    answer: str


class SumsTask(vf.Task[SumsData]):  # type: ignore[misc]
    @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
    async def right(self, trace: Any) -> float:
        if self.data.answer == "2":
            raise RuntimeError("the scorer is broken")
        if self.data.answer == "4":
            await asyncio.sleep(600)
        return float((trace.last_reply or "") == self.data.answer)

    @vf.reward(weight=0.0)  # type: ignore[untyped-decorator]
    async def length(self, trace: Any) -> float:
        return float(len(trace.last_reply or ""))


class SumsConfig(vf.TasksetConfig):  # type: ignore[misc]
    pass


class SumsEnv(vf.SingleAgentEnv):  # type: ignore[misc]
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply == "?":
                segment = await interaction.turn("Answer with a number.")


class SumsTaskset(vf.Taskset[SumsTask, SumsConfig]):  # type: ignore[misc]
    def load(self) -> list[SumsTask]:
        timeouts = {4: {"timeout": {"scoring": 0.5}}}
        return [
            SumsTask(
                SumsData(idx=i, prompt=f"{i} + 0 =", system_prompt="Add.", answer=str(i), **timeouts.get(i, {})),
                self.config.task,
            )
            for i in range(5)
        ]
