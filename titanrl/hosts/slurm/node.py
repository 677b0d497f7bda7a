"""Program of each node of a Slurm job: runs Monarch's host until the controller exits or releases the node.

It forwards Slurm's termination signal (`scancel`, preemption) to the controller, which shuts the run down in order. Monarch's
host ignores SIGTERM and outlives its controller, so it runs as a child of this program.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys

from titanrl.hosts.leases import ENDING, Host, hold_lease, lease_closed
from titanrl.processes.variables import temporary_folder

CONTROLLER = "TITANRL_CONTROLLER"
"""Environment variable with the address of the controller's leases."""
TOKEN = "TITANRL_TOKEN"
"""Environment variable with the secret of the leases."""
IDENTITIES = "TITANRL_HOSTS"
"""Environment variable with the Monarch identities of the hosts, by rank, separated by spaces."""
PROGRAM = "from titanrl.hosts.emulated_host import main; main()"
"""Program of Monarch's host."""


def main() -> None:
    """Serve until the controller exits. The command-line argument is Monarch's port."""
    variables = {name: os.environ.pop(name) for name in (CONTROLLER, TOKEN, IDENTITIES)}  # not needed by the run's processes
    rank = int(os.environ["SLURM_NODEID"])
    host = Host(rank=rank, node=os.environ["SLURMD_NODENAME"], name=socket.gethostname())
    address = f"{variables[IDENTITIES].split()[rank]}@tcp://{host.node}:{sys.argv[1]}"
    with temporary_folder():
        sys.exit(asyncio.run(serve(variables[CONTROLLER], variables[TOKEN], host, address)))


async def serve(controller: str, token: str, host: Host, address: str) -> int:
    """Run Monarch's host for as long as the controller holds the lease; return the exit code.

    Args:
        controller: address of the controller's leases.
        token: secret of the leases.
        host: this host.
        address: identity and address of Monarch's host.
    """
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, address, str(os.getpid()), stdin=asyncio.subprocess.DEVNULL
    )
    try:
        try:
            reader, writer = await hold_lease(controller, token, host)
        except (OSError, TimeoutError) as error:
            print(f"{host.node}: the controller at {controller} cannot be reached: {error!r}", file=sys.stderr)
            return 1
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, writer.write, ENDING)
        ends = {asyncio.ensure_future(lease_closed(reader)), asyncio.ensure_future(worker.wait())}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if worker.returncode is not None:
            print(f"{host.node}: Monarch's host exited with code {worker.returncode}", file=sys.stderr)
            return 1
        return 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()


if __name__ == "__main__":
    main()
