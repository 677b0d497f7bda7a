"""The command `titanrl serve` with the real stack: a finished run, a checkpoint, streams, and the documented requests."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.docs.blocks import ROOT, blocks_of, shell_lines
from tests.e2e.conftest import Finished, Start, serving

QUESTION = "State the final answer to the following arithmetic problem: 7 + 5 - 3 ="
PAGES = [ROOT / "docs/howto/serve.md", ROOT / "README.md"]


@pytest.fixture(scope="module")
def url(plain_run: Finished) -> Iterator[str]:
    with serving(plain_run.run_dir) as server:
        yield server.url


def client(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


def test_plain_and_streamed_replies_have_the_same_tokens(url: str) -> None:
    asked = {"token_ids": client_ids(url), "sampling_params": {"seed": 3, "max_tokens": 20}}
    plain = httpx.post(f"{url}/inference/v1/generate", json=asked).json()["choices"][0]
    chat = client(url).chat.completions
    messages = [{"role": "user", "content": QUESTION}]
    reply = chat.create(
        model="plain",
        messages=messages,
        seed=3,
        max_tokens=20,
        logprobs=True,
        extra_body={"return_token_ids": True},  # type: ignore[arg-type]
    ).choices[0]
    assert reply.model_extra["token_ids"] == plain["token_ids"]
    assert {span["version"] for span in reply.model_extra["weight_versions"]} == {"4"}  # the run has four steps
    assert [entry.logprob for entry in reply.logprobs.content] == [entry["logprob"] for entry in plain["logprobs"]["content"]]
    stream = chat.create(model="plain", messages=messages, seed=3, max_tokens=20, stream=True)  # type: ignore[arg-type]
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]  # type: ignore[union-attr]
    assert "".join(parts) == reply.message.content


def client_ids(url: str) -> list[int]:
    """Return the tokens of the question."""
    created = client(url).chat.completions.create(
        model="plain",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=1,
        extra_body={"return_token_ids": True},
    )
    found: list[int] = created.model_extra["prompt_token_ids"]
    return found


@pytest.mark.parametrize("content", ["é", "1" * 5000], ids=["no token", "too long"])
def test_prompt_that_cannot_be_encoded_is_refused(url: str, content: str) -> None:
    with pytest.raises(openai.BadRequestError, match="messages: "):
        client(url).chat.completions.create(model="plain", messages=[{"role": "user", "content": content}])


def test_many_calls_at_once_are_answered(url: str) -> None:
    replies = client(url).completions.create(model="plain", prompt=[QUESTION] * 16, n=4, seed=1)
    assert len(replies.choices) == 64
    assert len({choice.text for choice in replies.choices[:4]}) > 1  # other seeds


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_requests_are_answered(url: str, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line for block in blocks_of(page) if block.language == "sh" for line in shell_lines(block)]
    (curl,) = (line for line in commands if line.startswith("curl"))
    result = subprocess.run(
        shlex.split(curl.replace("http://127.0.0.1:8000", url)), capture_output=True, text=True, check=True, timeout=60
    )
    assert '"text":' in result.stdout
    (block,) = (block for block in blocks_of(page) if "OpenAI(" in block.text)
    code = block.text.replace("http://127.0.0.1:8000", url).replace('model="quickstart"', 'model="plain"')
    exec(compile(code, str(block), "exec"), {})
    assert capsys.readouterr().out


def test_documented_chat_is_a_client_of_the_endpoint(url: str) -> None:
    commands = [line for block in blocks_of(PAGES[0]) if block.language == "sh" for line in shell_lines(block)]
    (line,) = (line for line in commands if line.startswith("titanrl chat http"))
    command = line.replace("http://127.0.0.1:8000", url).replace("titanrl", f"{sys.executable} -m titanrl.commands")
    result = subprocess.run(
        shlex.split(command), input=f"{QUESTION}\n{'1' * 5000}\n", capture_output=True, text=True, check=True, timeout=60
    )
    reply = client(url).chat.completions.create(model="plain", messages=[{"role": "user", "content": QUESTION}], temperature=0)
    assert result.stdout == f"{reply.choices[0].message.content}\n"
    assert result.stderr.startswith("error: messages: ")


def test_running_run_is_served_at_its_newest_checkpoint(start_run: Start) -> None:
    # The checkpoint that is found is replaced before the processes that load one have started.
    run = start_run("served", "num_steps=100000", "checkpoint.every_steps=10")
    run.wait_for_step(11)  # a checkpoint is written after the metrics of its step
    with serving(run.run_dir) as server:
        reply = client(server.url).completions.create(model="served", prompt=QUESTION)
        version = int(reply.system_fingerprint.removeprefix("version-"))
        assert version >= 10
        assert version % 10 == 0
        run.wait_for_step(version + 1)  # it continues
    run.process.send_signal(signal.SIGINT)
    assert run.finish().code == 128 + signal.SIGINT
    assert run.leftovers() == []


def test_checkpoint_of_a_step_needs_its_key(plain_run: Finished, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# mine\n0123456789abcdef0123\n")
    keys.chmod(0o600)
    with serving(plain_run.run_dir, "--step", "2", "--keys", str(keys), "--name", "policy") as server:
        with pytest.raises(openai.AuthenticationError):
            client(server.url).models.list()
        reply = client(server.url, "0123456789abcdef0123").completions.create(model="policy", prompt=QUESTION)
        assert reply.system_fingerprint == "version-2"
    assert os.listdir(tmp_path) == ["keys"]
