"""A taskset of verifiers for tests, whose tool is a server that verifiers starts for each rollout."""

from typing import Any

import verifiers.v1 as vf

__all__ = ["FactsTaskset"]
FACTS = {"ada": "a programmer", "grace": "an admiral"}


class Facts(vf.Toolset[vf.ToolsetConfig]):  # type: ignore[misc]
    TOOL_PREFIX = "facts"

    @vf.tool  # type: ignore[untyped-decorator]
    def lookup(self, name: str) -> str:
        """Look up what a person is known for."""
        return FACTS.get(name, "no entry")


class FactsTaskConfig(vf.TaskConfig):  # type: ignore[misc]
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class FactsData(vf.TaskData):  # type: ignore[misc]
    answer: str


class FactsTask(vf.Task[FactsData, vf.State, FactsTaskConfig]):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: FactsTaskConfig) -> list[Any]:
        return [Facts(config.tools)]

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def looked_up(self, trace: Any) -> float:
        return float(self.data.answer in (trace.last_reply or ""))


class FactsConfig(vf.TasksetConfig):  # type: ignore[misc]
    task: FactsTaskConfig = FactsTaskConfig()


class FactsTaskset(vf.Taskset[FactsTask, FactsConfig]):  # type: ignore[misc]
    def load(self) -> list[FactsTask]:
        return [
            FactsTask(FactsData(idx=i, prompt=f"What is {name} known for?", answer=fact), self.config.task)
            for i, (name, fact) in enumerate(FACTS.items())
        ]


if __name__ == "__main__":
    Facts.run()
