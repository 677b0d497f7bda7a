"""Dumps of rollouts: `rollout.save` writes them, `rollout.replay` trains on them. docs/howto/dump.md describes the columns.

A dump is a folder. Rollout workers write `rollouts/*.parquet`, one file per delivery of finished groups, before they announce
the groups to the buffer. The controller writes `dump.json`, and `batches.jsonl`, one line per step with the groups trained on.
"""

import hashlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titanrl.base.errors import TitanRLError
from titanrl.base.files import naming, replace_lines, replace_text, sync_file, sync_folder
from titanrl.carriers.supports import ExpertIds, Supports, join, joined_experts
from titanrl.carriers.types import Completion, Group, Prompt, Rollout, ScorerFailure, Segment, Turn
from titanrl.config.errors import BrokenRule, rule_of
from titanrl.config.sections import RolloutConfig

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1
"""Version of the layout of a dump."""
META, BATCHES, ROLLOUTS = "dump.json", "batches.jsonl", "rollouts"
"""Files of a dump, and the folder of its rollouts."""


class DumpError(TitanRLError):
    """A dump cannot be written or read; the text names its folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpInfo:
    """Metadata of a dump, with which a replay checks compatibility."""

    run: str
    """Name of the run that wrote the dump."""
    groups_per_step: int
    """Groups per batch."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    vocabulary: int
    """Number of tokens in the tokenizer's vocabulary."""
    format: int = FORMAT
    """Version of the layout."""


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Return the SHA-256 digest of a vocabulary, which maps tokens to ids."""
    ordered = json.dumps(sorted(vocabulary.items(), key=lambda item: item[1]))
    return hashlib.sha256(ordered.encode()).hexdigest()


class DumpWriter:
    """Writer of one worker's rollouts."""

    def __init__(self, folder: Path, worker: int) -> None:
        """Create the folder of the dump if it does not exist."""
        import pyarrow.parquet  # noqa: F401  # slow import, which must not delay the first delivery

        self._folder, self._worker = folder / ROLLOUTS, worker
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, groups: Sequence[tuple[Group, str]]) -> Path:
        """Write groups, each with its status, to a new file, and return its path.

        The write is atomic and durable: the file is complete and on disk, or does not exist.
        """
        from pyarrow import parquet

        sampled_at = time.time_ns() // 1000
        rows = [row for group, status in groups for row in rows_of(group, status, sampled_at, self._worker)]
        path = self._folder / f"{groups[0][0].prompt.index:09d}-{sampled_at}-{self._worker}.parquet"
        partial = path.with_suffix(".partial")
        with naming(path):
            parquet.write_table(table_of(rows), partial, compression="zstd")
            sync_file(partial)
            partial.replace(path)
        sync_folder(self._folder)
        return path


class DumpBatches:
    """The controller's files of a dump: its metadata, and the batches in training order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, info: DumpInfo, *, step: int, next_index: int, in_flight: Collection[int]) -> None:
        """Prepare the folder for a run at a given step, before the workers write to it.

        To prevent duplicates, this removes batches of later steps, and rollouts that will be sampled again.

        Args:
            info: Metadata of the dump.
            step: Steps taken so far.
            next_index: First prompt that will be sampled.
            in_flight: Earlier prompts that will also be sampled again.
        """
        folder = self._folder / ROLLOUTS
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink()
        batches = [] if step == 0 else [line for line in _batches(self._folder) if line["step"] <= step]
        replace_lines(self._folder / BATCHES, (json.dumps(line) + "\n" for line in batches))
        self.drop(lambda index: index >= next_index or index in in_flight)
        text = json.dumps({name: getattr(info, name) for name in DumpInfo.__slots__}, indent=1)
        replace_text(self._folder / META, text + "\n", durable=True)

    def drop(self, drops: Callable[[int], bool]) -> None:
        """Remove the rollouts of all prompts for whose index `drops` returns True."""
        from pyarrow import parquet

        for path in sorted((self._folder / ROLLOUTS).glob("*.parquet")):
            indices = parquet.read_table(path, columns=["index"])["index"].to_pylist()
            kept = [not drops(index) for index in indices]
            if not any(kept):
                path.unlink()
            elif not all(kept):
                partial = path.with_suffix(".partial")
                parquet.write_table(parquet.read_table(path).filter(kept), partial, compression="zstd")
                partial.replace(path)

    def add(self, step: int, version: int, groups: Sequence[int], replayed: Sequence[int]) -> None:
        """Append the batch of a step: the prompt indices of its groups, in batch order, and of those that were replayed.

        `step` counts from 1; `version` is the one before the step.
        """
        line = {"step": step, "version": version, "groups": list(groups), "replayed": list(replayed)}
        path = self._folder / BATCHES
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Wait until the batches are on disk."""
        sync_file(self._folder / BATCHES)


