"""A small Kubernetes: an API server, Monarch's operator, the controller of Jobs, garbage collection, and a kubelet.

It speaks the few requests that a run makes, over HTTP or HTTPS, and refuses others.
"""

import contextlib
import copy
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.cluster.containers import Runtime, in_namespace
from tests.cluster.requests import MESH_PATH, NAMESPACE, POD_PATH, Handler, Refused

CRD = json.loads((Path(__file__).parent / "monarchmesh_crd.json").read_text())
RESTART_S = 1.0
"""Seconds before a container is restarted."""
Json = dict[str, Any]


class Kubernetes:
    """The cluster, from `start` to `stop`."""

    def __init__(self, folder: Path, runtime: Runtime) -> None:
        """Start nothing yet; `folder` is for logs and volumes."""
        self.folder, self._runtime = folder, runtime
        self.requests: list[str] = []
        """Method and path of all requests."""
        self.codes: dict[str, int] = {}
        """Exit code of the last container of each pod."""
        self._objects: dict[tuple[str, str], Json] = {}  # by kind and name
        self._rules: dict[str, list[Json]] = {}  # by token
        self._events: list[tuple[int, str, Json]] = []
        self._version = 0
        self._changed = threading.Condition(threading.RLock())
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by uid of the pod
        self._server: ThreadingHTTPServer | None = None
        self.url = ""

    # The cluster from outside

    def start(self, address: str = "127.0.0.1", port: int = 0, space: str = "", certificate: Path | None = None) -> None:
        """Serve the API on an address of a network namespace."""
        handler = type("Served", (Handler,), {"cluster": self})
        with in_namespace(space):
            self._server = ThreadingHTTPServer((address, port), handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate / "ca.crt", certificate / "ca.key")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._space = space
        self.url = f"{'http' if certificate is None else 'https'}://{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def clear(self) -> None:
        """Delete all objects but the permissions, and kill every process."""
        for kind in ("Job", "MonarchMesh", "Pod"):
            for name in self.names(kind):
                with contextlib.suppress(Refused):  # it went with its owner
                    self.delete(kind, name, grace_s=1)
        self.wait("the end of all pods", lambda: not self.objects("Pod"), 30)

    def stop(self) -> None:
        """Kill every process, and stop the server."""
        assert self._server is not None
        self.clear()
        self._server.shutdown()
        self._server.server_close()

    def allow(self, token: str, rules: list[Json]) -> None:
        """Give a token permissions, in the form of a Role's rules."""
        self._rules[token] = rules

    def kubeconfig(self, token: str, certificate: Path | None = None) -> Path:
        """Write a kubeconfig file; return its path."""
        cluster = {"server": self.url} | ({} if certificate is None else {"certificate-authority": f"{certificate}/ca.crt"})
        path = self.folder / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me", "namespace": NAMESPACE}}],
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def apply(self, manifest: str) -> None:
        """Create the objects of a manifest, like `kubectl apply`."""
        for body in yaml.safe_load_all(manifest):
            if body["kind"] == "Role":
                self.allow(f"account of {body['metadata']['name']}", body["rules"])
            self.create(body)

    def objects(self, kind: str) -> list[Json]:
        """Return the objects of a kind."""
        with self._changed:
            return [copy.deepcopy(one) for (other, _), one in self._objects.items() if other == kind]

    def names(self, kind: str) -> list[str]:
        """Return the names of the objects of a kind."""
        return sorted(one["metadata"]["name"] for one in self.objects(kind))

    def kill(self, pod: str) -> None:
        """Simulate a power loss of a pod: the kernel kills every process in it immediately."""
        with self._changed:
            uid = self._objects["Pod", pod]["metadata"]["uid"]
            os.killpg(self._processes[uid].pid, signal.SIGKILL)

    def signal(self, pod: str, number: signal.Signals) -> None:
        """Send a signal to the first process of a pod."""
        with self._changed:
            self._runtime.signal(self._processes[self._objects["Pod", pod]["metadata"]["uid"]], number)

    def wait(self, what: str, is_true: Callable[[], bool], limit_s: float) -> None:
        """Wait until a condition of the objects holds."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not is_true():
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {what} within {limit_s:g} s: {list(self._objects)}; read the logs in {self.folder}"
                self._changed.wait(min(left_s, 0.5))

    # Objects

    def create(self, body: Json) -> Json:
        """Create an object, and the objects and containers that it implies."""
        kind, name = body["kind"], body["metadata"]["name"]
        if kind == "MonarchMesh":
            check_mesh(body)
        with self._changed:
            if (kind, name) in self._objects:
                raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
            metadata = {**body["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": "2026-01-01T00:00:00Z"}
            created = self._put({**body, "metadata": {"namespace": NAMESPACE, **metadata}}, "ADDED")
        if kind == "MonarchMesh":
            for number in range(body["spec"]["replicas"]):
                self._create_pod(created, f"{name}-{number}", body["spec"]["podTemplate"], number)
        if kind == "Job":
            self._create_pod(created, f"{name}-{uuid.uuid4().hex[:5]}", body["spec"]["template"], 0)
        if kind == "Pod":
            threading.Thread(target=self._run_pod, args=(created,), name=name, daemon=True).start()
        return created

    def patch(self, kind: str, name: str, change: Json) -> Json:
        """Merge a change of metadata."""
        with self._changed:
            one = self._get(kind, name)
            metadata = change.get("metadata", {})
            if metadata.pop("resourceVersion", one["metadata"]["resourceVersion"]) != one["metadata"]["resourceVersion"]:
                raise Refused(409, "Conflict", "the object has been modified")
            return self._put({**one, "metadata": {**one["metadata"], **metadata}}, "MODIFIED")

    def delete(self, kind: str, name: str, grace_s: float | None = None) -> None:
        """Delete an object and its dependents."""
        with self._changed:
            one = self._get(kind, name)
            if kind == "Pod" and one["metadata"]["uid"] in self._processes:
                if "deletionTimestamp" not in one["metadata"]:
                    metadata = {**one["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
                    self._put({**one, "metadata": metadata}, "MODIFIED")
                    default = one["spec"].get("terminationGracePeriodSeconds", 30)
                    self._end(one["metadata"]["uid"], default if grace_s is None else grace_s)
                return
            self._remove(kind, name)

    def _remove(self, kind: str, name: str) -> None:
        """Remove an object, and delete the objects that it owns."""
        with self._changed:
            one = self._objects.pop((kind, name))
            self._put(one, "DELETED")
            uid = one["metadata"]["uid"]
            for (other, dependent), found in list(self._objects.items()):
                owners = found["metadata"].get("ownerReferences", ())
                if any(owner["uid"] == uid for owner in owners) and (other, dependent) in self._objects:
                    self.delete(other, dependent)

    def _get(self, kind: str, name: str) -> Json:
        if (kind, name) not in self._objects:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        return self._objects[kind, name]

    def _put(self, one: Json, change: str) -> Json:
        """Store an object with a new version, and notify the watches."""
        self._version += 1
        one = copy.deepcopy(one)
        one["metadata"]["resourceVersion"] = str(self._version)
        if change != "DELETED":
            self._objects[one["kind"], one["metadata"]["name"]] = one
        self._events.append((self._version, change, one))
        self._changed.notify_all()
        return copy.deepcopy(one)

    # Pods

    def _create_pod(self, owner: Json, name: str, template: Json, number: int) -> None:
        labels = {**template.get("metadata", {}).get("labels", {}), "apps.kubernetes.io/pod-index": str(number)}
        if owner["kind"] == "MonarchMesh":
            labels |= {"monarch.pytorch.org/mesh-name": owner["metadata"]["name"], "app.kubernetes.io/name": "monarch-worker"}
        reference = {key: owner[key] for key in ("apiVersion", "kind")}
        reference |= {key: owner["metadata"][key] for key in ("name", "uid")}
        spec = {**template["spec"], "nodeName": f"node{number + 1}"}
        metadata = {"name": name, "labels": labels, "ownerReferences": [reference]}
        status = {"phase": "Pending"}
        self.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})

    def _run_pod(self, pod: Json) -> None:
        """Run the container, and restart it whenever it exits, until the pod is deleted."""
        image = pod["spec"]["containers"][0]["image"]
        if image.startswith("missing/"):
            waiting = {"reason": "ErrImagePull", "message": f'failed to pull "{image}": not found'}
            self._status(pod, "Pending", state={"waiting": waiting})
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
            self._status(pod, "Pending", state={"waiting": waiting})
            return
        ip, last = self._runtime.address(pod), dict[str, Any]()
        while True:
            with self._changed:
                now = self._objects.get(("Pod", pod["metadata"]["name"]))
                if now is None or now["metadata"]["uid"] != pod["metadata"]["uid"]:
                    return
                process = self._runtime.start(pod, self._variables(pod, ip), self._folders(pod))
                self._processes[pod["metadata"]["uid"]] = process
            self._status(pod, "Running", ip=ip, state={"running": {}}, last=last)
            if self._answers(pod, ip, process):
                self._status(pod, "Running", ip=ip, state={"running": {}}, last=last, is_ready=True)
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if self._after_end(pod, ip, code):
                return
            last = {"terminated": {"reason": "Error" if code else "Completed", "exitCode": code if code >= 0 else 128 - code}}
            time.sleep(RESTART_S)

    def _after_end(self, pod: Json, ip: str, code: int) -> bool:
        """Return True if the exited container of a pod is not restarted."""
        name = pod["metadata"]["name"]
        with self._changed:
            del self._processes[pod["metadata"]["uid"]]
            self.codes[name] = code
            now = self._objects["Pod", name]
            if "deletionTimestamp" in now["metadata"]:
                self._remove("Pod", name)
                return True
            reason = "Error" if code else "Completed"
            exit_code = code if code >= 0 else 128 - code
            state = {"terminated": {"reason": reason, "exitCode": exit_code}}
            if pod["spec"].get("restartPolicy") != "Never":
                self._status(pod, "Running", ip=ip, state=state)
                return False
            self._status(pod, "Failed" if code else "Succeeded", ip=ip, state=state)
            owner = now["metadata"]["ownerReferences"][0]
            ttl_s = self._objects["Job", owner["name"]]["spec"].get("ttlSecondsAfterFinished")
        if ttl_s is not None:
            timer = threading.Timer(ttl_s, self._expire, [owner["name"]])
            timer.daemon = True
            timer.start()
        return True

    def _expire(self, job: str) -> None:
        with contextlib.suppress(Refused):
            self.delete("Job", job)

    def _end(self, uid: str, grace_s: float) -> None:
        process = self._processes[uid]
        with contextlib.suppress(OSError):
            self._runtime.signal(process, signal.SIGTERM)
        timer = threading.Timer(grace_s, process.kill)
        timer.daemon = True
        timer.start()

    def _status(
        self, pod: Json, phase: str, *, state: Json, ip: str = "", last: Json | None = None, is_ready: bool = False
    ) -> None:
        """Update the status of a pod, as its kubelet does."""
        container = {"name": "titanrl", "ready": is_ready, "restartCount": 1 if last else 0, "image": "", "imageID": ""}
        conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": str(is_ready)}]
        status: Json = {"phase": phase, "conditions": conditions}
        status["containerStatuses"] = [{**container, "state": state, "lastState": last or {}}]
        if ip:
            status["podIP"] = ip
        with self._changed:
            one = self._objects.get(("Pod", pod["metadata"]["name"]))
            if one is not None and one["metadata"]["uid"] == pod["metadata"]["uid"]:
                self._put({**one, "status": status}, "MODIFIED")

    def _answers(self, pod: Json, ip: str, process: subprocess.Popen[bytes]) -> bool:
        """Return True once the probe of a container succeeds; False if the container exits first."""
        probe = pod["spec"]["containers"][0].get("readinessProbe")
        while probe is not None and process.poll() is None:
            with contextlib.suppress(OSError), in_namespace(self._space):
                socket.create_connection((ip, probe["tcpSocket"]["port"]), timeout=1).close()
                return True
            time.sleep(0.2)
        return probe is None

    def _variables(self, pod: Json, ip: str) -> dict[str, str]:
        fields = {"status.podIP": ip, "metadata.name": pod["metadata"]["name"]}
        env = pod["spec"]["containers"][0].get("env", ())
        return {
            one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]] for one in env
        }

    def _folders(self, pod: Json) -> dict[str, Path | None]:
        """Return the folder of each mount of a pod."""
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        found: dict[str, Path | None] = {}
        for mount in pod["spec"]["containers"][0].get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            folder = None
            if claim := volume.get("persistentVolumeClaim"):
                folder = self.folder / "claims" / claim["claimName"]
            elif config := volume.get("configMap"):
                folder = self.folder / "config" / config["name"]
                folder.mkdir(parents=True, exist_ok=True)
                for name, text in self._objects["ConfigMap", config["name"]]["data"].items():
                    (folder / name).write_text(text)
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            found[mount["mountPath"]] = folder
        return found

    # Requests

    def check_rights(self, token: str, verb: str, group: str, resource: str) -> None:
        """Refuse a request whose token lacks the permission."""
        if token not in self._rules:
            raise Refused(401, "Unauthorized", "Unauthorized")
        for rule in self._rules[token]:
            if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                return
        raise Refused(403, "Forbidden", f'{resource} is forbidden: cannot {verb} resource "{resource}" in API group "{group}"')

    def answer(self, method: str, path: str, body: Json | None, query: Mapping[str, str]) -> Json:
        """Handle a request other than a watch."""
        base, _, name = path.rpartition("/")
        if method == "GET" and path == POD_PATH:
            selected = [one for one in self.objects("Pod") if _matches(one, query.get("labelSelector", ""))]
            return {
                "apiVersion": "v1",
                "kind": "PodList",
                "metadata": {"resourceVersion": str(self._version)},
                "items": selected,
            }
        kind = {MESH_PATH: "MonarchMesh", POD_PATH: "Pod"}.get(base if method != "POST" else path)
        with self._changed:
            if method == "POST" and kind and body:
                return self.create(body)
            if method == "PATCH" and kind and body:
                return self.patch(kind, name, body)
            if method == "DELETE" and kind:
                self.delete(kind, name)
                return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            if method == "GET" and kind:
                return copy.deepcopy(self._get(kind, name))
        raise Refused(405, "MethodNotAllowed", f"{method} {path}")

    def changes(self, since: int, query: Mapping[str, str], limit_s: float) -> Iterator[Json]:
        """Yield the changes of pods after a version, until the limit."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            with self._changed:
                new = [event for event in self._events if event[0] > since]
                if not new:
                    self._changed.wait(0.5)
                    continue
            since = new[-1][0]
            for _, change, one in new:
                if one["kind"] == "Pod" and _matches(one, query.get("labelSelector", "")):
                    yield {"type": change, "object": one}


def check_mesh(body: Json) -> None:
    """Refuse a MonarchMesh that violates the operator's schema, or has unknown fields."""
    schema = strict(CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    rest = {key: value for key, value in body.items() if key != "metadata"}
    errors = [f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(rest)]
    if errors:
        raise Refused(422, "Invalid", "; ".join(errors))


def strict(schema: Any) -> Any:
    """Return a schema that forbids unknown fields."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        result.setdefault("additionalProperties", False)
    return result


def make_certificate(folder: Path, address: str) -> None:
    """Create `ca.crt` and `ca.key` for a server at an address."""
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"]
    options += ["-addext", f"subjectAltName=IP:{address}", "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt"]
    subprocess.run(["openssl", "req", *options], check=True, capture_output=True)


def _matches(one: Json, selector: str) -> bool:
    """Return True if an object has the labels of a selector of the form `key in (value, value)`; an empty one has any."""
    key, _, values = selector.partition(" in ")
    return not selector or one["metadata"].get("labels", {}).get(key) in values.strip("()").split(",")
