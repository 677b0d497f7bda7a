"""Write the measurements in `benchmarks/baselines/` into README and docs: `python -m benchmarks.table [--check]`."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import scale_tables

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: python -m benchmarks.table -->", "<!-- end of figures -->"


def main() -> None:
    """Rewrite the tables, or check that they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is outdated")
    arguments = parser.parse_args()
    outdated = []
    for document, (baseline, table) in TABLES.items():
        measured = ROOT / "benchmarks/baselines" / baseline
        if not measured.exists():
            continue
        text = (ROOT / document).read_text()
        updated = with_table(text, table(json.loads(measured.read_text())))
        if updated != text:
            outdated.append(document)
        if not arguments.check:
            (ROOT / document).write_text(updated)
    if arguments.check and outdated:
        sys.exit(f"{', '.join(outdated)}: the figures are outdated; run python -m benchmarks.table")


def with_table(text: str, table: str) -> str:
    """Return the text with a new table between the two markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


Cell = Callable[[Mapping[str, Any]], str]
"""Function that formats one number of a run."""


QUICKSTART_ROWS: dict[str, Cell] = {
    "held-out score, before -> after": lambda run: f"{run['heldout_first']:.3f} -> {run['heldout_last']:.3f}",
    "reward, first -> last five steps": lambda run: f"{run['reward_first_five']:.2f} -> {run['reward_last_five']:.2f}",
    "warm start, with loading (once, then cached)": lambda run: f"{run['warm_start_s']:.0f} s",
    "first GRPO step after launch, base cached": lambda run: f"{run['first_step_s']:.1f} s",
    "held-out score 0.8 after": lambda run: f"{run['time_to_score_s']:.0f} s" if run["time_to_score_s"] else "-",
    "step, median": lambda run: f"{run['step_s']:.3f} s",
    "of it: generate, score, sync": lambda run: f"{run['phases_s']['rollout']:.3f} s",
    "of it: forward, backward, optimizer": lambda run: f"{run['phases_s']['train'] + run['phases_s']['optim']:.3f} s",
    "weight sync, push + pull": lambda run: sync_text(run["sync_push_s"] + run["sync_pull_s"], run["step_s"]),
    "largest log-prob difference trainer/generator": lambda run: f"{run['mismatch_max']:.1e}",
}


def sync_text(sync_s: float, step_s: float) -> str:
    """Return the seconds of a weight sync and their share of a step."""
    return f"{sync_s:.3f} s, {sync_s / step_s:.0%} of a step"


def quickstart_table(result: Mapping[str, Any]) -> str:
    """Return the table of the quick start, one column per seed."""
    runs, machine = result["runs"], result["machine"]
    head = "| | " + " | ".join(f"seed {run['seed']}" for run in runs) + " |"
    lines = [head, "|---|" + "---|" * len(runs)]
    lines += [f"| {label} | " + " | ".join(map(cell, runs)) + " |" for label, cell in QUICKSTART_ROWS.items()]
    return "\n".join(lines) + f"\n\n`python -m benchmarks.quickstart --json FILE`, {where(machine)}."


def where(machine: Mapping[str, Any]) -> str:
    """Return the machine and the commit of a measurement."""
    return f"{machine['cores']} cores of an {machine['processor']}, commit {machine['commit']}"


def weight_sync_tables(result: Mapping[str, Any]) -> str:
    """Return a table of all cases with the default digest, and one of the cost of each digest."""
    cases: Sequence[Mapping[str, Any]] = result["cases"]
    lines = [
        "| payload, layout | types | memcpy | threads | push | pull | end to end | first push | copies by torch's "
        "| torchstore's own |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(sync_row(case) for case in cases if case["verify"] == "sampled"),
        "",
        f"`python -m benchmarks.weight_sync --json FILE`, {where(result['machine'])}.",
        "",
        "What the digest costs, 1->1, bf16->bf16 (differences of a tenth are noise):",
        "",
        "| verify | push | pull | end to end |",
        "|---|---|---|---|",
        *(
            f"| {payload}, {verify} | x{case['push_ratio']:.2f} | x{case['pull_ratio']:.2f} | x{case['e2e_ratio']:.2f} |"
            for payload in ("small", "large")
            for verify in ("off", "sampled", "full")
            for case in cases
            if (case["payload"], case["layout"], case["dtype"], case["verify"]) == (payload, "1->1", "bf16->bf16", verify)
        ),
    ]
    return "\n".join(lines)


def sync_row(case: Mapping[str, Any]) -> str:
    """Return one case as a table row."""
    cells = [
        f"{case['payload']} {case['layout']}",
        case["dtype"],
        f"{case['memcpy_s'] * 1e3:.1f} ms",
        f"{case.get('push_threads', 1)}, {case.get('pull_threads', 1)}",
        f"x{case['push_ratio']:.2f}",
        f"x{case['pull_ratio']:.2f}",
        f"x{case['e2e_ratio']:.2f} ({case['e2e_s'] * 1e3:.0f} ms)",
        f"{case['first_push_s']:.2f} s",
        f"x{case['copy_ratio']:.2f}",
        "-" if case["torchstore_ratio"] is None else f"x{case['torchstore_ratio']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def reward_table(result: Mapping[str, Any]) -> str:
    """Return the table of scores by staleness, one row per setting, averaged over seeds."""
    seeds = ", ".join(map(str, sorted({run["seed"] for run in result["runs"]})))
    lines = [
        "| `max_staleness` | correction | held-out at the end (worst seed) | reward over the run | answer tokens | mean age |",
        "|---|---|---|---|---|---|",
        *(
            f"| {setting['max_staleness']} | {setting['correction']} | {setting['heldout_last']:.3f} "
            f"({setting['heldout_last_worst']:.3f}) | {setting['reward_mean']:.3f} | {setting['response_len_mean']:.1f} "
            f"| {setting['staleness_mean']:.2f} |"
            for setting in result["settings"]
        ),
        "",
        f"`python -m benchmarks.async_speedup --reward --json FILE`, seeds {seeds}, {where(result['machine'])}.",
    ]
    return "\n".join(lines)


def chaos_table(result: Mapping[str, Any]) -> str:
    """Return a table of the run with faults, and one of recovery times by kind of process."""
    minutes = result["runs"]["undisturbed"]["seconds"] / 60
    lines = [
        "| | |",
        "|---|---|",
        f"| faults injected, survived | {result['faults_injected']}, {result['faults_survived']} |",
        f"| samples lost, trained on twice | {result['samples_lost']}, {result['samples_duplicated']} |",
        f"| steps with a token older than the bound | {result['staleness_violations']} |",
        f"| throughput, of that without faults | {result['throughput_ratio']:.0%} |",
        f"| held-out score at the end, of that without faults | {chaos_score(result)} |",
        "",
        "| process | faults | seconds to recover, median | longest |",
        "|---|---|---|---|",
        *(chaos_row(kind, figures) for kind, figures in {**result["by_kind"], "all": result}.items()),
    ]
    share = f" --stop-share {result['stop_share']:g}" if result["stop_share"] else ""
    every = f"a fault every {result['seconds_between_faults']:g} s for {minutes:.0f} minutes"
    return "\n".join(lines) + f"\n\n`python -m benchmarks.chaos --json FILE{share}`, {every}, {where(result['machine'])}."


def chaos_row(kind: str, figures: Mapping[str, Any]) -> str:
    """Return the recovery times of one kind of process as a table row."""
    seconds = figures["recovery_s"]
    spread = f"{seconds['median']:.1f} | {seconds['max']:.1f}" if seconds else "- | -"
    return f"| {kind} | {figures['faults_injected']} | {spread} |"


def chaos_score(result: Mapping[str, Any]) -> str:
    """Return the final scores of the disturbed and the undisturbed run."""
    return f"{result['heldout_last']:.3f}, {result['runs']['undisturbed']['heldout_last']:.3f}"


def hosts_table(result: Mapping[str, Any]) -> str:
    """Return the table of the hosts benchmark, one column per case."""
    cases, one = result["cases"], result["cases"]["1 host"]
    rows: dict[str, Cell] = {
        "step, median": lambda case: f"{case['step_s']:.3f} s",
        "push, median": lambda case: f"{case['push_s'] * 1e3:.1f} ms",
        "pull, median": lambda case: f"{case['pull_s'] * 1e3:.1f} ms",
        "weights over the network per version": lambda case: (
            f"{case['times_over_the_network']:g} x {case['version_bytes'] / 1e6:.2f} MB"
        ),
        "same rewards as on one host": lambda case: "yes" if case["rewards"] == one["rewards"] else "no",
        "bytes through the controller's host per group": lambda case: bytes_text(case, "controller_bytes_per_group"),
        "bytes into n1 (trainer) per step": lambda case: bytes_text(case, "n1_received_bytes_per_step"),
        "bytes into n2 (generator) per step": lambda case: bytes_text(case, "n2_received_bytes_per_step"),
        "bytes into n3 (generator) per step": lambda case: bytes_text(case, "n3_received_bytes_per_step"),
    }
    lines = ["| | " + " | ".join(cases) + " |", "|---|" + "---|" * len(cases)]
    lines += [f"| {label} | " + " | ".join(map(cell, cases.values())) + " |" for label, cell in rows.items()]
    where_text = f"hosts emulated by {result['emulation']}, {where(result['machine'])}"
    return "\n".join(lines) + f"\n\n`python -m benchmarks.hosts --json FILE`, {where_text}."


def growth_table(result: Mapping[str, Any]) -> str:
    """Return the slopes of the processes of a long run, one row per role."""
    named = {name: row for name, row in result["processes"].items() if not name.startswith("child")}
    children = [row for name, row in result["processes"].items() if name.startswith("child")]
    lines = [
        "| process | resident memory, bytes per prompt | standard error | open descriptors | threads |",
        "|---|---|---|---|---|",
        *(f"| {name} | {growth_cells(row)} |" for name, row in named.items()),
    ]
    largest = max(abs(row["bytes_per_prompt"]) for row in children)
    text = f"The {len(children)} other processes grew by at most {largest:.1f} bytes per prompt."
    steps = f"{result['steps']:,} steps, slopes over the last {result['steps'] - result['skipped_steps']:,}"
    command = f"`python -m benchmarks.growth --json FILE`, {steps}, {where(result['machine'])}."
    return "\n".join([*lines, "", f"{text} {command}"])


def growth_cells(row: Mapping[str, Any]) -> str:
    """Return slope, standard error, descriptors and threads of a process."""
    spreads = (f"{row[name]['min']} to {row[name]['max']}" for name in ("descriptors", "threads"))
    return " | ".join([f"{row['bytes_per_prompt']:.1f}", f"{row['standard_error']:.1f}", *spreads])


def scale_figures(result: Mapping[str, Any]) -> str:
    """Return the tables of simulated sizes, of the comparison with real runs, and of the growth on one machine."""
    compared, grown = (
        json.loads((ROOT / "benchmarks/baselines" / name).read_text()) for name in ("scale_compare.json", "growth_by_size.json")
    )
    limits = "; ".join(f"{name}: {'none' if size is None else f'{size:,} generators'}" for name, size in result["ends"].items())
    lines = [
        "Growth on one machine:",
        "",
        *(f"{scale_tables.growth_table(name, over)}\n" for name, over in grown["over"].items()),
        f"`python -m benchmarks.growth_by_size --json FILE`, {where(grown['machine'])}.",
        "",
        "Simulated and real runs of the same configuration:",
        "",
        scale_tables.comparison_table(compared["runs"]),
        "",
        f"`python -m benchmarks.scale --compare --json FILE`, {where(compared['machine'])}.",
        "",
        "Simulated sizes:",
        "",
        scale_tables.size_table(result["sizes"]),
        "",
        f"First size with {limits}.",
        "",
        f"`python -m benchmarks.scale --json FILE`, {where(result['machine'])}, costs {result['costs']['source']}.",
    ]
    return "\n".join(lines)


def bytes_text(case: Mapping[str, Any], name: str) -> str:
    """Return a number of bytes, or a dash if it was not measured."""
    return f"{case[name]:,.0f}" if name in case else "-"


def peers_table(result: Mapping[str, Any]) -> str:
    """Return the comparison with other programs, one column per system."""
    summary, names = result["summary"], peer_names(result)
    lines = [f"| | {' | '.join(names.values())} |", "|---|" + "---|" * len(names)]
    for label, (payload, key, unit) in PEERS_ROWS.items():
        found = [summary.get(payload, {}).get(system, {}).get(key) for system in names]
        if any(value is not None for value in found):
            lines.append(f"| {label} | {' | '.join(peer_cells(found, unit, baseline=list(names).index('TRL')))} |")
    command = f"`python -m benchmarks.peers --json FILE`, {where(result['machine'])}"
    text = f"Medians of 2 or 3 runs; in brackets, divided by TRL's. {command}."
    return "\n".join([*lines, "", text])


PEERS_ROWS = {
    "quick start: seconds per step (less is better)": ("quickstart", "step_s", ".3f"),
    "quick start: first step after launch, s (less)": ("quickstart", "first_step_s", ".1f"),
    "quick start: held-out score 0.8 after launch, s (less)": ("score", "time_to_score_s", ".1f"),
    "10M parameters: generated and trained tokens/s (more)": ("10M", "tokens_per_s", ".0f"),
    "96M parameters: generated and trained tokens/s (more)": ("100M", "tokens_per_s", ".0f"),
}
"""Payload, figure and format of each row."""


def peer_names(result: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of the systems, in their order, with TRL's version."""
    systems = dict.fromkeys(system for payload in result["summary"].values() for system in payload)
    titles = {"TRL": f"TRL {result['peer_packages']['trl']}", "PyTorch": "plain PyTorch loop"}
    return {system: titles.get(system, system) for system in ("TitanRL", "TitanRL, asynchronous", *titles) if system in systems}


