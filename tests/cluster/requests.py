"""Requests to the emulated Kubernetes API."""

import contextlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from tests.cluster.kubernetes import Kubernetes

NAMESPACE = "research"
MESH_PATH = f"/apis/monarch.pytorch.org/v1alpha1/namespaces/{NAMESPACE}/monarchmeshes"
POD_PATH = f"/api/v1/namespaces/{NAMESPACE}/pods"


class Refused(Exception):
    """An error response of the API server."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message}
        self.body["code"] = self.status = status


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    cluster: "Kubernetes"

    def _serve(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.cluster.requests.append(f"{self.command} {url.path}")
        try:
            self._check_rights(url.path, query)
            if query.get("watch", "").lower() == "true":
                self._watch(query)
                return
            status = 201 if self.command == "POST" else 200
            answer = self.cluster.answer(self.command, url.path, body, query)
        except Refused as refused:
            status, answer = refused.status, refused.body
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _check_rights(self, path: str, query: Mapping[str, str]) -> None:
        group = "monarch.pytorch.org" if path.startswith("/apis/monarch") else ""
        resource = "monarchmeshes" if group else "pods"
        verb = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}[self.command]
        if verb == "get" and path in (POD_PATH, MESH_PATH):
            verb = "watch" if "watch" in query else "list"
        self.cluster.check_rights(self.headers.get("Authorization", "").partition(" ")[2], verb, group, resource)

    def _watch(self, query: Mapping[str, str]) -> None:
        """Send changes in chunks."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            changes = self.cluster.changes(int(query.get("resourceVersion", 0)), query, float(query.get("timeoutSeconds", 30)))
            for change in changes:
                line = json.dumps(change).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""
