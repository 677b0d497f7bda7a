"""Hosts of a Tinker endpoint over a session without processes."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titanrl.base.files import DamagedError
from titanrl.config.sections import LoraConfig
from titanrl.serving.calls import Refused
from titanrl.serving.tinker_sessions import ModelSpec
from titanrl.session.sampling import AdapterLimitError
from titanrl.session.tinkering import AdapterHost, AdapterSampler, SessionHost

SPEC = ModelSpec(rank=4)


@dataclass
class Lab:
    """A session whose generators hold a limited number of adapters."""

    folder: Path
    max_held: int = 2
    calls: list[str] = field(default_factory=list)
    num_models: int = 0
    num_held: int = 0
    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    """New models and released adapters wait for it."""

    def session(self) -> Any:
        config = SimpleNamespace(trainer=SimpleNamespace(lora=LoraConfig(rank=4)), max_sequence_tokens=64)
        model = SimpleNamespace(path=self.folder, shape=SimpleNamespace(vocab_size=100))
        return SimpleNamespace(config=config, model=model, new_model=self.new_model, training=Training(self))

    async def new_model(self, name: str, **options: Any) -> "Training":
        self.num_models += 1
        await self.is_open.wait()
        return Training(self)


@dataclass
class Training:
    lab: Lab

    async def save_state(self, name: str) -> Path:
        self.lab.calls.append("save")
        state = self.lab.folder / name
        state.mkdir()
        return state

    async def load_state(self, folder: Path) -> None:
        self.lab.calls.append(f"load {folder.name}")
        if folder.name == "damaged":
            raise DamagedError("load_state: it is damaged")

    async def publish(self) -> "Held":
        if self.lab.num_held == self.lab.max_held:
            raise AdapterLimitError("full")
        self.lab.num_held += 1
        return Held(self.lab)

    async def zero_grad(self) -> None:
        pass

    async def free(self) -> None:
        self.lab.num_models -= 1


@dataclass
class Held:
    lab: Lab

    async def generate(self, requests: Any, *, is_shared: bool) -> list[Any]:
        return []

    async def release(self) -> None:
        await self.lab.is_open.wait()
        self.lab.num_held -= 1


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_cancelled_request_leaves_no_model_behind(tmp_path: Path) -> None:
    async def cancel() -> None:
        lab = Lab(tmp_path)
        host = AdapterHost(lab.session(), "base", shares_files=False)
        sampler = AdapterSampler(host, SPEC, tmp_path)
        request = asyncio.create_task(sampler.generate([]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait({request})
        assert lab.num_models == 1  # while it is loading
        lab.is_open.set()
        await sampler.generate([])
        assert (lab.num_models, lab.num_held, len(lab.calls)) == (0, 1, 1)

    run(cancel())


def test_named_save_writes_the_state_once(tmp_path: Path) -> None:
    async def save() -> None:
        lab = Lab(tmp_path)
        lab.is_open.set()
        host = AdapterHost(lab.session(), "base", shares_files=False)
        model = await host.create(SPEC, None, with_optimizer=False)
        state = await model.save()
        named = await model.publish(state)
        assert lab.calls == ["save"]
        await named.release()
        assert state.exists()
        unnamed = await model.publish()
        assert lab.calls == ["save", "save"]
        await unnamed.release()
        lab.max_held = 0
        with pytest.raises(AdapterLimitError):
            await model.publish()
        assert list(tmp_path.iterdir()) == [state]  # the others are deleted with their samplers

    run(save())


def test_publications_wait_for_a_place_that_is_being_freed(tmp_path: Path) -> None:
    async def publish() -> None:
        lab = Lab(tmp_path, max_held=1)
        lab.is_open.set()
        host = AdapterHost(lab.session(), "base", shares_files=False)
        models = [await host.create(SPEC, None, with_optimizer=False) for _ in range(3)]
        await models[0].publish()
        lab.is_open.clear()
        publications = [asyncio.create_task(model.publish()) for model in models[1:]]  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        lab.is_open.set()
        await asyncio.gather(*publications)
        assert lab.num_held == 1

    run(publish())


def test_sampler_of_a_deleted_checkpoint_says_so(tmp_path: Path) -> None:
    async def sample() -> None:
        host = AdapterHost(Lab(tmp_path).session(), "base", shares_files=False)
        with pytest.raises(Refused, match="its checkpoint has been deleted"):
            await AdapterSampler(host, SPEC, tmp_path / "deleted").generate([])

    run(sample())


def test_client_after_a_failed_load_starts_from_the_base(tmp_path: Path) -> None:
    async def create() -> None:
        lab = Lab(tmp_path)
        host = SessionHost(lab.session(), "base", shares_files=False)
        await host.start()
        with pytest.raises(DamagedError):
            await host.create(SPEC, tmp_path / "damaged", with_optimizer=False)
        await host.create(SPEC, None, with_optimizer=False)
        assert lab.calls == ["save", "load damaged", "load base"]

    run(create())
