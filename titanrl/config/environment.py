"""The section `data.environment`: episodes of several turns."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from titanrl.config.errors import BrokenRule
from titanrl.config.section import Count, CountOrZero, FilePath, OrImportPath, Seconds, Section, Tokens

ENVIRONMENTS = ("single_turn", "tools", "calculator", "python", "tic_tac_toe")
"""Built-in environments."""


class EnvironmentConfig(Section):
    """Episodes of several turns. The text `my_game.py:Game` is short for `{function: my_game.py:Game}`."""

    function: Annotated[str, OrImportPath(ENVIRONMENTS)]
    """Built-in environment, or import path of a class or function that makes one for each episode (docs/howto/environment.md).
    `calculator`, `python` and `tools` let the policy call tools (docs/howto/tools.md), `tic_tac_toe` is a game, and
    `single_turn` asks once."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class or function."""
    max_turns: Count = 8
    """Maximum number of turns of the policy."""
    max_conversation_tokens: Tokens | None = None
    """Maximum length of a conversation, in tokens; null is `trainer.row_tokens`. `rollout.max_new_tokens` limits one turn."""
    renderer: str = "auto"
    """Conversion of messages to tokens: `plain`, which needs no chat template, or a name of the package renderers, such as
    `glm-5`. `auto` selects by the model type; it is `plain` for a tokenizer without chat template."""
    renderer_options: dict[str, Any] = {}
    """Options of a renderer of the package, such as `{enable_thinking: false}`."""
    weights: dict[str, float] = {}
    """Factors of the rewards that the environment returns, by name; 1 by default."""
    step_timeout_s: Seconds = 60.0
    """Time limit of one call of the environment."""
    episode_timeout_s: Seconds = 600.0
    """Time limit of all calls of the environment in an episode together."""
    retries: CountOrZero = 1
    """Number of times that an episode starts again after the environment failed. Then it is left out of its group."""
    num_processes: CountOrZero = 0
    """Number of processes per rollout worker that run environments, for native code and for calls that block; each runs one
    episode at a time, and is killed at a time limit. With 0 they run in the rollout worker itself."""
    python: FilePath | None = None
    """Python interpreter of these processes, with packages of its own; null is this one."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"function": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the JSON schema of the section; a text is allowed in its place."""
        section = handler.resolve_ref_schema(handler(schema))
        return section | {"type": ["object", "string"]}

    def _broken_rules(self) -> Iterator[BrokenRule]:
        if self.python is not None and not self.num_processes:
            yield BrokenRule(
                values={"python": str(self.python), "num_processes": 0},
                rule="another interpreter runs in processes of its own",
                fix="set num_processes to the number of episodes at once, such as 8",
            )

    def broken_by_run(self, section: str, *, is_rl: bool, has_warm_start: bool, num_at_once: int) -> Iterator[BrokenRule]:
        """Yield the rules that the environment breaks together with other sections.

        Args:
            section: Section of its prompts.
            is_rl: False for fine-tuning and distillation.
            has_warm_start: True if there is a section `warm_start`.
            num_at_once: Episodes of a rollout worker that must run at the same time.
        """
        key = f"{section}.environment"
        if not is_rl:
            yield BrokenRule(
                values={key: self.function},
                rule="fine-tuning and distillation have no environment",
                fix=f"remove {key}",
            )
        if 0 < self.num_processes < num_at_once:
            yield BrokenRule(
                values={f"{key}.num_processes": self.num_processes},
                rule=f"a synchronous run plays all {num_at_once} episodes of a worker turn by turn, each in a process",
                fix=f"set {key}.num_processes to {num_at_once}, or max_staleness to 1",
            )
        if has_warm_start and self.function in ("tools", "python", "tic_tac_toe"):
            yield BrokenRule(
                values={key: self.function},
                rule="warm_start has demonstrations for single turns and for the calculator",
                fix=f"remove warm_start, or set {key} to calculator",
            )
