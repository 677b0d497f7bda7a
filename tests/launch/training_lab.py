"""A trainer of two ranks for tests of the training client."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import fork, prepare_templates
from tests.workers import Looped
from titanrl.config import load_config
from titanrl.config.device import DEVICES
from titanrl.config.sections import RecipeConfig
from titanrl.launch.assembly import Fleet
from titanrl.launch.roles import Roles
from titanrl.launch.supervision import Supervisor
from titanrl.launch.trainer_mesh import TrainerMesh
from titanrl.models.recipe import create_model
from titanrl.processes.variables import trainer_environment, worker_environment
from titanrl.session.training import TrainingClient
from titanrl.trainer.rank import PolicyTrainer, TrainerSetup
from titanrl.weights.store import IMPORTS, WeightStore, spawn_store


@dataclass
class Lab(Looped):
    """A trainer of two ranks whose weights are reset for every test."""

    trainer: TrainerMesh
    client: TrainingClient
    start: Path
    store: WeightStore

    def ask(self, request: Callable[[], asyncio.Task[Any]]) -> Any:
        async def asked() -> Any:
            return await request()

        return self.do(asked())


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """Start a trainer of two ranks in a folder."""
    model = folder / "model"
    create_model(model, RecipeConfig(hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=2, intermediate_size=96), seed=3)
    values = ["name=lab", "trainer.parallelism.dp_shard=2", "trainer.rows_per_microbatch=2", "algorithm.ema_decay=0.5"]
    config = load_config("configs/quickstart.yaml", values)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"row_tokens": 32})})
    with asyncio.Runner() as runner:

        async def start() -> tuple[Lab, Fleet]:
            supervisor = Supervisor()
            (folder / "logs").mkdir()
            fleet = Fleet(folder / "logs", supervisor)
            device = DEVICES["cpu"]
            environment = trainer_environment(config, device)
            prepare_templates(fleet, config, Roles(generators=False))
            modules = ("titanrl.trainer.rank", "tests.launch.losses")
            procs = await fork(fleet, "trainer", environment, *modules, num_procs=2)
            await fleet.join_process_group(procs, one_machine=True)
            store = await spawn_store(await fork(fleet, "store", worker_environment(), *IMPORTS))
            setup = TrainerSetup(config=config, device=device, run_dir=folder, store=store, transports=("arena",))
            trainer = TrainerMesh(procs.spawn("trainer", PolicyTrainer, setup), supervisor, config.timeouts)
            await trainer.start()
            await trainer.load_model(model)
            client = TrainingClient(trainer, folder)
            return Lab(runner, trainer, client, await client.save_state("start"), store), fleet

        lab, fleet = runner.run(start())
        try:
            yield lab
        finally:
            runner.run(lab.trainer.close())
            runner.run(fleet.stop(60.0))
