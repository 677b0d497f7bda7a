"""Serve a policy over HTTP: `titanrl serve RUN`; train it for clients: `titanrl serve --tinker MODEL`; and `titanrl chat`.

Clients of any framework reach a policy through a base URL. It is the endpoint of training (`titanrl.serving`), over a session
with generators. With `--tinker`, the session also has a trainer, and clients of Tinker train their own models.
`titanrl chat URL` is a client of such an endpoint, and `titanrl chat RUN` serves the run on a Unix socket for itself.
"""

import argparse
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from titanrl.base import terminal
from titanrl.base.errors import TitanRLError
from titanrl.base.files import why_no_file, why_no_folder
from titanrl.base.ownership import bind
from titanrl.config import Config, ConfigError, Source
from titanrl.config.device import installed_version
from titanrl.config.errors import BrokenRule, refusing
from titanrl.config.load import read_policy_source, read_source, validate
from titanrl.launch.preflight import preflight
from titanrl.metrics.console import Console
from titanrl.metrics.reading import RunRecord
from titanrl.metrics.run_directory import run_of
from titanrl.models.directory import read_model
from titanrl.processes.confine import end_with_parent
from titanrl.processes.temporary import private_folder
from titanrl.run import command
from titanrl.run.checkpoints import checkpoint_dir, newest_version, resumable
from titanrl.run.command import CLOSE_LIMIT_S
from titanrl.serving.calls import read_keys

if TYPE_CHECKING:
    import httpx

ADAPTERS = ("generator.model_impl=native", "weights.lora=adapters", "weights.held_adapters=16")
"""Overrides with which generators hold the adapters of Tinker's clients."""
MAX_MODEL_TOKENS = 4096
"""Longest prompt and completion of a model that no run has configured, unless overridden."""
NEW = "/new"
"""Line that starts a new conversation."""
CALL_S = 660.0
"""Time limit for the next part of a reply, in seconds; the endpoint ends a call before."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that control a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A policy to serve."""

    name: str
    """Name of the policy for clients."""
    config: Config
    source: Source
    state: Path | None
    """Checkpoint to load into a trainer, which publishes it; None serves `model.path` unchanged."""
    version: int
    """Policy version."""
    checkpoints: Path | None = None
    """Folder for the checkpoints of Tinker's clients; None serves the policy."""
    is_newest: bool = False
    """True if `state` is the newest checkpoint of a run, which may go on and replace it."""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m titanrl.commands.serve") -> None:
    """Run the command, then exit the process."""
    terminal.prepare()
    arguments = parse(argv, prog=prog)
    scratch = Path(tempfile.mkdtemp(prefix="titanrl-serve-"))
    try:
        with refusing():
            keys = read_keys(arguments.keys) if arguments.keys is not None else {}
            if arguments.unix is None:
                check_host(arguments.host, has_keys=bool(keys))
            check_free(arguments.at)
            if arguments.tinker:
                check_tinker(keys, arguments.keys)
            find = partial(find_policy, arguments.policy, arguments.step, scratch=scratch, tinker=arguments.tinker)
            if not arguments.tinker:
                served = find(arguments.overrides)
            else:
                try:
                    served = find([*ADAPTERS, *arguments.overrides])
                except ConfigError:  # it trains all weights, or generators cannot hold adapters
                    served = find(arguments.overrides)
                name = arguments.name or served.name
                folder = arguments.checkpoints or Path("runs", "tinker", name.replace("/", "--"))
                served = replace(served, name=name, checkpoints=folder.resolve())
            training = served.state is not None or served.checkpoints is not None
            with terminal.announcing("checking the model"):
                preflight(served.config, served.source, training=training, rollouts=False)
    except SystemExit:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    work = partial(serve, served, keys, arguments)
    command.exit_process(command.run_session(work, title=served.name, folder=scratch)[1])


