"""Program of the tests: acquire pods as hosts and run an actor in each, or examine them; print each event as a line."""

import asyncio
import json
import os
import socket
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from monarch.actor import enable_transport

from titanrl.commands.doctor import examine
from titanrl.config import load_config
from titanrl.config.sizes import derive, host_counts
from titanrl.hosts.holder import Order
from titanrl.hosts.kubernetes import KubernetesError, KubernetesHosts
from titanrl.launch.assembly import local_host, match_timeouts_to_leases, start_hosts
from titanrl.models.directory import model_shape
from titanrl.processes.actors import Actor, endpoint

print = partial(print, flush=True)


class Member(Actor):
    @endpoint
    async def name(self) -> str:
        return socket.gethostname()


async def main(overrides: list[str]) -> None:
    config = load_config("configs/quickstart.yaml", overrides)
    if sys.argv[1] == "examine":
        try:
            checkup = await examine(config, derive(config, model_shape(config)), "cpu", None, print)
        except KubernetesError as error:
            print(f"error: {error}")
        else:
            print(f"checkup: {json.dumps(asdict(checkup))}")
        return
    hosts, counts = KubernetesHosts(Order(config, "cpu", Path(), print)), host_counts(config)
    lost: asyncio.Queue[str] = asyncio.Queue()
    hosts.on_lost = lambda name, cause: lost.put_nowait(cause)
    try:
        # The name of this machine may have a loopback address only, of which Monarch refuses to choose one by itself.
        enable_transport("tcp://127.0.0.1:0" if "KUBECONFIG" in os.environ else "tcp")
        match_timeouts_to_leases()
        meshes = await start_hosts(hosts, counts)
    except KubernetesError as error:
        await hosts.kill()
        print(f"error: {error}")
        return
    local_host()
    names: list[Any] = []
    for role, mesh in meshes.items():
        members = mesh.spawn_procs(per_host={"procs": 1}, name=role).spawn(role, Member)
        names += (await asyncio.wait_for(members.name.call(), 60)).values()
    print(f"actors: {len(names)}")
    if "wait" in sys.argv[1]:
        for _ in range(int(sys.argv[1].removeprefix("wait") or 1)):  # as many losses as `wait2` names
            print(f"lost: {await asyncio.wait_for(lost.get(), 60)}")
            print(f"states: {hosts.has_ended(0)} {hosts.has_ended(1)} {hosts.has_ended(2)}")
    await hosts.kill()
    await hosts.kill()
    print("killed")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2:]))
