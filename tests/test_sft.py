"""Fine-tuning with a real trainer: the same loss curve as a plain PyTorch loop, after a resume, sharded, with adapters."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.documented import undocumented
from titanrl.config import Config, ConfigError, load_config
from titanrl.config.sections import FOLDER
from titanrl.data.streams import is_heldout
from titanrl.data.tokenizer import load_tokenizer
from titanrl.grpo import GRPO
from titanrl.metrics.reading import read_metrics
from titanrl.run import command
from titanrl.session.session import prepare_starting_model
from titanrl.sft import SFT

NUM_STEPS, BATCH_SIZE, RESUME_STEP = 24, 16, 12
IGNORED = -100
CONFIG = f"""
name: tuned
device: cpu
num_steps: {NUM_STEPS}
sft:
  path: examples.jsonl
  heldout_fraction: 0.2
  batch_size: {BATCH_SIZE}
  learning_rate: 3e-3
  num_warmup_steps: 4
  weight_decay: 0.1
trainer: {{row_tokens: 128, rows_per_microbatch: 3}}
evaluation: {{every_steps: 10}}
checkpoint: {{every_steps: {RESUME_STEP}}}
logging: {{console: "off"}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, shared_templates: None) -> Path:
    """A folder with a configuration and 200 of the shipped examples."""
    folder = tmp_path_factory.mktemp("sft")
    lines = (FOLDER / "chain_sum.jsonl").read_text().splitlines()[:200]
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "tuned.yaml").write_text(CONFIG)
    return folder


def config_in(folder: Path, *overrides: str) -> Config:
    places = (f"output_dir={folder}/runs", f"cache_dir={folder}/cache", f"sft.path={folder}/examples.jsonl")
    return load_config(folder / "tuned.yaml", [*places, *overrides])


def fine_tune(config: Config, resume: Path | None = None) -> Path:
    """Execute a complete run, and return its directory."""

    async def whole_run() -> Path:
        run = SFT(config, resume=resume)
        try:
            await run.start_and_train()
        finally:
            await run.close()
        return run.run_dir

    return asyncio.run(asyncio.wait_for(whole_run(), 120))


def curve(run_dir: Path, name: str = "loss/train") -> dict[int, float]:
    """Return the values of a metric by step."""
    return {row["step"]: row[name] for row in read_metrics(run_dir / "metrics.jsonl") if name in row}


@pytest.fixture(scope="module")
def tuned(folder: Path) -> Path:
    """Directory of an uninterrupted run on one rank."""
    return fine_tune(config_in(folder))