def parse(argv: Sequence[str] | None, *, prog: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=prog, description="Serve a policy over HTTP, as OpenAI and Anthropic do.")
    parser.add_argument(
        "policy",
        type=terminal.path,
        metavar="POLICY",
        help="directory of a run, of one of its checkpoints, or of a Hugging Face model; with --tinker, also a configuration",
    )
    parser.add_argument(
        "--tinker", action="store_true", help="train models for clients of Tinker, instead of completing texts with the policy"
    )
    parser.add_argument(
        "--checkpoints",
        type=terminal.path,
        metavar="DIR",
        help="with --tinker: folder for what clients save (default: runs/tinker/NAME)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="step of the run's checkpoint to serve (default: the newest)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen at; 0 selects a free one (default: 8000)")
    parser.add_argument(
        "--unix", type=terminal.path, metavar="PATH", help="Unix socket to listen at, in a folder that only you can enter"
    )
    parser.add_argument(
        "--keys", type=terminal.path, metavar="FILE", help="file with one key per line, which only you can read"
    )
    parser.add_argument("--name", help="name of the policy for clients (default: that of the run or the directory)")
    parser.add_argument(
        "--max-calls", type=int, default=256, metavar="N", help="completions that clients can wait for at once (default: 256)"
    )
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="values that override those of the run")
    arguments = parser.parse_intermixed_args(argv)  # overrides may come after an option
    if not 0 <= arguments.port < 65536:
        parser.error(f"--port: must be 0 to 65535 (got {arguments.port}). Give one such as 8000.")
    if arguments.max_calls < 1:
        parser.error(f"--max-calls: must be at least 1 (got {arguments.max_calls}). Give one such as 256.")
    if arguments.checkpoints is not None and not arguments.tinker:
        parser.error("--checkpoints: only clients of Tinker save any. Add --tinker, or remove the option.")
    arguments.at = arguments.unix or ("127.0.0.1" if arguments.host == "localhost" else arguments.host, arguments.port)
    return arguments


def check_tinker(keys: Collection[str], file: Path | None) -> None:
    """Raise `ConfigError` if the package `tinker` is missing, or Tinker's client would refuse a key."""
    if find_spec("tinker") is None:
        raise ConfigError("--tinker: the package tinker is not installed. Run `pip install 'titanrl[tinker]'`.")
    if not all(key.startswith("tml-") for key in keys):
        rule = "Tinker's client requires that keys start with tml-"
        raise ConfigError(f"--keys: {rule} (got another in {file}). Make one with `echo tml-$(openssl rand -hex 24)`.")


def check_host(host: str, *, has_keys: bool) -> None:
    """Raise `ConfigError` if a host is not valid, or other machines can reach it and there are no keys."""
    try:
        is_local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"--host: must be an IP address or localhost (got {host}). Use 127.0.0.1.") from None
    if not (is_local or has_keys):
        raise ConfigError(
            f"--host: an address that other machines can reach requires keys (got {host}). Give a file of keys with --keys, or "
            "use 127.0.0.1."
        )


def check_free(at: tuple[str, int] | Path) -> None:
    """Raise `ConfigError` if nothing can listen at an address, before the processes are started."""
    try:
        bind(at).close()
    except (ValueError, OSError) as error:
        key = "--unix" if isinstance(at, Path) else "--port"
        raise ConfigError(f"{key}: nothing can listen there ({error}). Stop what uses it, or choose another address.") from None
    if isinstance(at, Path):
        at.unlink()


