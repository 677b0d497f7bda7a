"""Check that a configuration matches the subcommand that runs it."""

from titanrl.base.choices import Program
from titanrl.config.errors import BrokenRule, ConfigError
from titanrl.config.explain import explain_rule
from titanrl.config.schema import Config
from titanrl.config.source import Source


def check_program(config: Config, program: Program, source: Source | None = None) -> None:
    """Check that a configuration is for a subcommand, since other subcommands would ignore its section.

    Raises:
        ConfigError: It is for another subcommand.
    """
    if config.program == program:
        return
    if program == "train":
        broken = BrokenRule(
            values={config.program: config.model_dump(mode="json", exclude_defaults=True)[config.program]},
            rule=f"only `titanrl {config.program}` uses this section",
            fix=f"run `titanrl {config.program}`, or remove the section",
        )
    else:
        broken = BrokenRule(
            values={program: None},
            rule=f"`titanrl {program}` requires this section",
            fix=f"add `{program}: ...` (docs/config.md), or run `titanrl {config.program}`",
        )
    raise ConfigError(explain_rule(broken, source))