class DumpReader:
    """Reader of a dump, which returns groups by their position in training order."""

    def __init__(self, folder: Path) -> None:
        """Read the metadata and the list of batches; raise `DumpError` if the folder is not a dump."""
        self.folder = folder
        self.info = read_info(folder)
        self.batches: list[list[int]] = [line["groups"] for line in _batches(folder)]
        """Prompt indices of the groups of each batch."""
        self._order = [index for batch in self.batches for index in batch]

    @property
    def num_steps(self) -> int:
        """Number of batches."""
        return len(self.batches)

    @property
    def num_groups(self) -> int:
        """Number of groups in all batches."""
        return len(self._order)

    @property
    def missing(self) -> list[int]:
        """Prompt indices of the groups that are listed but have no rollouts. Reads all files."""
        return [index for index in self._order if index not in self._files]

    def group(self, position: int) -> Group:
        """Return the group at a position in training order, from 0, which is also the index of its prompt."""
        index = self._order[position]
        if index not in self._files:
            raise DumpError(f"rollout.replay: {self.folder} lists group {index}, but has no rollouts of it. Copy all files.")
        rows = [row for row in _read(self._files[index]) if row["index"] == index]
        return group_of(rows, position)

    @cached_property
    def _files(self) -> dict[int, Path]:
        """File of each group by prompt index; the newest one if a group was sampled again after a fault."""
        newest: dict[int, tuple[int, Path]] = {}
        for path in sorted((self.folder / ROLLOUTS).glob("[0-9]*-[0-9]*.parquet")):
            sampled_at = int(path.stem.split("-")[1])
            for index in set(_table(path, ["index"])["index"].to_pylist()):
                newest[index] = max(newest.get(index, (0, path)), (sampled_at, path))
        return {index: path for index, (_, path) in newest.items()}


def read_info(folder: Path) -> DumpInfo:
    """Read the metadata of a dump; raise `DumpError` if the folder is not a dump, or its format is of another version."""
    try:
        metadata = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DumpError(f"rollout.replay: no {META} (got {folder}). Give a folder that rollout.save has written.") from None
    except (OSError, ValueError) as error:
        raise DumpError(f"rollout.replay: {META} cannot be read: {error} (got {folder}). Restore the file.") from error
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        found = metadata.get("format") if isinstance(metadata, dict) else None
        raise DumpError(f"rollout.replay: the dump must have format {FORMAT}, not {found} (got {folder}). Save it again.")
    if missing := [name for name in DumpInfo.__slots__ if name not in metadata]:
        raise DumpError(f"rollout.replay: {META} lacks {', '.join(missing)} (got {folder}). Restore the file.")
    return DumpInfo(**{name: metadata[name] for name in DumpInfo.__slots__})