def peer_cells(values: Sequence[float | None], unit: str, *, baseline: int) -> list[str]:
    """Return the values with their ratio to that of the baseline, which has none; a dash for a missing value."""
    base = values[baseline]
    return [
        "-"
        if value is None
        else f"{value:{unit}}"
        if base is None or number == baseline
        else f"{value:{unit}} (x{value / base:.2f})"
        for number, value in enumerate(values)
    ]


def peers_details(result: Mapping[str, Any]) -> str:
    """Return one table per payload with the phases, CPU seconds, memory and settings of every system."""
    names, lines = peer_names(result), []
    for payload, systems in result["summary"].items():
        rows = SCORE_ROWS if payload == "score" else DETAIL_ROWS
        shown = [system for system in names if system in systems]
        turns = max(systems[system]["turns"] for system in shown)
        lines += [f"**{payload}**, medians of {turns} runs, in brackets the least and the most:", ""]
        lines += [f"| | {' | '.join(names[system] for system in shown)} |", "|---|" + "---|" * len(shown)]
        for label, (key, scale, unit) in rows.items():
            cells = (peer_spread(result, payload, system, key, scale, unit) for system in shown)
            lines.append(f"| {label} | {' | '.join(cells)} |")
        if payload != "score":
            lines.append(
                f"| CPU ms per token | {' | '.join(cpu_text(systems[system]['cpu_ms_per_token']) for system in shown)} |"
            )
        lines += [f"| setting | {' | '.join(setting_text(systems[system]['setting']) for system in shown)} |", ""]
    packages = ", ".join(f"{name} {version}" for name, version in result["peer_packages"].items())
    return "\n".join([*lines, f"`python -m benchmarks.peers --json FILE`, {where(result['machine'])}. Peers: {packages}."])


