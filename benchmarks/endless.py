"""Run GRPO without end tokens, so that all completions have one length: `python -m benchmarks.endless --config FILE`."""

from typing import Any

import titanrl.session.session as session
from titanrl.grpo import main
from titanrl.launch.roles import RunFiles


def _without_end(**fields: Any) -> RunFiles:
    return RunFiles(**{**fields, "stop_ids": ()})


if __name__ == "__main__":
    vars(session).update(RunFiles=_without_end)
    main()
