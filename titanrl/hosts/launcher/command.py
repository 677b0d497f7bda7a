"""Run a command that a launcher started once on every host: rank 0 becomes the controller, the other ranks serve as hosts.

Every process exits with the exit code of rank 0, or with 1 if it loses the connection to rank 0.
"""

import os
import socket
import sys
from collections.abc import Callable

from titanrl.config.device import missing_for
from titanrl.config.errors import BrokenRule, BrokenRules, ConfigError
from titanrl.config.explain import explain_rule
from titanrl.config.schema import Config
from titanrl.config.source import Source
from titanrl.hosts.launcher.crew import Crew
from titanrl.hosts.launcher.host import serve
from titanrl.hosts.launcher.rendezvous import LauncherError, find
from titanrl.hosts.launcher.world import World, broken_by_world, drop_variables, is_loopback, own_address, world_of
from titanrl.hosts.remote_rules import addresses_of

TELL_S = 5.0
"""Seconds for which a process with an invalid configuration tries to notify the others."""


def run_launched(config: Config, source: Source, controller: Callable[[], int]) -> int:
    """Run the controller on rank 0, and a host on every other rank; return the exit code.

    Raises:
        ConfigError: The launcher did not start the processes that the configuration needs, or a host is unusable.
    """
    try:
        world = world_of(os.environ)
    except BrokenRules as error:
        raise ConfigError(*map(str, error.broken)) from None  # environment variables have no line in the configuration
    broken = list(broken_by_world(config, world))
    if broken or world is None:
        raise ConfigError(*(explain_rule(rule, source) for rule in broken))
    drop_variables()
    problems = [explain_rule(rule, source) for rule in _broken_here(config, world)]
    try:
        if world.rank:
            return _serve(world, config, problems)
        return _control(world, config, problems, controller)
    except LauncherError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def tell_failure(source: Source | None, problem: str) -> None:
    """Make the launcher's other processes, if there are any, exit with code 2.

    Args:
        source: the configuration; None if it could not be read.
        problem: error in the configuration.
    """
    try:
        world = world_of(os.environ)
        is_wanted = _kind(source) in ("launcher", None)
        if world is None or world.size == 1 or not is_wanted or (source is None and not world.rank):
            return
        drop_variables()
        if world.rank:
            serve(find(world, TELL_S), world.rank, problem)
        else:
            Crew(world, TELL_S).end(2)
    except (BrokenRules, LauncherError):  # the others have also exited, or there are none
        return


def _control(world: World, config: Config, problems: list[str], controller: Callable[[], int]) -> int:
    with Crew(world, config.timeouts.start_s) as crew:
        try:
            if problems:
                raise ConfigError(*problems)
            crew.gather(config.timeouts.start_s)
            crew.code = controller()
        except ConfigError:
            crew.code = 2
            raise
        return crew.code


def _serve(world: World, config: Config, problems: list[str]) -> int:
    controller = find(world, config.timeouts.start_s)
    name = socket.gethostname()
    print(f"{name}: rank {world.rank} of {world.size} serves the controller at {controller.address}", flush=True)
    for problem in problems:
        print(problem, file=sys.stderr)
    return serve(controller, world.rank, "\n".join(problems))


def _broken_here(config: Config, world: World) -> list[BrokenRule]:
    """Return the rules that this host breaks."""
    broken, name = [], socket.gethostname()
    missing = None if config.device == "auto" else missing_for(config.device)
    if missing is not None:
        rule = f"the device must be usable on every host, but on {name} it is not: {missing}"
        broken.append(BrokenRule(values={"device": config.device}, rule=rule, fix="set device to that of the hosts"))
    own, addresses = own_address(world), addresses_of(name)
    if own and not is_loopback(own) and all(map(is_loopback, addresses)):
        found = f"resolves to {', '.join(addresses)}" if addresses else "does not resolve"
        broken.append(
            BrokenRule(
                values={"hosts.kind": "launcher"},
                rule=f"the name of each host must resolve to an address that the others can reach, but {name} {found}",
                fix="correct /etc/hosts or the name server",
            )
        )
    return broken


def _kind(source: Source | None) -> object:
    hosts = None if source is None else source.values.get("hosts")
    return None if source is None else hosts.get("kind") if isinstance(hosts, dict) else "local"