def broken_rules(rollout: RolloutConfig) -> Iterator[BrokenRule]:
    """Yield the rules that `rollout.save` and `rollout.replay` break on this machine."""
    given = {"rollout.save": rollout.save, "rollout.replay": rollout.replay}
    values = {key: str(path) for key, path in given.items() if path is not None}
    if values and importlib.util.find_spec("pyarrow") is None:
        yield BrokenRule(values, "the package pyarrow must be installed", "pip install pyarrow")
    if rollout.replay is None:
        return
    try:
        reader = DumpReader(rollout.replay)
    except DumpError as error:
        yield rule_of(str(error), values)
        return
    if reader.info.groups_per_step != rollout.groups_per_step:
        rule = f"a replay uses the batches of its dump, which have {reader.info.groups_per_step} groups each"
        fix = f"set rollout.groups_per_step to {reader.info.groups_per_step}"
        yield BrokenRule({"rollout.groups_per_step": rollout.groups_per_step, **values}, rule, fix)
    if not reader.num_steps:
        yield BrokenRule(values, "the dump has no batches", "give the dump of a run that has taken a step")
    try:
        missing = reader.missing
    except DumpError as error:
        yield rule_of(str(error), values)
        return
    if missing:
        rule = f"the dump lists groups without rollouts: {len(missing)} of {reader.num_groups}, such as {missing[0]}"
        yield BrokenRule(values, rule, "copy all files")


def holds_dump(folder: Path) -> bool:
    """Return True if a folder holds a dump."""
    return (folder / META).exists()


