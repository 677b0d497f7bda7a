"""Program of each trainer and generator pod: runs Monarch's host for the controller that holds the pod's lease."""

import asyncio
import os
import sys

from titanrl.hosts.kubernetes.leases import PodHost
from titanrl.processes.variables import temporary_folder

TOKEN = "TITANRL_TOKEN"
"""Environment variable with the secret of the pod's lease."""
POD_IP = "TITANRL_POD_IP"
"""Environment variable with the address of the pod."""


def main() -> None:
    """Serve until Kubernetes terminates the pod. The command-line argument is Monarch's port."""
    token, address = os.environ.pop(TOKEN), os.environ.pop(POD_IP)  # not needed by the run's processes
    with temporary_folder():
        asyncio.run(PodHost(token, address, int(sys.argv[1])).serve())


if __name__ == "__main__":
    main()