DETAIL_ROWS = {
    "tokens/s": ("tokens_per_s", 1, ".0f"),
    "step, s": ("step_s", 1, ".3f"),
    "of it: generate, score, s": ("generate_s", 1, ".3f"),
    "of it: forward, backward, optimizer, s": ("train_s", 1, ".3f"),
    "tokens of completions per second of the latter": ("train_tokens_per_s", 1, ".0f"),
    "tokens per step": ("tokens_per_step", 1, ".0f"),
    "first step after launch, s": ("first_step_s", 1, ".1f"),
    "CPU seconds until then": ("first_step_cpu_s", 1, ".1f"),
    "peak memory, GB": ("peak_bytes", 1e-9, ".2f"),
    "share of the cores that other commands used": ("others_share", 1, ".0%"),
}
"""Figure, scale and format of each row."""
SCORE_ROWS = {
    "held-out score 0.8 after launch, s": ("time_to_score_s", 1, ".1f"),
    "first step after launch, s": ("first_step_s", 1, ".1f"),
    "score before": ("score_first", 1, ".3f"),
    "score at the end": ("score_last", 1, ".3f"),
    "share of the cores that other commands used": ("others_share", 1, ".0%"),
}


def peer_spread(result: Mapping[str, Any], payload: str, system: str, key: str, scale: float, unit: str) -> str:
    """Return the median of a figure over the turns, with the smallest and the largest; a dash if a turn lacks it."""
    runs = (run for run in result["runs"] if (run["payload"], run["system"]) == (payload, system) and run["turn"] is not None)
    values = [run["figures"][key] for run in runs]
    if None in values:
        return "-"
    spread = "" if len(values) == 1 else f" ({min(values) * scale:{unit}} to {max(values) * scale:{unit}})"
    return f"{result['summary'][payload][system][key] * scale:{unit}}{spread}"