def find_policy(policy: Path, step: int | None, overrides: Sequence[str], scratch: Path, *, tinker: bool = False) -> Served:
    """Find the policy in the directory of a run, a checkpoint or a model; for Tinker, also that of a configuration.

    Without a step, it is the exported model of a finished run, or else the newest checkpoint. `scratch` is a directory for
    logs, and for the configuration of a model.

    Raises:
        ConfigError: There is no such policy.
    """
    if tinker:
        overrides = [*overrides, "rollout.temperature=1.0"]  # the log-probabilities of Tinker's losses have no temperature
        if why_no_folder(policy):
            if step is not None:
                raise ConfigError(f"--step: only a run has steps (got {step}, and {policy} is none). Remove the option.")
            parts = ("sft=null", f"output_dir={json.dumps(str(scratch))}")
            return _served(read_policy_source(policy, [*overrides, *parts]))
    if found := why_no_folder(policy):
        raise ConfigError(f"POLICY: it {found} (got {policy}). Give the directory of a run or a model.")
    policy = policy.resolve()
    run_dir = run_of(policy)
    if run_dir is not None:
        if run_dir != policy:
            name = policy.name
            if step is not None:
                raise ConfigError(f"--step: a checkpoint has its own step (got {step}, and {policy}). Remove the option.")
            if name != "final" and not name.removeprefix("step-").isdigit():
                rule = "must be a checkpoint such as step-10 or final"
                raise ConfigError(f"POLICY: {rule} (got {policy}). Give another directory.")
            step = None if name == "final" else int(name.removeprefix("step-"))
        return _of_run(run_dir, step, overrides, scratch)
    if step is not None:
        raise ConfigError(f"--step: only a run has steps (got {step}, and {policy} is no run). Remove the option.")
    model = read_model(policy)
    if isinstance(model, BrokenRule):
        raise ConfigError(str(replace(model, values={"POLICY": str(policy)})))
    longest = min(model.shape.max_positions, MAX_MODEL_TOKENS)
    settings = {
        "name": "served",
        "num_steps": 1,
        "data": {"max_prompt_tokens": longest - longest // 4},
        "rollout": {"max_new_tokens": longest // 4},
        "trainer": {"row_tokens": longest},
    }
    file = scratch / "model.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return replace(_served(read_source(file, [*overrides, *_fixed(policy, scratch)])), name=policy.name)


def _of_run(run_dir: Path, step: int | None, overrides: Sequence[str], scratch: Path) -> Served:
    """Return the policy of a run: its exported model, or a checkpoint."""
    checkpoints = run_dir / "checkpoints"
    if step is None and not why_no_file(checkpoints / "final" / "config.json"):
        source = read_policy_source(run_dir / "config.yaml", [*overrides, *_fixed(checkpoints / "final", scratch)])
        return _served(source, version=newest_version(run_dir) or 0)
    state, version = _checkpoint(run_dir, step)
    source = read_policy_source(run_dir / "config.yaml", [*overrides, *_fixed(None, scratch)])
    return _served(source, state=state, version=version, is_newest=step is None)


def _served(source: Source, *, state: Path | None = None, version: int = 0, is_newest: bool = False) -> Served:
    config = validate(source)
    return Served(name=config.name, config=config, source=source, state=state, version=version, is_newest=is_newest)


def _checkpoint(run_dir: Path, step: int | None) -> tuple[Path, int]:
    """Return the folder and the policy version of a checkpoint, by default the newest one."""
    try:
        state = resumable(run_dir, step).state
    except ConfigError as error:
        raise ConfigError(str(error).replace("--resume:", "POLICY:")) from None
    folder = checkpoint_dir(run_dir / "checkpoints", state.step)
    if state.step == 0 and why_no_folder(folder):
        raise ConfigError(f"POLICY: the run has no checkpoint yet (got {run_dir}). Wait for one.")
    return folder, state.version


def _fixed(model: Path | None, scratch: Path) -> tuple[str, ...]:
    """Return the overrides without which the policy would be another one, or would be trained."""
    path = () if model is None else (f"model.path={json.dumps(str(model))}",)
    longer = "trainer.overlong=truncate"  # nothing is trained, so that conversations may be longer than a row
    return (*path, longer, "warm_start=null", "sft=null", f"output_dir={json.dumps(str(scratch))}")


async def serve(served: Served, keys: Collection[str], arguments: argparse.Namespace, console: Console) -> None:
    """Start the generators, listen, and wait until the task is cancelled, or a process that is not replaced fails."""
    from titanrl.serving.app import App, Limits
    from titanrl.serving.calls import Callers
    from titanrl.serving.http import LOCAL, listen
    from titanrl.session.session import connect  # imports torch

    hosts = None if keys or arguments.unix is not None else {*LOCAL, arguments.host}
    if served.checkpoints is not None:
        await serve_tinker(served, served.checkpoints, keys, arguments.at, hosts, arguments.max_calls, console)
        return
    async with connect(served.config, training=served.state is not None, console=console) as session:
        version: int | None = served.version
        if served.state is not None:
            state = served.state
            if served.is_newest and why_no_folder(state):  # the run continues, and has replaced it
                state, newest = _checkpoint(state.parents[1], None)
                served = replace(served, version=newest)
            await session.training.load_state(state)
            await session.training.publish()
            version = None  # the generators know it
        callers, anyone = Callers(), session.speaker(version=version)
        for key in keys:
            callers.open(session.speaker(version=version), key)
        name = arguments.name or served.name
        app = App(
            callers.find if keys else lambda key: anyone,
            [name],
            Limits(max_calls=arguments.max_calls, max_calls_per_key=arguments.max_calls),
            check=lambda: "" if session.fault is None else f"the policy cannot be sampled: {session.fault}",
            hosts=hosts,
        )
        listener = await listen(app, arguments.at)
        try:
            where = listener.url if arguments.unix is not None else f"{listener.url}/v1"
            print(f"serving {name} (version {served.version}) at {where}", flush=True)
            await session.failed()
        finally:
            await listener.close()


async def serve_tinker(
    served: Served,
    folder: Path,
    keys: Collection[str],
    at: tuple[str, int] | Path,
    hosts: Collection[str] | None,
    max_calls: int,
    console: Console,
) -> None:
    """Start trainer and generators, listen for clients of Tinker, and wait until the task is cancelled."""
    from titanrl.metrics.run_directory import RunLock
    from titanrl.serving.http import listen
    from titanrl.serving.tinker import Tinker, Users
    from titanrl.serving.tinker_sessions import Checkpoints, TinkerLimits
    from titanrl.session.session import connect  # imports torch
    from titanrl.session.tinkering import AdapterHost, SessionHost

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = RunLock(folder)
    except BlockingIOError:
        raise ConfigError(f"--checkpoints: another server uses the folder (got {folder}). Stop it, or give another.") from None
    with contextlib.ExitStack() as undo:
        undo.callback(lock.release)
        checkpoints = Checkpoints(folder)
        async with connect(served.config, console=console) as session:
            if served.state is not None:
                await session.training.load_state(served.state)
            host_of = AdapterHost if served.config.publishes_adapters else SessionHost
            host = host_of(session, served.name, shares_files=not keys)
            await host.start()
            app = Tinker(
                host,
                checkpoints,
                Users(keys or None),
                TinkerLimits(max_samples=2 * max_calls, max_samples_per_user=max_calls),
                check=lambda: "" if session.fault is None else f"the policy cannot be trained: {session.fault}",
                hosts=hosts,
            )
            listener = await listen(app, at)
            try:
                print(f"serving {served.name} for Tinker at {listener.url}", flush=True)
                await session.failed()
            finally:
                await listener.close()
                await app.close()


# The client: `titanrl chat`


class NoReply(TitanRLError):
    """The endpoint refuses a request, or its reply ends early."""

    def __init__(self, reason: str) -> None:
        super().__init__(" ".join(readable(reason).split())[:1000])  # one line


def chat(argv: Sequence[str] | None = None, *, prog: str) -> None:
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
            code = converse(url, key, system, arguments)
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


def converse(url: str, key: str, system: str | None, arguments: argparse.Namespace) -> int:
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
