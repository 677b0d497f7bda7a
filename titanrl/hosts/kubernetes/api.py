"""Requests to the Kubernetes API. Each call blocks, but has a time limit; `Api.watch` follows pods in a thread.

The `kubernetes` package is optional, so it is imported where it is used.
"""

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.hosts.kubernetes.leases import KubernetesError
from titanrl.hosts.kubernetes.manifest import GROUP, MESH_LABEL, PLURAL, POD_NAME, VERSION, Json

if TYPE_CHECKING:
    from kubernetes.client import ApiClient, ApiException, Configuration

logger = logging.getLogger(__name__)

REPLY_S = 15.0
"""Limit for a response of the API server, in seconds."""
RELEASE_S = 5.0
"""Shorter limit for deletions, which delay the end of the run."""
WATCH_S = 300
"""Seconds after which a watch is reopened. The server sends nothing while nothing changes."""
RETRY_S = 1.0
"""Seconds before a failed watch is reopened."""
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder with the namespace and credentials of a pod."""
OnPods = Callable[[dict[str, Json]], None]
"""Called with all pods of a mesh, by name, whenever one changes."""


def missing_package() -> str:
    """Return an error message if the `kubernetes` package is missing; empty if it is installed."""
    if find_spec("kubernetes") is not None:
        return ""
    return (
        "hosts.kind: kubernetes needs the package kubernetes, which is not installed (got kubernetes). pip install kubernetes"
    )


def in_cluster() -> bool:
    """Return True if this process runs in a pod."""
    return "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.exists()


class Api:
    """Client of the API, for one namespace."""

    def __init__(self, namespace: str | None, context: str | None) -> None:
        """Read the credentials of the pod, or from the kubeconfig file; open no connection yet.

        Args:
            namespace: namespace of the run; None uses the namespace of the pod or of the context.
            context: context in the kubeconfig file; None uses the current one.

        Raises:
            KubernetesError: There are no credentials.
        """
        client, default = _client(context)
        self.namespace = namespace or default
        """Namespace of all objects."""
        from kubernetes import client as kubernetes

        self._pods, self._custom = kubernetes.CoreV1Api(client), kubernetes.CustomObjectsApi(client)
        self._host = client.configuration.host
        self._where: Json = {"group": GROUP, "version": VERSION, "namespace": self.namespace, "plural": PLURAL}

    def mesh(self, name: str) -> Json | None:
        """Return a MonarchMesh; None if it does not exist."""
        found: Json | None = self._request(
            f"get MonarchMesh {name}", self._custom.get_namespaced_custom_object, name=name, **self._where
        )
        return found

    def create_mesh(self, body: Json) -> Json:
        """Create a MonarchMesh."""
        what = f"create MonarchMesh {body['metadata']['name']}"
        created: Json | None = self._request(what, self._custom.create_namespaced_custom_object, body=body, **self._where)
        if created is None:
            raise KubernetesError(
                f"hosts.kind: the cluster at {self._host} has no MonarchMesh resources (got kubernetes). "
                "Install Monarch's operator (docs/howto/kubernetes.md)."
            )
        return created

    def own_mesh(self, name: str, owners: list[Json], version: str | None = None) -> None:
        """Set the owners of a MonarchMesh, which Kubernetes deletes with them.

        With `version`, the request fails if the resource has changed since that version.
        """
        body = {"metadata": {"ownerReferences": owners} | ({} if version is None else {"resourceVersion": version})}
        self._request(
            f"patch MonarchMesh {name}", self._custom.patch_namespaced_custom_object, name=name, body=body, **self._where
        )

    def delete_mesh(self, name: str) -> None:
        """Delete a MonarchMesh. Do nothing if it does not exist."""
        delete = self._custom.delete_namespaced_custom_object
        self._request(f"delete MonarchMesh {name}", delete, limit_s=RELEASE_S, name=name, **self._where)

    def pod(self, name: str) -> Json | None:
        """Return a pod; None if it does not exist."""
        found: Json | None = self._request(
            f"get pod {name}", self._pods.read_namespaced_pod, name=name, namespace=self.namespace
        )
        return found

    def owner(self) -> Json | None:
        """Return the pod of this process as an `ownerReferences` entry; None outside the cluster."""
        if not in_cluster():
            return None
        name = os.environ.get(POD_NAME, socket.gethostname())
        pod = self.pod(name)
        if pod is None:
            logger.warning(
                "there is no pod %s; set %s to the name of this pod, so that resources are deleted with it", name, POD_NAME
            )
            return None
        return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": pod["metadata"]["uid"]}

    def watch(self, mesh: str, on_pods: OnPods, on_error: Callable[[KubernetesError], None]) -> "PodWatch":
        """Follow the pods of a mesh in a thread, until the returned watch is closed."""
        return PodWatch(self._pods, self._request, self.namespace, mesh, on_pods, on_error)

    def _request(self, what: str, call: Callable[..., Any], *, limit_s: float = REPLY_S, **arguments: Any) -> Any:
        """Call the API; return the object as JSON, or None if it does not exist.

        Raises:
            KubernetesError: The server refused the request or did not respond.
        """
        from kubernetes.client import ApiClient, ApiException
        from urllib3.exceptions import HTTPError

        try:
            return ApiClient().sanitize_for_serialization(call(**arguments, _request_timeout=limit_s))
        except ApiException as error:
            if error.status == 404:
                return None
            raise KubernetesError(refusal(what, self.namespace, error)) from None
        except HTTPError as error:
            raise KubernetesError(
                f"hosts.kubernetes: the API server at {self._host} did not respond to {what!r} (got {error}). "
                "Check the cluster and the context in the kubeconfig file."
            ) from None


class PodWatch:
    """Watch on the pods of a mesh, in a thread."""

    def __init__(
        self,
        pods: Any,
        request: Callable[..., Any],
        namespace: str,
        mesh: str,
        on_pods: OnPods,
        on_error: Callable[[KubernetesError], None],
    ) -> None:
        """Start the thread, in which `on_pods` and `on_error` are called."""
        from kubernetes.watch import Watch

        self._pods, self._request, self._on_pods, self._on_error = pods, request, on_pods, on_error
        self._selection = {"namespace": namespace, "label_selector": f"{MESH_LABEL}={mesh}"}
        self._watch = Watch()
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name=f"pods of {mesh}", daemon=True).start()

    def close(self) -> None:
        """Signal the thread to exit; do not wait for it."""
        self._is_closed.set()
        self._watch.stop()

    def _run(self) -> None:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        while not self._is_closed.is_set():
            try:
                self._follow()
            except KubernetesError as error:
                self._on_error(error)
                return
            except (ApiException, HTTPError, OSError, ValueError, LookupError, AttributeError) as error:  # connection lost
                if not self._is_closed.wait(RETRY_S):
                    logger.info("reopening the watch of pods: %r", error)

    def _follow(self) -> None:
        """List the pods, then apply changes until the watch ends."""
        listed = self._request("list pods", self._pods.list_namespaced_pod, **self._selection)
        pods = {pod["metadata"]["name"]: pod for pod in listed["items"]}
        self._on_pods(dict(pods))
        options = {"resource_version": listed["metadata"].get("resourceVersion"), "timeout_seconds": WATCH_S}
        limits = {"_request_timeout": (REPLY_S, WATCH_S + REPLY_S), "deserialize": False}
        changes = self._watch.stream(self._pods.list_namespaced_pod, **self._selection, **options, **limits)
        for change in changes:
            if self._is_closed.is_set():
                return
            pod = change["object"]
            if change["type"] == "ERROR":
                return  # the resource version is too old
            if change["type"] == "DELETED":
                pods.pop(pod["metadata"]["name"], None)
            else:
                pods[pod["metadata"]["name"]] = pod
            self._on_pods(dict(pods))


def refusal(what: str, namespace: str, error: "ApiException") -> str:
    """Return the error message for a request that the API server refused."""
    fix = {
        401: "Log in to the cluster again.",
        403: "Give the service account of the controller the Role that `titanrl manifest` prints.",
        409: "Another controller may have changed it; restart the run.",
    }.get(error.status, "Correct hosts.kubernetes.")
    reason = _reason(error)
    return f"hosts.kubernetes: the cluster refuses to {what} in namespace {namespace} (got {error.status}: {reason}). {fix}"


def _reason(error: "ApiException") -> str:
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return " ".join(str(message).split())


def _client(context: str | None) -> "tuple[ApiClient, str]":
    """Return a client, and the default namespace of its credentials."""
    if problem := missing_package():
        raise KubernetesError(problem)
    from kubernetes import client, config

    configuration: Configuration = client.Configuration()
    try:
        if in_cluster():
            config.load_incluster_config(configuration)
            namespace = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
        else:
            config.load_kube_config(context=context, client_configuration=configuration)
            contexts, active = config.list_kube_config_contexts()
            named: Mapping[str, Any] = next((one for one in contexts if one["name"] == context), active)
            namespace = named["context"].get("namespace") or "default"
    except (config.ConfigException, OSError) as error:
        raise KubernetesError(
            f"hosts.kubernetes.context: found no credentials for a cluster (got {context!r}: {error}). "
            "Start the run in a pod of the cluster, or set KUBECONFIG."
        ) from None
    return client.ApiClient(configuration), namespace