def cpu_text(by_role: Mapping[str, float]) -> str:
    """Return the CPU time per token, and that of the roles that use at least 2 % of it, largest first."""
    total = sum(by_role.values())
    roles = sorted((item for item in by_role.items() if item[1] >= 0.02 * total), key=lambda item: -item[1])
    parts = "" if len(roles) == 1 else ": " + ", ".join(f"{role} {value:.2f}" for role, value in roles)
    return f"{total:.2f}{parts}"


def setting_text(setting: Mapping[str, Any] | None) -> str:
    """Return the setting of a peer."""
    if setting is None:
        return "defaults"
    batching = ", continuous batching" if setting["continuous_batching"] else ""
    return f"{setting['threads']} threads, device batch {setting['device_batch']}{batching}"


def record_table(result: Mapping[str, Any]) -> str:
    """Return what the record costs a run, and what opening and searching a large one costs."""
    on, off = ([run[state]["step_cpu_s"] for run in result["runs"]] for state in ("on", "off"))
    ratios = [a / b - 1 for a, b in zip(on, off, strict=True)]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    kilobytes = statistics.fmean(run["on"]["step_bytes"] for run in result["runs"]) / 1e3
    rows = {
        "quick start, step with the record": milliseconds(on),
        "quick start, step without it": milliseconds(off),
        **{
            f"recording a step of {length} tokens per completion": f"{1e3 * (each['groups_s'] + each['losses_s']):.1f} ms"
            for length, each in result["recording"].items()
        },
        **{
            RECORD_ROWS.get(name, f"search: {name}"): milliseconds([each[name] for each in result["opening"]])
            for name in result["opening"][0]
            if name != "memory_bytes"
        },
    }
    memory = statistics.fmean(each["memory_bytes"] for each in result["opening"]) / 1e6
    return "\n".join(
        [
            "| CPU time | mean and range |",
            "|---|---|",
            *(f"| {label} | {text} |" for label, text in rows.items()),
            "",
            f"Mean difference of a step with and without the record: {statistics.fmean(ratios):+.1%}, standard error",
            f"{error:.1%} ({len(ratios)} pairs of runs). The record of a step has {kilobytes:.0f} kB.",
            f"The run that is read has 5,000 steps and 100,000 rollouts; the reader's peak memory grew by {memory:.0f} MB.",
            f"`python -m benchmarks.record --json FILE`, {where(result['machine'])}.",
        ]
    )


