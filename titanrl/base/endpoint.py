"""Requests to an HTTP endpoint that takes JSON, with a deadline and retries."""

import asyncio
import os
import re
import ssl
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from titanrl.base.errors import TitanRLError

RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""HTTP status codes for which the request is retried."""
MAX_PAUSE_S = 30.0
"""Maximum pause before a retry in seconds, even if the server requests a longer one."""
_MAX_CHARS = 80


@cache
def certificates() -> ssl.SSLContext:
    """Return the certificates that the clients of this process trust. Reading them takes tens of milliseconds."""
    return httpx.create_ssl_context()


class EndpointError(TitanRLError):
    """The endpoint did not reply, or refused the request."""


class Endpoint:
    """An HTTP endpoint. A problem is always an error, after the retries that can solve it."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        secret: str | None,
        timeout_s: float,
        num_retries: int,
        max_reply_bytes: int,
        max_connections: int = 100,
    ) -> None:
        """Make no request.

        Args:
            url: Address of the requests.
            name: Name of the endpoint in messages, such as `judge`.
            secret: API key; None sends no key.
            timeout_s: Time limit of one attempt, with its reply.
            num_retries: Retries after a timeout, a lost connection, or a status in `RETRIED`.
            max_reply_bytes: Maximum length of a reply's body.
            max_connections: Connections at the same time; further requests wait, within the time limit of their attempt.
        """
        headers = {"Accept-Encoding": "identity"}  # a small compressed body can have any length
        if secret is not None:
            headers["Authorization"] = f"Bearer {secret}"
        self._url, self._name, self._max_reply_bytes = url, name, max_reply_bytes
        self._timeout_s, self._num_retries = timeout_s, num_retries
        self.num_retried = 0
        """Number of failed attempts that were repeated."""
        # Each attempt sets a limit for the complete request. The timeouts of httpx apply to single reads.
        limits = httpx.Limits(max_connections=max_connections)
        self._client = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, verify=certificates())

    @property
    def limit_s(self) -> float:
        """Upper bound on the duration of a request in seconds, with all attempts and the pauses between them."""
        return (1 + self._num_retries) * self._timeout_s + self._num_retries * MAX_PAUSE_S + 1.0

    async def post(self, body: Mapping[str, Any]) -> str:
        """Send a request and return the body of the reply; raise `EndpointError` if there is none or it is a refusal."""
        attempt = 0
        while True:
            try:
                return await self._attempt(body)
            except _TemporaryError as failure:
                if attempt == self._num_retries:
                    raise EndpointError(f"{failure} (attempts: {attempt + 1})") from None
                # Without a pause, retries would add to the load of an overloaded server.
                asked = failure.retry_after_s
                await asyncio.sleep(min(2.0**attempt / 2 if asked is None else asked, MAX_PAUSE_S))
            attempt += 1
            self.num_retried += 1

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _attempt(self, body: Mapping[str, Any]) -> str:
        try:
            async with asyncio.timeout(self._timeout_s), self._client.stream("POST", self._url, json=body) as reply:
                status, received = reply.status_code, bytearray()
                async for chunk in reply.aiter_bytes():
                    received += chunk
                    if len(received) > self._max_reply_bytes:
                        rule = f"the {self._name}'s reply must not have more than {self._max_reply_bytes} bytes"
                        raise EndpointError(f"{rule} (status {status})")
                text = received.decode(errors="replace")
        except TimeoutError:
            raise _TemporaryError(f"the {self._name} did not reply within timeout_s={self._timeout_s:g}") from None
        except httpx.HTTPError as error:
            raise _TemporaryError(f"the {self._name} cannot be reached: {type(error).__name__}: {error}") from None
        if status == httpx.codes.OK:
            return text
        refusal = f"the {self._name} replied with HTTP status {status} ({text[:_MAX_CHARS]!r})"
        if status not in RETRIED:
            raise EndpointError(refusal)
        pause = reply.headers.get("Retry-After", "")  # seconds, or a date
        raise _TemporaryError(refusal, float(pause) if re.fullmatch(r"\d{1,6}", pause) else None)


class _TemporaryError(Exception):
    """Raised for a failed request that can succeed if it is retried."""

    def __init__(self, text: str, retry_after_s: float | None = None) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
        """Pause in seconds that the server requests; None if it requests none."""


def read_secret(key: str, variable: str | None, file: Path | None = None) -> str | None:
    """Return the API key in an environment variable or in the first line of a file; None if neither is given.

    `key` is the path of the section, for messages. Raise `ValueError` if the key cannot be read.
    """
    if variable is not None:
        if secret := os.environ.get(variable):
            return secret
        raise ValueError(
            f"{key}.key_variable: the environment variable must hold the API key, but it is not set "
            f"(got {variable}). Export it where the run starts."
        )
    if file is None:
        return None
    try:
        secret = file.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{key}.key_file: cannot be read: {error} (got {file}). Give a file with the API key.") from None
    if not secret:
        raise ValueError(f"{key}.key_file: the first line must be the API key (got {file}). Write it there.")
    return secret
