import io
from typing import Any

import pytest
from rich.console import Console

from titanrl.config import Config, Source, dry_run
from titanrl.config.dry_run import changed_keys, print_dry_run
from titanrl.models.directory import model_shape


def dry_run_text(config: Config, source: Source | None = None, *, terminal: bool = False, **options: Any) -> str:
    file = io.StringIO()
    console = Console(file=file, width=200, force_terminal=terminal)
    print_dry_run(config, console, source, shape=model_shape(config), **options)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def make_config(**sections: Any) -> Config:
    return Config(name="a", num_steps=3, **sections)


def test_report_starts_with_the_keys_that_differ_from_the_defaults() -> None:
    lines = dry_run_text(make_config(rollout={"group_size": 4})).splitlines()
    assert lines[0] == "# Keys that differ from the defaults"
    assert [line.split() for line in lines[1:5]] == [
        ["key", "value", "default"],
        ["name", '"a"', "required"],
        ["num_steps", "3", "required"],
        ["rollout.group_size", "4", "8"],
    ]
    assert lines[5] == ""


def test_changed_keys_include_presets_and_optional_sections() -> None:
    config = make_config(algorithm={"preset": "dapo"}, warm_start={"num_steps": 500}, trainer={"lora": {}})
    assert set(changed_keys(config)) == {
        ("name", '"a"', "required"),
        ("num_steps", "3", "required"),
        ("algorithm.preset", '"dapo"', "null"),
        ("algorithm.advantage", '"grpo"', '"dr_grpo"'),
        ("algorithm.clip_high", "0.28", "0.2"),
        ("warm_start.num_steps", "500", "460"),
        ("trainer.lora", "{}", "null"),
    }


def test_changed_keys_include_sections_by_name() -> None:
    config = make_config(data={"rewards": {"short": {"function": "exact", "weight": 2.0}}, "mixture": {"a": {}}})
    assert [row for row in changed_keys(config) if row[0].startswith("data.")] == [
        ("data.rewards.short.function", '"exact"', "required"),
        ("data.rewards.short.weight", "2.0", "1.0"),
        ("data.mixture.a", "{}", "(not set)"),
    ]


def test_dtypes_in_which_this_processor_is_slow_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(dtype: str, *, has_instructions: bool, device: str = "cpu") -> list[str]:
        monkeypatch.setattr(dry_run, "multiplies_bfloat16", lambda: has_instructions)
        config = make_config(model={"path": "nowhere/Qwen3-0.6B"}, trainer={"compute_dtype": dtype}, generator={"dtype": dtype})
        text = dry_run_text(config, device=device)
        return [line for line in text.splitlines() if "has instructions for" in line or "has no instructions for" in line]

    for dtype, has_instructions in (("float32", True), ("bfloat16", False)):
        keys = [f"{key}={dtype}" for key in ("trainer.compute_dtype", "generator.dtype")]
        assert [line.partition(":")[0] for line in noted(dtype, has_instructions=has_instructions)] == keys
        assert noted(dtype, has_instructions=not has_instructions) == []
        assert noted(dtype, has_instructions=has_instructions, device="cuda") == []


def test_memory_of_further_adapters_is_printed_with_lora() -> None:
    text = dry_run_text(make_config(trainer={"lora": {"rank": 4, "max_models": 3}}))
    (line,) = (line for line in text.splitlines() if "each further adapter of a session" in line)
    assert line.split("session")[1].strip().endswith("kB on each trainer rank; at most 3 adapters")
    assert "further adapter" not in dry_run_text(make_config())