RECORD_ROWS = {
    "metrics": "run: read the metrics",
    "open": "run: first search, which reads all rollouts",
    "refresh": "run: search without conditions",
}
"""Labels of some figures of `benchmarks.record`."""


def milliseconds(seconds: Sequence[float]) -> str:
    """Return the mean and the range of some times."""
    mean, low, high = (1e3 * value for value in (statistics.fmean(seconds), min(seconds), max(seconds)))
    return f"{mean:.1f} ms ({low:.1f} to {high:.1f})"


def serve_table(result: Mapping[str, Any]) -> str:
    """Return the cost of each way to ask through the endpoint, with medians, and the range of the added CPU time."""
    tiny, large = result["tiny"], result["large"]
    names = {
        "calls": "calls of a session, without HTTP",
        "tokens": "`/inference/v1/generate`",
        "chat": "`/v1/chat/completions`",
        "chat stream": "the same, streamed",
    }
    lines = [
        "| | CPU per call | of it added by the endpoint | tokens/s, 100 million parameters | of the engine's |",
        "|---|---|---|---|---|",
    ]
    for name, title in names.items():
        added = sorted(tiny[name]["added_cpu_ms"])
        text = f"{added[len(added) // 2]:.1f} ms ({added[0]:.1f} to {added[-1]:.1f})" if any(added) else ""
        rate, share = large[name]["tokens_per_s"], large[name]["relative_throughput"]
        lines.append(f"| {title} | {tiny[name]['cpu_ms_per_call']:.1f} ms | {text} | {rate:.0f} | {share:.2f} |")
    return "\n".join(lines) + f"\n\n`python -m benchmarks.serve --json FILE`, {where(result['machine'])}."


