"""The limit on replacements."""

import pytest

from titanrl.config.sections import FaultsConfig
from titanrl.processes.children import RespawnLimitError, Respawns


def test_limit_holds_within_the_window_and_names_what_died() -> None:
    clock = [0.0]
    respawns = Respawns(FaultsConfig(max_respawns=3, respawn_window_s=60.0), now=lambda: clock[0])
    for clock[0], part in ((0.0, "generator_0"), (10.0, "generator_0"), (50.0, "rollout_1")):
        respawns.add(part, "killed")
    with pytest.raises(
        RespawnLimitError, match=r"max_respawns: rollout_1 ended .*generator_0 2 times, rollout_1 1 times; got 3.*SIGKILL"
    ):
        respawns.add("rollout_1", "SIGKILL")
    clock[0] = 60.0  # the first one has left the window
    respawns.add("rollout_1", "killed")


def test_limit_of_zero_reports_only_the_cause() -> None:
    with pytest.raises(RespawnLimitError, match=r"^trainer rank 0 has ended$"):
        Respawns(FaultsConfig(max_respawns=0)).add("trainer", "trainer rank 0 has ended")
