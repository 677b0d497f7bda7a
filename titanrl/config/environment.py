"""The section `data.environment`: multi-turn episodes."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, CountOrZero, InputPath, OrImportPath, Seconds, Section, Tokens

ENVIRONMENTS = ("single_turn", "tools", "calculator", "python", "tic_tac_toe")
"""Built-in environments."""


class EnvironmentConfig(Section):
    """Multi-turn environment. The string `my_game.py:Game` is short for `{function: my_game.py:Game}`."""

    function: Annotated[str, OrImportPath(ENVIRONMENTS)]
    """Built-in environment, or the import path of a class or function that creates one per episode (docs/howto/environment.md).
    `calculator`, `python` and `tools` let the policy call tools (docs/howto/tools.md), `tic_tac_toe` is a game, and
    `single_turn` asks one question."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class or function."""
    max_turns: Count = 8
    """Maximum number of turns of the policy per episode."""
    max_conversation_tokens: Tokens | None = None
    """Maximum length of a conversation in tokens; null uses `trainer.row_tokens`. `rollout.max_new_tokens` limits each turn."""
    renderer: str = "auto"
    """Renderer that converts messages to tokens: `plain`, which needs no chat template; `template`, which uses the tokenizer's
    chat template and JSON tool calls in `<tool_call>` tags; or a name from the package `renderers`, such as `glm-5`. `auto`
    selects by the model type, and uses `plain` if the tokenizer has no chat template."""
    renderer_options: dict[str, Any] = {}
    """Options of a renderer from that package, or variables of the chat template, such as `{enable_thinking: false}`."""
    weights: dict[str, float] = {}
    """Weights of the rewards that the environment returns, by name. Rewards that are not listed have weight 1."""
    truncated_reward: float = 0.0
    """Reward of an episode that a limit ended before the environment returned `Done`, unless the environment judges it
    (docs/howto/environment.md). It is reported as `reward/truncated`, in place of the environment's own rewards."""
    step_timeout_s: Seconds = 60.0
    """Time limit in seconds for one call of the environment."""
    episode_timeout_s: Seconds = 600.0
    """Time limit in seconds for all calls of the environment in one episode."""
    retries: CountOrZero = 1
    """Number of times to restart an episode after the environment failed. After that, it is removed from its group."""
    num_processes: CountOrZero = 0
    """Number of environment processes per rollout worker, for native code and blocking calls. Each runs one episode at a time
    and is killed at a time limit. With 0, environments run in the rollout worker itself."""
    python: InputPath | None = None
    """Python interpreter of the environment processes, for example of another virtual environment; null uses the current
    one."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the section, which also allows a string."""
        section = handler.resolve_ref_schema(handler(schema))
        return section | {"type": ["object", "string"]}

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.python is not None and not self.num_processes:
            yield BrokenRule(
                values={"python": str(self.python), "num_processes": 0},
                rule="another interpreter requires environment processes",
                fix="set num_processes to the number of concurrent episodes, for example to 8",
            )

    def broken_by_run(self, section: str, *, is_rl: bool, has_warm_start: bool, num_at_once: int) -> Iterator[BrokenRule]:
        """Yield the rules that the environment breaks together with other sections.

        Args:
            section: Path of the section that contains the environment.
            is_rl: False for supervised fine-tuning and distillation.
            has_warm_start: True if the run has a warm start for these prompts.
            num_at_once: Number of episodes that a rollout worker must run concurrently.
        """
        key = f"{section}.environment"
        if not is_rl:
            yield BrokenRule(
                values={key: self.function},
                rule="supervised fine-tuning and distillation do not support environments",
                fix=f"remove {key}",
            )
        if 0 < self.num_processes < num_at_once:
            yield BrokenRule(
                values={f"{key}.num_processes": self.num_processes},
                rule=f"synchronous training runs all {num_at_once} episodes of a worker concurrently, each in its own process",
                fix=f"set {key}.num_processes to {num_at_once}, or max_staleness to 1",
            )
        if has_warm_start and self.function in ("tools", "python", "tic_tac_toe"):
            yield BrokenRule(
                values={key: self.function},
                rule="warm_start has demonstrations only for single turns and for the calculator",
                fix=f"remove warm_start, or set {key} to calculator",
            )