def placement(text: str) -> list[list[str]]:
    """Return the rows of the placement table. Columns are separated by two or more spaces."""
    table = text.partition("# Hosts and devices\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[cell for cell in line.split("  ") if cell] for line in table]


def test_placement_on_cpu_shares_the_memory_of_the_machine() -> None:
    rows = placement(dry_run_text(make_config()))
    assert [cell.strip() for cell in rows[0][:4]] == ["this machine", "cpu", "trainer rank", "1"]
    assert "together" in " ".join(rows[-1])
    assert rows[-1][-1].strip().endswith("GB")


def test_placement_on_cpu_counts_libraries_and_adds_up() -> None:
    sections = {"trainer": {"row_tokens": 128, "rows_per_microbatch": 1}, "generator": {"replicas": 2, "dtype": "bfloat16"}}
    config = make_config(device="cpu", model={"path": "nowhere/Qwen3-0.6B"}, **sections)
    rows = placement(dry_run_text(config))
    each = {row[2].strip(): (int(row[3]), float(row[4].split()[0])) for row in rows[:2]}
    # 24 bytes a parameter and 0.5 GB; weights and packed copies of 2 bytes a parameter, 67 MB of cache and 0.65 GB.
    assert each == {"trainer rank": (1, 14.8), "generator rank": (2, 3.1)}
    small = {row[1].strip(): (int(row[2]), row[3].strip()) for row in rows[2:-1]}
    assert small["rollout"] == (1, "170.0 MB")
    assert small["controller"] == (1, "400.0 MB")
    # 14.8 + 2 x 3.1, two versions of 1.2 GB, and 1 GB of the other processes.
    assert rows[-1][-2].strip() == "24.4 GB together"


def test_placement_on_accelerators_compares_with_the_memory_of_a_device() -> None:
    config = make_config(
        device="cuda",
        model={"path": "nowhere/Qwen3-8B"},
        trainer={"parallelism": {"dp_shard": 4}},
        generator={"replicas": 2, "tp": 2, "dtype": "bfloat16"},
    )
    text = dry_run_text(config, device="cuda", device_bytes=24_000_000_000)
    trainer, generator = ([cell.strip() for cell in row] for row in placement(text)[:2])
    assert trainer[:4] == ["this machine", "cuda 0-3", "trainer rank", "4"]
    assert generator[:5] == ["this machine", "cuda 4-7", "generator rank", "4", "8.2 GB + KV cache"]
    assert trainer[-1] == generator[-1] == "24.0 GB"
    assert "but a device has 24.0 GB" in text


def test_context_parallelism_makes_long_rows_fit_a_device() -> None:
    def printed(cp: int) -> tuple[list[str], str]:
        trainer = {
            "parallelism": {"cp": cp},
            "row_tokens": 32768,
            "rows_per_microbatch": 1,
            "compute_dtype": "bfloat16",
            "activation_checkpointing": "selective",
        }
        text = dry_run_text(make_config(device="cuda", model={"path": "nowhere/Qwen3-4B"}, trainer=trainer), device="cuda")
        return [cell.strip() for cell in placement(text)[0]], text

    alone, text = printed(1)
    assert alone[1:5] == ["cuda 0", "trainer rank", "1", "123.9 GB"]
    assert "raise trainer.parallelism.dp_shard, cp or tp" in text
    divided, text = printed(4)
    assert divided[1:5] == ["cuda 0-3", "trainer rank", "4", "33.5 GB"]
    assert "a trainer rank needs" not in text


def test_placement_on_slurm_counts_processes_per_host() -> None:
    config = make_config(
        device="cuda",
        trainer={"parallelism": {"dp_shard": 16}},
        generator={"replicas": 4, "tp": 2},
        hosts={"kind": "slurm", "trainer_hosts": 2, "generator_hosts": 2},
    )
    trainer, generator = ([cell.strip() for cell in row] for row in placement(dry_run_text(config, device="cuda"))[:2])
    assert trainer[:4] == ["trainer hosts (2)", "cuda 0-7", "trainer rank", "8"]
    assert generator[:4] == ["generator hosts (2)", "cuda 0-3", "generator rank", "4"]
    assert trainer[-1] == "80.0 GB (assumed)"


@pytest.mark.parametrize(("terminal", "framed"), [(True, True), (False, False)])
def test_tables_have_frames_only_on_a_terminal(terminal: bool, framed: bool) -> None:
    assert ("\u2500" in dry_run_text(make_config(), terminal=terminal)) == framed


def test_brackets_in_values_are_printed() -> None:
    assert "[0.5, 0.75]" in dry_run_text(make_config(algorithm={"betas": [0.5, 0.75]}))
