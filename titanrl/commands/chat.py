"""Chat with a policy: `titanrl chat URL`, or `titanrl chat RUN`, which serves it on a Unix socket for itself."""

import argparse
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanrl.base import terminal
from titanrl.base.errors import TitanRLError
from titanrl.config import ConfigError
from titanrl.config.device import installed_version
from titanrl.config.errors import refusing
from titanrl.config.load import read_source
from titanrl.metrics.reading import RunRecord
from titanrl.metrics.run_directory import run_of
from titanrl.processes.confine import end_with_parent
from titanrl.processes.temporary import private_folder
from titanrl.run.command import CLOSE_LIMIT_S
from titanrl.serving.calls import read_keys

if TYPE_CHECKING:
    import httpx

NEW = "/new"
"""Line that starts a new conversation."""
CALL_S = 660.0
"""Time limit for the next part of a reply, in seconds; the endpoint ends a call before."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that control a terminal."""


class NoReply(TitanRLError):
    """The endpoint refuses a request, or its reply ends early."""

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(readable(reason).split())[:1000])  # one line


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.commands.chat") -> None:
    """Send one message per line until end of input."""
    terminal.prepare()
    parser = argparse.ArgumentParser(prog=prog, description="Chat with a policy, one message per line.")
    parser.add_argument("policy", metavar="POLICY", help="URL of a served policy, or what `titanrl serve` accepts")
    parser.add_argument(
        "--conversation", action="store_true", help=f"keep the earlier messages and replies, until a line {NEW}"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt (default: that of the run's data)")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 (the default) is greedy")
    parser.add_argument(
        "--keys", type=terminal.path, metavar="FILE", help="file with the key for the URL, which only you can read"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override those of the run")
    arguments = parser.parse_intermixed_args(argv)
    policy, is_url = arguments.policy, arguments.policy.startswith(("http://", "https://", "unix:"))
    if not 0.0 <= arguments.temperature < math.inf:
        parser.error(f"--temperature: must be a finite number >= 0 (got {arguments.temperature}). Give one such as 0.7.")
    if is_url and arguments.overrides:
        parser.error(f"{arguments.overrides[0]}: overrides require a directory (got {policy}). Give them to `titanrl serve`.")
    if not is_url and arguments.keys is not None:
        parser.error(f"--keys: requires the URL of a served policy (got {policy}). Remove the option.")
    terminal.handle_ending(lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with refusing():
            if installed_version("httpx") is None:
                raise ConfigError(
                    "httpx: the package is not installed. Install the required packages: titanrl doctor --install"
                )
            key = "none" if arguments.keys is None else next(iter(read_keys(arguments.keys)))
        with nullcontext(policy) if is_url else serving(policy, arguments.overrides) as url:
            system, run_dir = arguments.system, None if is_url else run_of(Path(policy).resolve())
            if run_dir is not None:
                if system is None:  # the server has checked the configuration
                    system = (
                        read_source(run_dir / "config.yaml", arguments.overrides).values.get("data", {}).get("system_prompt")
                    )
                example = RunRecord(run_dir).first_group()
                if example is not None:  # a fine-tuning has none
                    print(f"The policy was trained on prompts like this one: {readable(example.prompt)}")
            code = chat(url, key, system, arguments)
    except KeyboardInterrupt:  # while there was no reply to cancel
        code = 128 + signal.SIGINT
    sys.exit(code)


@contextmanager
def serving(policy: str, overrides: Sequence[str]) -> Iterator[str]:
    """Serve a policy with `titanrl serve`, yield the URL, and end the server. If it cannot be served, the server says why."""
    folder = private_folder()
    command = [sys.executable, "-m", "titanrl.commands.serve", f"--unix={folder.path}/policy", "--", policy, *overrides]
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C cancels a reply, and not the server
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    try:
        assert server.stdout is not None
        with terminal.announcing("loading the policy"):
            if not server.stdout.readline():
                sys.exit(server.wait())
        yield f"unix:{folder.path}/policy"
    finally:
        terminal.exit_on_signals()  # the server ends with this process
        server.send_signal(signal.SIGINT)
        try:
            server.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            server.kill()
        folder.delete()


def chat(url: str, key: str, system: str | None, arguments: argparse.Namespace) -> int:
    """Send the lines of standard input, and print the replies while they are sampled; return the exit code."""
    import httpx

    transport, base = None, url.removesuffix("/").removesuffix("/v1")
    if url.startswith("unix:"):
        transport, base = httpx.HTTPTransport(uds=url.removeprefix("unix:")), "http://localhost"
    elif url.startswith(("http://127.0.0.1:", "http://localhost:", "http://[::1]:")):
        transport = httpx.HTTPTransport()  # without a proxy of the environment
    start = [] if system is None else [{"role": "system", "content": system}]
    known, headers = list(start), {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(transport=transport, base_url=base, headers=headers, timeout=CALL_S) as client:
            match content_of(client.get("/v1/models")):
                case {"data": [{"id": str(model)}, *_]}:
                    body = {"model": model, "temperature": arguments.temperature, "stream": True}
                case _:
                    raise NoReply("no policy is served there. Give the URL that `titanrl serve` prints.")
            for line in read_lines():
                if line == NEW or not arguments.conversation:
                    known = list(start)
                if line == NEW:
                    continue
                asked = [*known, {"role": "user", "content": line}]
                try:
                    known = [*asked, say(client, body | {"messages": asked})]
                except KeyboardInterrupt:
                    print("cancelled", file=sys.stderr)
                except NoReply as error:
                    print(f"error: {error}", file=sys.stderr)
    except (NoReply, httpx.HTTPError, httpx.InvalidURL, ImportError) as error:  # the last for a SOCKS proxy
        print(f"error: {url}: {error}", file=sys.stderr)
        return 1
    return 0


def read_lines() -> Iterator[str]:
    """Yield the non-empty lines of standard input until end of file or Ctrl-C."""
    if sys.stdin is None:  # closed
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    try:
        while True:
            line = input("> " if sys.stdin.isatty() else "").strip()
            if line:
                yield line
    except (EOFError, KeyboardInterrupt):
        return


def say(client: "httpx.Client", body: Mapping[str, Any]) -> dict[str, str]:
    """Print the reply to a conversation while it is sampled; return its message. Raise `NoReply` if there is none."""
    told, cause = {"reasoning_content": "", "content": ""}, ""
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
            content_of(response)
        try:
            for event in events(response.iter_bytes()):
                match event:
                    case {"error": {"message": str(text)}}:
                        raise NoReply(text)
                    case {"choices": [{"delta": dict(delta), "finish_reason": cause}]}:
                        for name, part in delta.items():
                            if name in told and part:
                                gap = "\n\n" if name == "content" and told["reasoning_content"] and not told["content"] else ""
                                show(gap + readable(part))
                                told[name] += part
        finally:
            print()
    if not cause:
        raise NoReply("the reply ended before it was complete")
    if cause == "length":
        print("the reply was cut at its limit", file=sys.stderr)
    return {"role": "assistant"} | {name: text for name, text in told.items() if text or name == "content"}


def show(text: str) -> None:
    """Print a text. Ctrl-C waits for it, because an interrupted write would be repeated with the next one."""
    # A mask of signals would not suffice: another thread can receive the signal, and Python would still interrupt this one.
    received: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        print(text, end="", flush=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        raise KeyboardInterrupt


def events(chunks: Iterable[bytes]) -> Iterator[Any]:
    """Yield the JSON data of server-sent events. Raise `NoReply` if an event is no JSON."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                try:
                    yield json.loads(line.removeprefix(b"data: "))
                except ValueError:
                    raise NoReply("the reply is no stream of JSON") from None


def content_of(response: "httpx.Response") -> object:
    """Return the JSON of a response; None if it is none. Raise `NoReply` if the endpoint refuses the request."""
    try:
        content: object = response.json()
    except ValueError:
        content = None
    match content:
        case {"error": {"message": str(text)}}:
            raise NoReply(text)
    if response.is_error:
        raise NoReply(f"the endpoint answered with status {response.status_code}")
    return content


def readable(text: str) -> str:
    """Return a text without the characters that control a terminal."""
    return _CONTROL.sub("\ufffd", text)


if __name__ == "__main__":
    main()