def _batches(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of `batches.jsonl`, except an incomplete last line of a killed process."""
    path = folder / BATCHES
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line.endswith(b"\n"):
            continue
        try:
            batch = json.loads(line)
            batch["groups"][:0]  # it must be a list
        except (ValueError, LookupError, TypeError) as error:
            text = f"rollout.replay: line {number} of {BATCHES} is damaged (got {folder}). Restore the file."
            raise DumpError(text) from error
        yield batch


@lru_cache(maxsize=16)
def _read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Results are cached, because the groups of a file are usually read consecutively."""
    table = _table(path)
    found = [name for name in TOKEN_COLUMNS if name in table.column_names]  # dumps of earlier versions have fewer
    rows: list[dict[str, Any]] = table.drop_columns(found).to_pylist()
    for name in found:
        for row, tokens in zip(rows, table[name], strict=True):
            row[name] = tokens.values.to_numpy(zero_copy_only=False)
    return rows


def _table(path: Path, columns: Sequence[str] | None = None) -> "pyarrow.Table":
    import pyarrow
    from pyarrow import parquet

    try:
        return parquet.read_table(path, columns=columns)
    except (pyarrow.ArrowException, OSError) as error:
        raise DumpError(f"rollout.replay: {path} cannot be read: {error}. Restore the file.") from error


COLUMNS = {
    "index": "int64",
    "rollout": "int64",
    "sampled_at": "timestamp",
    "worker": "int64",
    "task": "string",
    "status": "string",
    "outcome": "string",
    "error": "string",
    "finish_reason": "string",
    "reward": "float64",
    "reward_parts": "string",
    "metrics": "string",
    "token_ids": "int32[]",
    "mask": "bool[]",
    "logprobs": "float32[]",
    "versions": "int32[]",
    "support_counts": "int32[]",
    "support_words": "int32[]",
    "support_vocabulary": "int64",
    "experts": "uint16[]",
    "experts_shape": "int32[]",
    "segment_lengths": "int32[]",
    "turn_segments": "int32[]",
    "turn_ends": "int32[]",
    "turn_rewards": "float64[]",
    "turn_states": "int64[]",
    "token_rewards": "float64[]",
    "messages": "string",
    "question": "string",
    "entry": "string",
    "prompt_token_ids": "int32[]",
    "generate_s": "float64",
    "score_s": "float64",
    "counts": "string",
}
"""Types of the columns of `rollouts/*.parquet`, in file order."""
TOKEN_COLUMNS = ("token_ids", "mask", "logprobs", "versions", "support_counts", "support_words", "experts")
"""Columns with per-token values, which are read as arrays."""


def table_of(rows: Sequence[Mapping[str, Any]]) -> "pyarrow.Table":
    """Convert rows to a pyarrow table with the documented columns."""
    import pyarrow

    def kind_of(name: str) -> pyarrow.DataType:
        if name == "timestamp":
            return pyarrow.timestamp("us", tz="UTC")
        entry = pyarrow.type_for_alias(name.removesuffix("[]"))
        return pyarrow.list_(entry) if name.endswith("[]") else entry

    schema = pyarrow.schema([(name, kind_of(kind)) for name, kind in COLUMNS.items()])
    return pyarrow.table({name: [row[name] for row in rows] for name in COLUMNS}, schema=schema)


def rows_of(group: Group, status: str, sampled_at: int, worker: int) -> Iterator[dict[str, Any]]:
    """Yield one row per rollout of a group: first the scored rollouts in order, then the failed ones."""
    prompt = group.prompt
    common = {
        "index": prompt.index,
        "sampled_at": sampled_at,
        "worker": worker,
        "task": prompt.task,
        "status": status,
        "question": _text(prompt.text),
        "entry": _json(prompt.entry),
        "prompt_token_ids": np.array(prompt.token_ids, np.int32),
        "generate_s": group.generate_s,
        "score_s": group.score_s,
        "counts": _json(group.counts),
    }
    for number, rollout in enumerate(group.rollouts):
        messages = _json(group.conversations[number]) if group.conversations else None
        yield {**common, "rollout": number, "messages": messages, **_scored(rollout)}
    for number, failure in enumerate(group.failures, len(group.rollouts)):
        yield {**common, "rollout": number, "messages": None, **_failed(failure)}


def _scored(rollout: Rollout) -> dict[str, Any]:
    segments, turns = rollout.segments, rollout.turns
    # Either all segments of a rollout have supports, or, without truncated sampling, none has.
    limited = [segment.supports for segment in segments if segment.supports is not None]
    supports = join(limited) if limited else None
    experts = joined_experts([(segment.experts, len(segment.token_ids)) for segment in segments])
    return {
        "outcome": "ok",
        "error": None,
        "finish_reason": rollout.finish_reason,
        "reward": rollout.reward,
        "reward_parts": _json(rollout.reward_parts),
        "metrics": _json(rollout.metrics),
        "token_ids": np.concatenate([segment.token_ids for segment in segments]).astype(np.int32),
        "mask": np.concatenate([segment.mask for segment in segments]),
        "logprobs": np.concatenate([segment.logprobs for segment in segments]),
        "versions": np.concatenate([segment.versions for segment in segments]).astype(np.int32),
        "support_counts": [] if supports is None else supports.counts_S,
        "support_words": [] if supports is None else supports.words_K,
        "support_vocabulary": None if supports is None else supports.vocab_size,
        "experts": [] if experts is None else experts.ravel(),
        "experts_shape": None if experts is None else [*experts.shape[1:], experts.itemsize],
        "segment_lengths": [len(segment.token_ids) for segment in segments],
        "turn_segments": [turn.segment for turn in turns],
        "turn_ends": [turn.end for turn in turns],
        "turn_rewards": [turn.reward for turn in turns],
        "turn_states": [turn.state for turn in turns],
        "token_rewards": rollout.token_rewards,
    }


def _failed(failure: ScorerFailure) -> dict[str, Any]:
    sampled = failure.completion
    mask = np.ones(len(sampled.token_ids), np.bool_)
    segment = Segment(token_ids=sampled.token_ids, mask=mask, logprobs=sampled.logprobs, versions=sampled.versions)
    unscored = Rollout(segments=(segment,), reward=math.nan, reward_parts={}, finish_reason=sampled.finish_reason)
    return {**_scored(unscored), "outcome": failure.outcome, "error": _text(failure.error), "reward": None}


def group_of(rows: Sequence[Mapping[str, Any]], index: int) -> Group:
    """Rebuild a group from its rows; `index` becomes its prompt's position in the stream."""
    rows = sorted(rows, key=lambda row: row["rollout"])
    scored, first = [row for row in rows if row["outcome"] == "ok"], rows[0]
    return Group(
        prompt=Prompt(
            index=index,
            task=first["task"],
            text=first["question"],
            token_ids=tuple(first["prompt_token_ids"]),
            entry=json.loads(first["entry"]),
        ),
        rollouts=tuple(map(_rollout, scored)),
        generate_s=first["generate_s"],
        score_s=first["score_s"],
        failures=tuple(
            ScorerFailure(completion=_completion(row), error=row["error"], outcome=row["outcome"])
            for row in rows
            if row["outcome"] != "ok"
        ),
        conversations=tuple(json.loads(row["messages"]) for row in scored if row["messages"] is not None),
        counts=json.loads(first["counts"]),
    )


def _rollout(row: Mapping[str, Any]) -> Rollout:
    ends = np.cumsum(row["segment_lengths"])[:-1]
    token_ids, versions = (np.split(row[name].astype(np.int64), ends) for name in ("token_ids", "versions"))
    columns = zip(token_ids, np.split(row["mask"], ends), np.split(row["logprobs"], ends), versions, strict=True)
    token_rewards, states = row.get("token_rewards"), row.get("turn_states")  # missing in dumps of earlier versions
    states = [0] * len(row["turn_ends"]) if states is None else states
    turns = zip(row["turn_segments"], row["turn_ends"], row["turn_rewards"], states, strict=True)
    return Rollout(
        segments=tuple(
            Segment(token_ids=ids, mask=mask, logprobs=logprobs, versions=sampled_by, supports=supports, experts=experts)
            for (ids, mask, logprobs, sampled_by), supports, experts in zip(columns, _supports(row), _experts(row), strict=True)
        ),
        reward=row["reward"],
        reward_parts=json.loads(row["reward_parts"]),
        finish_reason=row["finish_reason"],
        turns=tuple(Turn(segment=segment, end=end, reward=reward, state=state) for segment, end, reward, state in turns),
        token_rewards=None if token_rewards is None else np.array(token_rewards, np.float64),
        metrics=json.loads(row.get("metrics", "{}")),
    )


def _supports(row: Mapping[str, Any]) -> Sequence[Supports | None]:
    """Return the supports of each segment, or None per segment without truncated sampling."""
    lengths = row["segment_lengths"]
    if row["support_vocabulary"] is None:
        return [None] * len(lengths)
    counts, words = row["support_counts"], row["support_words"]
    supports = Supports(counts_S=counts, words_K=words, vocab_size=row["support_vocabulary"])
    ends = np.cumsum(lengths).tolist()
    return [supports[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _experts(row: Mapping[str, Any]) -> Sequence[ExpertIds | None]:
    """Return the experts of each segment, or None per segment if they were not recorded."""
    lengths, shape = row["segment_lengths"], row.get("experts_shape")  # missing in dumps of earlier versions
    if shape is None:
        return [None] * len(lengths)
    num_layers, per_token, itemsize = shape
    ids: ExpertIds = row["experts"].astype(np.uint8 if itemsize == 1 else np.uint16)
    return np.split(ids.reshape(-1, num_layers, per_token), np.cumsum(lengths)[:-1])


def _completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        token_ids=row["token_ids"].astype(np.int64),
        logprobs=row["logprobs"],
        versions=row["versions"].astype(np.int64),
        finish_reason=row["finish_reason"],
    )


def _text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()


def _json(value: object) -> str:
    """Encode a value as JSON; types that JSON does not support, also of keys, become strings."""
    try:
        return json.dumps(value, default=_plain)
    except TypeError:  # a key
        return json.dumps(_with_text_keys(value), default=_plain)


def _with_text_keys(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    return str(value)
