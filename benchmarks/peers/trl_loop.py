"""GRPO with TRL's `GRPOTrainer` and Hugging Face generation, as its documentation shows it, in single precision.

Run by `benchmarks.peers` in the peers' environment. The settings that are not TRL's defaults are those of the job, and those
that make it faster on a CPU: no bfloat16, no gradient checkpointing, no progress bar, no tracker, no checkpoint.
"""

import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.job import REWARDS, Job, Record, Setting, read_job, read_rows

PAGE_TOKENS = 32
"""Tokens per page of the KV cache of continuous batching. Prompts are shorter."""


class Recorded(TrainerCallback):
    """Callback that records every step, and evaluates the policy on schedule."""

    def __init__(self, job: Job, record: Record, tokenizer: Any) -> None:
        """Prepare the record."""
        self._job, self._record, self._tokenizer = job, record, tokenizer
        self._started = time.perf_counter()
        self.generate_s, self.num_tokens, self.rewards = 0.0, 0, [0.0]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate if the schedule says so, outside the time of the step."""
        if self._job.evaluate_every and state.global_step % self._job.evaluate_every == 0:
            self._evaluate(kwargs["model"])
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the step."""
        step_s = time.perf_counter() - self._started
        self._record.write(
            step=state.global_step - 1, step_s=step_s, generate_s=self.generate_s, train_s=step_s - self.generate_s,
            tokens=self.num_tokens, reward=sum(self.rewards) / len(self.rewards),
        )  # fmt: skip

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluate the trained policy."""
        if self._job.evaluate_every:
            self._evaluate(kwargs["model"])

    def _evaluate(self, model: Any) -> None:
        rows = read_rows(self._job.heldout_file)
        prompts = [row["prompt"] for row in rows]
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        model.eval()
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=self._job.max_new_tokens, do_sample=False)
        model.train()
        texts = self._tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        scores = [REWARDS[self._job.reward](text, row) for text, row in zip(texts, rows, strict=True)]
        self._record.write(score=sum(scores) / len(scores))


def main() -> None:
    """Train and write the record."""
    job, setting, record = read_job()
    torch.set_num_threads(setting.threads)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    recorded = Recorded(job, record, tokenizer)

    def reward(prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
        recorded.num_tokens = sum(map(len, kwargs["completion_ids"]))
        rows = ({"answer": reference} for reference in answer)
        recorded.rewards = [REWARDS[job.reward](text, row) for text, row in zip(completions, rows, strict=True)]
        return recorded.rewards

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32), reward_funcs=reward,
            args=config(job, setting, folder), processing_class=tokenizer, callbacks=[recorded],
            train_dataset=Dataset.from_list([dict(row) for row in read_rows(job.train_file)]),
        )  # fmt: skip
        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            started = time.perf_counter()
            made = generate(inputs)
            recorded.generate_s = time.perf_counter() - started
            return made

        trainer._generate_and_score_completions = timed
        trainer.train()


def config(job: Job, setting: Setting, folder: str) -> Any:
    """Return TRL's configuration: one optimizer step per batch of completions, as in the other systems."""
    return GRPOConfig(
        output_dir=folder, max_steps=job.num_steps, seed=job.seed, learning_rate=job.learning_rate,
        lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        per_device_train_batch_size=setting.device_batch, gradient_accumulation_steps=job.batch // setting.device_batch,
        num_generations=job.group_size, max_completion_length=job.max_new_tokens, temperature=1.0,
        use_transformers_continuous_batching=setting.continuous_batching,
        transformers_continuous_batching_config={  # without it, half of the machine's memory becomes KV cache
            "page_size": PAGE_TOKENS, "num_blocks": job.batch * (2 + job.max_new_tokens // PAGE_TOKENS),
            "max_batch_tokens": PAGE_TOKENS * job.batch, "max_requests_per_batch": job.batch,
        },
        beta=0.0, loss_type="dapo", scale_rewards="none", bf16=False, gradient_checkpointing=False, use_cpu=True,
        report_to="none", save_strategy="no", logging_steps=job.num_steps, disable_tqdm=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
