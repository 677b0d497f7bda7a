"""GRPO in plain PyTorch and transformers, without a framework: the least that a framework must not cost more than.

Run by `benchmarks.peers` in the peers' environment. All completions of a step are generated in one batch. They are trained on
in batches of `device_batch`, sorted by length and padded to the longest; those without an advantage are left out. The loss is
that of the quick start: advantages without division by the standard deviation, and the mean over the tokens of the step. With
one optimizer step per batch the ratio is 1, and nothing clips.
"""

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.job import REWARDS, Job, Record, Setting, read_job, read_rows

Sequences = Sequence[tuple[list[int], list[int]]]
"""Token ids of prompt and completion. A completion includes its end token."""
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


class Loop:
    """Policy, optimizer and data of a run."""

    def __init__(self, job: Job, setting: Setting, record: Record) -> None:
        """Load the model and the rows."""
        self._job, self._setting, self._record = job, setting, record
        self._tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=job.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        rows = list(read_rows(job.train_file))
        random.Random(job.seed).shuffle(rows)
        self._rows = itertools.cycle(rows)

    def step(self, number: int) -> None:
        """Generate, train and record one step."""
        job, started = self._job, time.perf_counter()
        asked = [row for row in itertools.islice(self._rows, job.groups) for _ in range(job.group_size)]
        sequences = self._generate(asked, **SAMPLED)
        rewards = torch.tensor(self._scores(asked, sequences))
        grouped = rewards.view(job.groups, job.group_size)
        advantages = (grouped - grouped.mean(1, keepdim=True)).flatten().tolist()
        generated = time.perf_counter()
        self._train(sequences, advantages)
        ended = time.perf_counter()
        self._record.write(
            step=number, step_s=ended - started, generate_s=generated - started, train_s=ended - generated,
            tokens=sum(len(completion) for _, completion in sequences), reward=rewards.mean().item(),
        )  # fmt: skip

    def evaluate(self) -> None:
        """Record the mean score of greedy completions of the held-out prompts."""
        rows = read_rows(self._job.heldout_file)
        scores = self._scores(rows, self._generate(rows, do_sample=False))
        self._record.write(score=sum(scores) / len(scores))

    def _generate(self, rows: Sequence[Mapping[str, Any]], **options: Any) -> Sequences:
        prompts = [row["prompt"] for row in rows]
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            made = self._model.generate(**inputs, max_new_tokens=self._job.max_new_tokens, **options)
        end, sequences = self._tokenizer.eos_token_id, []
        for mask, ids in zip(inputs["attention_mask"].tolist(), made.tolist(), strict=True):
            completion = ids[len(mask) :]
            length = completion.index(end) + 1 if end in completion else len(completion)
            sequences.append((ids[len(mask) - sum(mask) : len(mask)], completion[:length]))
        return sequences

    def _scores(self, rows: Sequence[Mapping[str, Any]], sequences: Sequences) -> list[float]:
        texts = self._tokenizer.batch_decode([completion for _, completion in sequences], skip_special_tokens=True)
        return [REWARDS[self._job.reward](text, row) for text, row in zip(texts, rows, strict=True)]

    def _train(self, sequences: Sequences, advantages: Sequence[float]) -> None:
        num_tokens = sum(len(completion) for _, completion in sequences)
        for indices in batches(sequences, advantages, self._setting.device_batch):
            width = max(len(prompt) + len(completion) for prompt, completion in (sequences[i] for i in indices))
            ids_BL = torch.full((len(indices), width), self._tokenizer.pad_token_id)
            weights_BL, mask_BL = torch.zeros(len(indices), width), torch.zeros(len(indices), width, dtype=torch.long)
            for row, i in enumerate(indices):
                prompt, completion = sequences[i]
                end = len(prompt) + len(completion)
                ids_BL[row, :end] = torch.tensor(prompt + completion)
                mask_BL[row, :end] = 1
                weights_BL[row, len(prompt) : end] = advantages[i] / num_tokens
            logits_BLV = self._model(input_ids=ids_BL, attention_mask=mask_BL).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(logits_BLV.flatten(0, 1), ids_BL[:, 1:].flatten(), reduction="none")
            ratio = (logprobs - logprobs.detach()).exp()
            (-(weights_BL[:, 1:].flatten() * ratio).sum()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()


def batches(sequences: Sequences, advantages: Sequence[float], size: int) -> Iterator[Sequence[int]]:
    """Yield the indices of the sequences with an advantage, sorted by length, `size` at a time."""
    order = sorted((i for i, value in enumerate(advantages) if value != 0), key=lambda i: sum(map(len, sequences[i])))
    return (order[start : start + size] for start in range(0, len(order), size))


def main() -> None:
    """Train and write the record."""
    job, setting, record = read_job()
    torch.set_num_threads(setting.threads)
    torch.manual_seed(job.seed)
    loop = Loop(job, setting, record)
    for number in range(job.num_steps):
        if job.evaluate_every and number % job.evaluate_every == 0:
            loop.evaluate()
        loop.step(number)
    if job.evaluate_every:
        loop.evaluate()


if __name__ == "__main__":
    main()