class Plain:
    """A model in transformers, and the examples as padded batches."""

    def __init__(self, model_dir: Path, examples: Path) -> None:
        self.tokenizer = load_tokenizer(model_dir)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        lines = [json.loads(line) for line in examples.read_text().splitlines()]
        self.training = [line for line in lines if not is_heldout(line["prompt"], 0.2)]
        self.heldout = [line for line in lines if is_heldout(line["prompt"], 0.2)]

    def loss(self, lines: list[dict[str, str]]) -> torch.Tensor:
        encode = self.tokenizer.encode
        pairs = [(encode(line["prompt"]), [*encode(line["completion"]), 1]) for line in lines]
        longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids, labels = torch.zeros(len(pairs), longest, dtype=torch.long), torch.full((len(pairs), longest), IGNORED)
        for row, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            ids[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        logits = self.model(input_ids=ids, attention_mask=(torch.cumsum(labels.flip(1) != IGNORED, 1) > 0).flip(1)).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)

    def train(self, num_steps: int = NUM_STEPS, *, muon: bool = False) -> list[float]:
        """Return the losses of a plain loop over the same batches; with `muon`, the matrices of the layers have Muon."""
        number = len(self.training)
        order = [np.random.default_rng((0, epoch)).permutation(number) for epoch in range(9)]
        hidden = {name for name, value in self.model.named_parameters() if muon and "layers." in name and value.ndim == 2}
        rest = [value for name, value in self.model.named_parameters() if name not in hidden]
        optimizers = [torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)]
        if muon:
            matrices = [value for name, value in self.model.named_parameters() if name in hidden]
            optimizers.append(torch.optim.Muon(matrices, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"))
        losses = []
        for step in range(num_steps):
            places = [divmod(index, number) for index in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]
            loss = self.loss([self.training[order[epoch][place]] for epoch, place in places])
            self.model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 3e-3 * ((step + 1) / 4 if step < 4 else (num_steps - step) / (num_steps - 4))
                optimizer.step()
            losses.append(loss.item())
        return losses


def test_loss_curve_equals_plain_pytorch_loop(folder: Path, tuned: Path) -> None:
    plain = Plain(prepare_starting_model(config_in(folder)).initial, folder / "examples.jsonl")
    with torch.no_grad():
        before = plain.loss(plain.heldout).item()
    losses = plain.train()
    with torch.no_grad():
        after = plain.loss(plain.heldout).item()
    assert losses[-1] < 0.3 * losses[0]
    assert list(curve(tuned)) == list(range(1, NUM_STEPS + 1))
    np.testing.assert_allclose(list(curve(tuned).values()), losses, atol=1e-5)
    heldout = curve(tuned, "loss/eval")
    assert list(heldout) == [0, 10, 20, NUM_STEPS]
    np.testing.assert_allclose([heldout[0], heldout[NUM_STEPS]], [before, after], atol=1e-5)


def test_muon_gives_the_curve_of_a_plain_loop_and_refuses_adamw_at_resume(folder: Path) -> None:
    muon = ("algorithm.optimizer=muon", "algorithm.muon_momentum=0.9")  # slow on a CPU
    config = config_in(folder, "name=muon", "model.recipe.num_layers=1", "num_steps=8", *muon)
    run_dir = fine_tune(config)
    plain = Plain(prepare_starting_model(config).initial, folder / "examples.jsonl")
    losses = plain.train(8, muon=True)
    np.testing.assert_allclose(list(curve(run_dir).values()), losses, rtol=1e-3)
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(ConfigError, match='step 8 was saved with "muon"'):
        SFT(load_config(run_dir / "config.yaml", ["algorithm.optimizer=adamw", "algorithm.muon_momentum=0.95"]), resume=run_dir)


def test_steps_beyond_the_schedule_are_announced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def train() -> None:
        run = SFT(config_in(folder, "name=beyond", "num_steps=5"))
        await run.start()
        try:
            for wrong in ("3", 1.5):
                with pytest.raises(TypeError, match="num_steps: must be an integer >= 0"):
                    await run.train(wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="name: no such evaluation set"):
                await run.evaluate("nope")
            await run.train(5)
            assert "learning rate is 0" not in capsys.readouterr().err
            await run.train(6)
        finally:
            await run.close()

    asyncio.run(asyncio.wait_for(train(), 120))
    warning = "the learning rate is 0 from step 6 on, because lr_decay is linear and num_steps was 5: load the configuration"
    assert warning in " ".join(capsys.readouterr().err.split())


def test_every_fine_tuning_metric_is_documented(tuned: Path) -> None:
    rows = read_metrics(tuned / "metrics.jsonl")
    assert {"loss/train", "loss/eval", "perf/train_tokens_per_s", "optim/lr", "grad/norm"} <= {
        name for row in rows for name in row
    }
    assert undocumented(rows) == set()


def test_killed_run_resumes_bit_for_bit(folder: Path, tuned: Path) -> None:
    killed = folder / "runs/killed"  # has written metrics after its newest checkpoint
    shutil.copytree(tuned, killed)
    shutil.rmtree(killed / f"checkpoints/step-{NUM_STEPS}")
    resumed = fine_tune(load_config(killed / "config.yaml"), resume=killed)
    assert resumed == killed
    for name in ("loss/train", "loss/eval", "grad/norm", "optim/lr", "data/epoch", "tokens/trained"):
        assert curve(killed, name) == curve(tuned, name)


def test_two_ranks_train_like_one(folder: Path, tuned: Path) -> None:
    sharded = fine_tune(config_in(folder, "name=sharded", "trainer.parallelism.dp_shard=2"))
    for name in ("loss/train", "loss/eval"):
        np.testing.assert_allclose(list(curve(sharded, name).values()), list(curve(tuned, name).values()), atol=1e-5)
    assert curve(sharded, "tokens/trained") == curve(tuned, "tokens/trained")


def test_adapters_learn_and_are_exported_merged(folder: Path) -> None:
    config = config_in(folder, "name=lora", "num_steps=8", "trainer.lora.rank=8", "trainer.lora.alpha=16")
    run_dir = fine_tune(config)
    losses, heldout = list(curve(run_dir).values()), curve(run_dir, "loss/eval")
    assert losses[-1] < 0.8 * losses[0]
    plain = Plain(run_dir / "checkpoints/final", folder / "examples.jsonl")
    with torch.no_grad():
        assert plain.loss(plain.heldout).item() == pytest.approx(heldout[8], abs=1e-5)
    start = transformers.AutoModelForCausalLM.from_pretrained(prepare_starting_model(config).initial)
    embeddings = [model.get_input_embeddings().weight for model in (start, plain.model)]
    assert torch.equal(*embeddings)


# The command


def refusal(kind: type[SFT] | type[GRPO], capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must exit with 2, and return its output."""
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(kind, arguments, prog=f"titanrl {kind.program}")
    return capsys.readouterr().err


@pytest.mark.parametrize("option", [[], ["--dry-run"]])
def test_invalid_line_exits_with_2_before_start(
    folder: Path, option: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would be shortened in the message
    bad = Path("bad.jsonl")
    bad.write_text('{"prompt": "1 + 2 =", "completion": "3"}\n{"prompt": "1 + 2 ="}\n')
    override, output = f"sft.path={bad}", tmp_path / "runs"
    text = refusal(SFT, capsys, "--config", str(folder / "tuned.yaml"), *option, override, f"output_dir={output}")
    assert text == (
        f'override {override}: sft.path="{bad}"\n'
        f"  rule: {bad}:2: completion is missing\n"
        "  fix:  add it; every row must have prompt and completion, or messages (sft.columns names other columns)\n"
    )
    assert not output.exists()


def test_each_command_rejects_configurations_of_the_other(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(GRPO, capsys, "--config", str(folder / "tuned.yaml"))
    assert "only `titanrl sft` uses this section" in text
    assert "fix:  run `titanrl sft`, or remove the section" in text
    assert "`titanrl sft` requires this section" in refusal(SFT, capsys, "--config", "quickstart")


def test_dry_run_summarizes_the_examples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main(SFT, ["--config", str(folder / "tuned.yaml"), "--dry-run", f"sft.path={folder}/examples.jsonl"])
    shown = capsys.readouterr().out
    assert "examples            161 to train on, 39 held out" in shown
    assert "epochs              2.39 (10.1 steps per epoch)" in shown  # 24 steps of 16 examples
    assert "generator" not in shown.partition("# Hosts")[2]