def critic_table(result: Mapping[str, Any]) -> str:
    """Return the share of correct answers over the last ten steps, by seed, with and without a critic."""
    seeds = sorted({run["seed"] for run in result["runs"]})
    lines = [
        f"| baseline | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | step, median |",
        f"|---|{'---|' * (len(seeds) + 2)}",
    ]
    for name, summary in result["variants"].items():
        found = {run["seed"]: run["correct_last_10"] for run in result["runs"] if run["variant"] == name}
        shares = [f"{found[seed]:.3f}" for seed in seeds]
        lines.append(f"| {name} | {' | '.join(shares)} | {summary['correct_last_10']:.3f} | {summary['step_s']:.2f} s |")
    return "\n".join(lines) + f"\n\n`python -m benchmarks.critic --json FILE`, {where(result['machine'])}."


def adapters_table(result: Mapping[str, Any]) -> str:
    """Return the table of a switch between two adapters, and the ratio of steps."""
    lines = ["| base | adapter | switch |", "|---|---|---|"]
    for name, case in result["cases"].items():
        found, size = case["switch"], f"{case['adapter_bytes'] / 1e6:.1f} MB"
        switch = f"{found['median_s'] * 1000:.1f} ms ({found['min_s'] * 1000:.1f} to {found['max_s'] * 1000:.1f})"
        lines.append(f"| {name} | {size} | {switch} |")
    (ratio,) = (case["step_ratio"] for case in result["cases"].values() if "step_ratio" in case)
    pairs = "the steps of two models that take turns with each pass take"
    steps = f"On the smaller base, {pairs} {ratio:.3f} times the CPU seconds of as many steps of one model (median of pairs)."
    return "\n".join(lines) + f"\n\n{steps}\n\n`python -m benchmarks.adapters --json FILE`, {where(result['machine'])}."


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "README.md": ("peers.json", peers_table),
    "docs/comparison.md": ("peers.json", peers_details),
    "docs/first_run.md": ("quickstart.json", quickstart_table),
    "docs/weights.md": ("weight_sync.json", weight_sync_tables),
    "docs/async.md": ("async_reward.json", reward_table),
    "docs/faults.md": ("chaos.json", chaos_table),
    "docs/howto/placement.md": ("hosts.json", hosts_table),
    "docs/howto/serve.md": ("serve.json", serve_table),
    "docs/architecture.md": ("growth.json", growth_table),
    "docs/trainer.md": ("adapters.json", adapters_table),
    "docs/howto/critic.md": ("critic.json", critic_table),
    "docs/scale.md": ("scale.json", scale_figures),
    "docs/record.md": ("record.json", record_table),
}
"""Baseline file of each document, and the function that formats it as a table."""


if __name__ == "__main__":
    main()
