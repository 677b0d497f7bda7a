"""Kubernetes pods as hosts of a run: create or find them, wait until they are ready, watch them, and release them.

The pods belong to MonarchMesh resources, which Monarch's operator implements.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from monarch.actor import HostMesh, enable_transport

from titanrl.base.choices import DeviceKind
from titanrl.config.schema import Config
from titanrl.hosts.host_meshes import attach_meshes, first_rank
from titanrl.hosts.identities import new_identities
from titanrl.hosts.kubernetes.api import Api, PodWatch
from titanrl.hosts.kubernetes.leases import KubernetesError, Lost, Pod, PodBusyError, PodLeases, tcp
from titanrl.hosts.kubernetes.manifest import Json, mesh, mesh_name, token_of
from titanrl.hosts.kubernetes.pod_state import PodState, current, end_of, progress
from titanrl.hosts.leases import Host, Leases, OnLost, Say
from titanrl.hosts.patience import match_timeouts_to_leases
from titanrl.processes.private_sockets import private_sockets

logger = logging.getLogger(__name__)

STATUS_S = 2.0
"""Limit in seconds for querying why a pod was lost, so that the report is not delayed."""


class KubernetesHosts:
    """Pods of MonarchMesh resources. Existing resources with the names of `titanrl manifest` are used; others are created."""

    def __init__(
        self, config: Config, device: DeviceKind, meshes: dict[str, int], say: Say, *, keep: bool | None = None
    ) -> None:
        """Request nothing yet.

        Args:
            config: configuration of the run.
            device: kind of the pods' devices.
            meshes: number of hosts by mesh name.
            say: called with a message for the user about what startup is waiting for.
            keep: whether to keep existing resources when the run ends; None uses `hosts.kubernetes.keep`.
        """
        self._config, self._device, self._meshes, self._say = config, device, meshes, say
        self._keeps = config.hosts.kubernetes.keep if keep is None else keep
        self._api: Api | None = None
        self._names: dict[str, str] = {}  # resource names, by mesh
        self._owned: set[str] = set()  # names of the resources to delete with the run
        self._adopted: dict[str, Json | None] = {}  # the ones of them that existed before, with their new owner
        self._pods: dict[int, PodState] = {}
        self._leases: list[PodLeases] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_acquired = False
        self._said = ""  # last message about what startup is waiting for
        self.on_lost: OnLost = lambda name, cause: None
        """Called when a host is lost."""

    async def start(self) -> dict[str, HostMesh]:
        """Create or find the resources, wait for their pods, and return their meshes.

        Raises:
            KubernetesError: The cluster refused a request, or the pods did not start.
        """
        try:
            enable_transport("tcp")  # before the first use of Monarch; by default, hosts cannot connect to this process
            match_timeouts_to_leases()
            tokens = await self._requested()
            return await self._attach(tokens, await self._ready())
        except PodBusyError:
            try:
                await asyncio.to_thread(self._leave)
            finally:
                self.kill()
            raise
        except BaseException:  # including interrupts: no pod may outlive a failed start
            self.kill()
            raise

    async def examine(self, leases: Leases) -> None:
        """Create or find the pods, and start probes in them instead of Monarch's hosts. The caller must call `kill` afterwards.

        Args:
            leases: leases that will hold the probes.

        Raises:
            KubernetesError: The cluster refused a request, or the pods did not start.
        """
        tokens = await self._requested()
        for pod, own_leases in self._placed(tokens, await self._ready()):
            name, reader, writer = await own_leases.probed(pod)
            leases.take(Host(rank=pod.rank, node=pod.name, name=name), reader, writer)
        await leases.all_held()

    def kill(self) -> None:
        """Kill every process of the run in the pods, and release them. A second call does nothing."""
        self._is_acquired = False
        for leases in self._leases:
            leases.close()
        for task in self._tasks:
            task.cancel()
        owned, self._owned = self._owned, set()
        for name in owned:
            assert self._api is not None
            try:
                self._api.delete_mesh(name)
            except KubernetesError as error:
                logger.warning("%s MonarchMesh %s remains until the controller's pod is deleted", error, name)

    def has_ended(self, mesh: str, number: int) -> bool:
        """Return True if a host exited or became unreachable."""
        return first_rank(self._meshes, mesh) + number in self._lost

    def are_alive(self) -> bool:
        """Return True if every host holds its lease."""
        return self._is_acquired and not self._lost

    @property
    def _lost(self) -> set[int]:
        return set().union(*(leases.lost for leases in self._leases))

    async def _requested(self) -> dict[str, str]:
        """Find or create the resources; return the secret of each mesh's pods."""
        requesting = asyncio.ensure_future(asyncio.to_thread(self._request))  # each of its API calls has a time limit
        try:
            return await asyncio.shield(requesting)
        except asyncio.CancelledError:  # wait for a resource that is being created, so that it can be deleted
            await asyncio.gather(requesting, return_exceptions=True)
            raise

    def _request(self) -> dict[str, str]:
        """Find or create each resource. This blocks, so it runs in a thread."""
        kubernetes, name = self._config.hosts.kubernetes, self._config.name
        self._api = Api(kubernetes.namespace, kubernetes.context)
        owner, tokens, suffix = self._api.owner(), {}, secrets.token_hex(3)
        for role in self._meshes:
            found = self._api.mesh(mesh_name(name, role))
            if found is not None and "deletionTimestamp" not in found["metadata"]:
                tokens[role] = self._adopt(role, found, owner)
                continue
            # Pods of an earlier resource of the same name may still be terminating, so a new one gets a unique name.
            self._names[role] = mesh_name(name, role, suffix)
            self._owned.add(self._names[role])
            tokens[role] = secrets.token_hex(16)
            space = self._api.namespace
            body = mesh(self._config, self._device, role, self._names[role], tokens[role], namespace=space, owner=owner)
            self._api.create_mesh(body)
        return tokens

    def _adopt(self, role: str, found: Json, owner: Json | None) -> str:
        """Use an existing resource, and take ownership of it unless it is kept; return the secret of its pods."""
        assert self._api is not None
        metadata, spec = found["metadata"], found["spec"]
        name, token = metadata["name"], token_of(found)
        others = [one["name"] for one in metadata.get("ownerReferences", ()) if owner is None or one["uid"] != owner["uid"]]
        if others:
            raise KubernetesError(
                f"name: MonarchMesh {name} belongs to {others[0]}, the controller of another run with this name "
                f"(got {self._config.name}). Wait until that run has finished, or change name."
            )
        for key, value, needed in (
            (f"hosts.{role[:-1]}_hosts", spec["replicas"], self._meshes[role]),
            ("hosts.kubernetes.port", spec.get("port", self._config.hosts.kubernetes.port), self._config.hosts.kubernetes.port),
        ):
            if value != needed:
                raise KubernetesError(
                    f"{key}: MonarchMesh {name} has {value}, but the run needs {needed} (got {needed}). "
                    f"Delete the MonarchMesh, or apply the output of titanrl manifest again."
                )
        if not token:
            raise KubernetesError(
                f"name: MonarchMesh {name} was not created by titanrl manifest (got {self._config.name}). Change name."
            )
        self._names[role] = name
        if not self._keeps:
            self._owned.add(name)
            self._adopted[name] = owner
            if owner is not None:
                self._api.own_mesh(name, [owner], metadata["resourceVersion"])
        return token

    def _leave(self) -> None:
        """Give up the ownership of resources that another run uses. This blocks, so it runs in a thread."""
        assert self._api is not None
        self._owned -= self._adopted.keys()
        for name, owner in self._adopted.items():
            if owner is not None:
                self._api.own_mesh(name, [])

    async def _ready(self) -> dict[str, dict[int, PodState]]:
        """Wait until every pod accepts connections; return their states by mesh and index."""
        limit_s = self._config.hosts.kubernetes.start_limit_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._wait()
        except TimeoutError:
            raise KubernetesError(
                f"hosts.kubernetes.start_limit_s: the pods were not ready in time: {self._said or 'no reply from the cluster'} "
                f"(got {limit_s:g}). Raise the limit, or request fewer resources."
            ) from None

    async def _wait(self) -> dict[str, dict[int, PodState]]:
        """Watch the pods until all are ready; return their states by mesh and index."""
        assert self._api is not None
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[tuple[str, dict[str, Json] | KubernetesError]]()
        states: dict[str, dict[int, PodState]] = {}

        def tell(role: str) -> Callable[[dict[str, Json] | KubernetesError], None]:
            return lambda change: _from_thread(loop, changes, (role, change))

        watches: list[PodWatch] = []
        try:
            for role, name in self._names.items():
                watches.append(self._api.watch(name, tell(role), tell(role)))
            self._say(f"waiting for the pods of MonarchMesh {', '.join(self._names.values())} in {self._api.namespace}")
            while True:
                role, change = await changes.get()
                if isinstance(change, KubernetesError):
                    raise change
                states[role] = current(change.values(), self._meshes[role])
                if self._is_ready(states):
                    return states
        finally:
            for watch in watches:
                watch.close()

    def _is_ready(self, states: dict[str, dict[int, PodState]]) -> bool:
        """Return True if all pods are ready; else tell the user what they are waiting for, if that has changed."""
        waits = []
        for role, number in self._meshes.items():
            for state in states.get(role, {}).values():
                if state.is_hopeless:
                    raise KubernetesError(
                        f"hosts.kubernetes: pod {state.name} does not start (got {state.problem}). "
                        f"Read kubectl describe pod {state.name}, and correct the image or the pods' settings."
                    )
            waits.append(progress(self._names[role], number, states.get(role, {})))
        if len(states) < len(self._meshes):  # the pods of other meshes have not been listed yet
            return False
        said = "; ".join(text for text in waits if text)
        if said and said != self._said:
            self._say(f"waiting for pods: {said}")
        self._said = said
        return not said

    async def _attach(self, tokens: dict[str, str], ready: dict[str, dict[int, PodState]]) -> dict[str, HostMesh]:
        """Acquire the lease of each pod, and attach to the Monarch hosts that the pods then start."""
        port, count = self._config.hosts.kubernetes.port, sum(self._meshes.values())
        identities = new_identities(count)
        placed = list(self._placed(tokens, ready))
        addresses = [f"{identities[pod.rank]}@{tcp(pod.ip, port)}" for pod, _ in placed]
        await asyncio.gather(*(leases.hold(pod, identities[pod.rank]) for pod, leases in placed))
        with private_sockets():
            meshes = attach_meshes(self._meshes, addresses)
        self._is_acquired = True
        names = [f"{pod.name} on {pod.node}" if pod.node else pod.name for pod in self._pods.values()]
        self._say(f"Kubernetes: {count} pods ({', '.join(names)})")
        return meshes

    def _placed(self, tokens: dict[str, str], ready: dict[str, dict[int, PodState]]) -> Iterator[tuple[Pod, PodLeases]]:
        """Yield each pod in rank order, with the leases of its mesh."""
        port = self._config.hosts.kubernetes.port + 1
        for role, number in self._meshes.items():
            leases = PodLeases(tokens[role], port, f"{self._config.name}@{socket.gethostname()}", self._on_lost)
            self._leases.append(leases)
            for state in (ready[role][index] for index in range(number)):
                rank = len(self._pods)
                self._pods[rank] = state
                yield Pod(rank=rank, name=state.name, ip=state.ip), leases

    def _on_lost(self, lost: Lost) -> None:
        task = asyncio.create_task(self._report_lost(lost))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report_lost(self, lost: Lost) -> None:
        """Report a lost host, with the reason if Kubernetes knows it."""
        assert self._api is not None
        state = self._pods[lost.pod.rank]
        cause = "Kubernetes terminated it" if lost.was_told else ""
        role = [role for role in self._meshes if first_rank(self._meshes, role) <= lost.pod.rank][-1]
        try:
            async with asyncio.timeout(STATUS_S):
                cause = await self._end_of(state, self._names[role])
        except (KubernetesError, TimeoutError) as error:
            logger.warning("the state of pod %s is unknown: %r", lost.pod.name, error)
        place = f" on {state.node}" if state.node else ""
        text = f"; {cause}" if cause else ""
        self.on_lost(lost.host, f"pod {lost.pod.name}{place} exited or is unreachable{text}")

    async def _end_of(self, state: PodState, mesh: str) -> str:
        """Wait until Kubernetes reports why a pod ended, which can be after its connection closed; return the reason."""
        assert self._api is not None
        loop, changes = asyncio.get_running_loop(), asyncio.Queue[dict[str, Json] | KubernetesError]()
        tell = partial(_from_thread, loop, changes)
        watch = self._api.watch(mesh, tell, tell)
        try:
            while True:
                pods = await changes.get()
                if isinstance(pods, KubernetesError):
                    raise pods
                if cause := end_of(pods.get(state.name), state.uid):
                    return cause
        finally:
            watch.close()


def _from_thread(loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[Any]", item: object) -> None:
    """Put an item into a queue of the event loop, unless the loop is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(queue.put_nowait, item)
