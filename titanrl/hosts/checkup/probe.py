"""Program that `titanrl doctor --config` starts on each host: reports the host's state, and measures connections.

Requests and replies are lines of JSON on the connection of the host's lease. The last message is `end` with an exit code.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from titanrl.hosts.checkup.report import ReportRequest, report
from titanrl.hosts.kubernetes.leases import CONNECTION
from titanrl.hosts.launcher.host import END
from titanrl.hosts.launcher.rendezvous import Controller
from titanrl.hosts.leases import Host, hold_lease
from titanrl.hosts.slurm.node import CONTROLLER, TOKEN

RANK = "TITANRL_PROBE_RANK"
"""Environment variable with the rank of the host; with Slurm, the node id is used."""
CHOSEN = "any port"
"""Name of the port chosen by the kernel; most connections of a run use such ports."""
CONNECT_S = 3.0
"""Limit for connecting to another host, in seconds."""
ROUND_TRIPS = 20
SEND_S = 0.3
"""Seconds of continuous sending for measuring the bandwidth."""
_CHUNK = bytes(1 << 20)
_ECHO, _SINK = b"e", b"s"


def main() -> None:
    """Serve requests until the controller sends an exit code or exits."""
    if CONNECTION in os.environ:
        connection = socket.socket(fileno=int(os.environ.pop(CONNECTION)))
        sys.exit(asyncio.run(_serve_on(connection)))
    controller = Controller(os.environ.pop(CONTROLLER), os.environ.pop(TOKEN))
    rank = os.environ.get(RANK) or os.environ["SLURM_NODEID"]
    sys.exit(serve(controller, int(rank)))


def serve(controller: Controller, rank: int) -> int:
    """Serve the controller's requests; return the exit code that it sends, or 1 if the connection breaks."""
    name = socket.gethostname()
    node = os.environ.get("SLURMD_NODENAME", name)
    return asyncio.run(_serve(controller, Host(rank=rank, node=node, name=name)))


async def _serve(controller: Controller, host: Host) -> int:
    try:
        reader, writer = await hold_lease(controller.address, controller.token, host)
    except (OSError, TimeoutError) as error:
        print(f"{host.node}: the controller at {controller.address} cannot be reached: {error!r}", file=sys.stderr)
        return 1
    return await _serve_requests(reader, writer)


async def _serve_on(connection: socket.socket) -> int:
    return await _serve_requests(*await asyncio.open_connection(sock=connection))


async def _serve_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    address, servers = str(writer.get_extra_info("sockname")[0]), list[asyncio.Server]()
    try:
        while line := await reader.readline():
            if line.startswith(END.encode()):
                return int(line.split()[1])
            message = json.loads(line)
            request = message.pop("request")
            if request == "report":
                reply: Any = (await asyncio.to_thread(report, ReportRequest(**message))).dump()
            elif request == "listen":
                reply = await listen(address, message["ports"], servers)
            elif request == "connect":
                reply = await connect(message["address"], message["ports"])
            else:
                reply = time.time()
            writer.write(json.dumps(reply).encode() + b"\n")
    except ConnectionError:
        pass
    return 1


async def listen(address: str, ports: Mapping[str, int], servers: list[asyncio.Server]) -> dict[str, Any]:
    """Listen on a port that the kernel chooses, and on some named ports.

    Args:
        address: address of this host.
        ports: port numbers by name.
        servers: list to which the servers are added, which keeps them alive.

    Returns:
        `address`, `ports` (open ports by name), and `taken` (by name, reasons why the other ports cannot be opened).
    """
    open_ports, taken = {}, {}
    for name, port in ({CHOSEN: 0} | dict(ports)).items():
        try:
            server = await asyncio.start_server(_serve_connection, address, port, limit=1 << 22)
        except OSError as error:
            taken[name] = f"{os.strerror(error.errno)}" if error.errno else str(error)
            continue
        servers.append(server)
        open_ports[name] = server.sockets[0].getsockname()[1]
    return {"address": address, "ports": open_ports, "taken": taken}


async def connect(address: str, ports: Mapping[str, int]) -> dict[str, Any]:
    """Connect to the ports of another host, and measure the connection to the port `CHOSEN`.

    Returns:
        `closed` (errors of the unreachable ports, by name), and if `CHOSEN` is reachable, `latency_s` (shortest round trip) and
        `bytes_per_s`.
    """
    closed, measured = {}, {}
    for name, port in ports.items():
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError) as error:
            closed[name] = "no answer" if isinstance(error, TimeoutError) else _reason(error)
            continue
        try:
            if name == CHOSEN:
                measured = await _measure(reader, writer, address, port)
        except (OSError, TimeoutError) as error:
            closed[name] = f"the connection broke: {_reason(error)}"
        finally:
            writer.close()
    return {"closed": closed, **measured}


async def _measure(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, port: int) -> dict[str, float]:
    trips: list[float] = []
    async with asyncio.timeout(CONNECT_S):
        writer.write(_ECHO)
        for _ in range(ROUND_TRIPS):
            started = time.perf_counter()
            writer.write(b".")
            await reader.readexactly(1)
            trips.append(time.perf_counter() - started)
    async with asyncio.timeout(CONNECT_S + SEND_S):
        _, sink = second = await asyncio.open_connection(address, port)
        sink.write(_SINK)
        num_sent, started = 0, time.perf_counter()
        while time.perf_counter() < started + SEND_S:
            sink.write(_CHUNK)
            await sink.drain()
            num_sent += len(_CHUNK)
        sink.write_eof()
        await second[0].read()  # returns when the peer has received everything
        sink.close()
        return {"latency_s": min(trips), "bytes_per_s": num_sent / (time.perf_counter() - started)}


async def _serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Return the received data to the sender, or discard it, as requested by the first byte."""
    try:
        kind = await reader.read(1)
        while data := await reader.read(1 << 20):
            if kind == _ECHO:
                writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return every ordered pair of hosts, in rounds in which each host occurs at most once (a round-robin tournament)."""
    players: Sequence[int] = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = [pair for pair in zip(players[:half], reversed(players[half:]), strict=True) if -1 not in pair]
        found += [pairs, [(second, first) for first, second in pairs]]
        players = [players[0], players[-1], *players[1:-1]]
    return found


if __name__ == "__main__":
    main()
