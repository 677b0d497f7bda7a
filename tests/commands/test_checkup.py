"""Rules of the verdict, on handwritten reports."""

from dataclasses import replace

import pytest

from titanrl.commands.doctor import Examined, Link, Needs, needs_of, problems, rounds
from titanrl.config.load import load_config
from titanrl.config.sizes import LIBRARY_BYTES, derive
from titanrl.hosts.holder import CHOSEN, MISSING, HostReport
from titanrl.models.directory import model_shape

REPORT = HostReport(
    name="n1",
    versions={"python": "3.11.7", "torch": "2.13.0"},
    device_problem=None,
    devices=[],
    cores=2,
    memory=4_000_000_000,
    limited_by="",
    shared_memory=1_000_000_000,
    files={"model.path": "d1"},
    shares_runs=True,
)
NEEDS = Needs(roles="generators", memory=1_000_000_000, shared_memory=0, devices=0)


def host(node: str, report: HostReport = REPORT, needs: Needs = NEEDS, clock_s: float = 0.0) -> Examined:
    return Examined(node=node, report=replace(report, name=node), needs=needs, clock_s=clock_s, taken={})


def lines(*hosts: Examined, links: tuple[Link, ...] = ()) -> list[str]:
    return [str(problem) for problem in problems(hosts, links)]


def test_equal_hosts_have_no_problem() -> None:
    link = Link(source="n1", target="n2", closed={}, latency_s=1e-4, bytes_per_s=1e9)
    assert lines(host("n1"), host("n2"), links=(link,)) == []


def test_different_version_is_named_with_its_host() -> None:
    other = replace(REPORT, versions={"python": "3.11.7", "torch": "2.12.0"})
    assert lines(host("n1"), host("n2", other), host("n3")) == [
        "n2: torch 2.12.0, but n1, n3 have 2.13.0. Install the same packages on all hosts: titanrl doctor --install."
    ]


GIVEN = Examined(node="n1", report=REPORT, needs=NEEDS, clock_s=0.0, taken={"port 22222": "Address already in use"})


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (host("n2", replace(REPORT, versions={"python": "3.11.7"})), "n2: torch is not installed, but n1, n4 have 2.13.0."),
        (host("n3", replace(REPORT, versions={**REPORT.versions, "torchao": "1"})), "n3: torchao 1, but n1, n4 have none."),
        (host("n2", replace(REPORT, shares_runs=False)), "n2: output_dir is not shared with the controller"),
        (
            host("n2", replace(REPORT, devices=["A"]), replace(NEEDS, devices=8)),
            "n2: 1 accelerators, but generators need 8",
        ),
        (host("n2", replace(REPORT, shared_memory=None)), "n2: /dev/shm is not writable"),
        (
            host("n2", replace(REPORT, shared_memory=10), replace(NEEDS, shared_memory=20)),
            "n2: /dev/shm has 10 B",
        ),
        (replace(GIVEN, node="n2"), "n2: port 22222 cannot be opened: Address already in use."),
    ],
)
def test_host_that_differs_is_named(last: Examined, line: str) -> None:
    (found,) = lines(host("n1"), host("n4"), last)
    assert found.startswith(line)


def test_too_little_memory_is_named_with_its_limit() -> None:
    small = replace(REPORT, memory=500_000_000, limited_by="the memory limit of its cgroup")
    (line,) = lines(host("n1"), host("n2", small))
    assert line == (
        "n2: 500.0 MB of memory (the memory limit of its cgroup), but its roles (generators) need 1.0 GB. "
        "Raise the limit, use more hosts, or use a smaller model."
    )


def test_missing_and_different_models_are_named() -> None:
    other, none = replace(REPORT, files={"model.path": "d2"}), replace(REPORT, files={"model.path": MISSING})
    found = lines(host("n1"), host("n2", other), host("n3", none), host("n4"))
    assert found[0].startswith("n2: model.path differs from the other hosts.")
    assert found[1].startswith("n3: model.path is missing.")
    assert len(found) == 2


def test_model_that_no_host_has_is_missing_on_all() -> None:
    none = replace(REPORT, files={"model.path": MISSING})
    assert [line.partition(".")[0] for line in lines(host("n1", none), host("n2", none))] == ["n1: model", "n2: model"]


def test_closed_port_is_reported_once_for_all_sources() -> None:
    name = "port 22222 (hosts.slurm.port)"
    links = tuple(
        Link(source=source, target="n2", closed={name: "Connection refused"}, latency_s=1e-4, bytes_per_s=1e9)
        for source in ("n1", "n3")
    )
    assert lines(host("n1"), host("n2"), host("n3"), links=links) == [
        "n2: port 22222 (hosts.slurm.port) is closed for n1, n3 (Connection refused). "
        "Allow TCP between the hosts in the firewall."
    ]


def test_unreachable_host_must_open_all_ports() -> None:
    (line,) = lines(host("n1"), host("n2"), links=(Link(source="n1", target="n2", closed={CHOSEN: "no answer"}),))
    assert line == (
        "n2: its TCP ports are closed for n1 (no answer). Allow TCP between the hosts in the firewall on all ports."
    )


def test_clocks_and_slow_connections_are_warnings() -> None:
    links = tuple(
        Link(source=a, target=b, closed={}, latency_s=1e-4, bytes_per_s=1e8 if a == "n1" else 1e9)
        for a, b in (("n1", "n2"), ("n2", "n1"), ("n2", "n3"))
    )
    found = problems([host("n1"), host("n2", clock_s=-2.0)], links)
    assert [problem.level for problem in found] == ["warning", "warning"]
    assert str(found[0]).startswith("n1: 100.0 MB/s to n2, but the median is 1.0 GB/s.")
    assert str(found[1]).startswith("n2: its clock is 2.0 s behind the controller's.")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_rounds_pair_all_hosts_once_without_overlap(count: int) -> None:
    found = rounds(count)
    for pairs in found:
        taking_part = [number for pair in pairs for number in pair]
        assert len(taking_part) == len(set(taking_part))
    pairs = [pair for pairs in found for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(count) if a != b]


def needs(*overrides: str) -> list[Needs]:
    config = load_config("quickstart", ["device=cpu", "hosts.trusted_network=true", *overrides])
    return needs_of(config, derive(config, model_shape(config)), "cpu")


def test_one_machine_needs_everything() -> None:
    (alone,) = needs()
    assert alone.roles == "all"
    assert alone.memory > sum(LIBRARY_BYTES[role] for role in ("trainer", "generator", "controller"))


def test_one_machine_needs_accelerators_for_teachers_and_the_background_evaluator() -> None:
    for name, options, num in (
        ("distill_quickstart", ["distill.teacher.tp=2"], 4),
        ("quickstart", ["max_staleness=1", "evaluation.background=true"], 3),
    ):
        config = load_config(name, options)
        (alone,) = needs_of(config, derive(config, model_shape(config)), "cuda")
        assert alone.devices == num


def test_roles_of_a_launcher_are_spread() -> None:
    first, second, third = needs("hosts.kind=launcher", "hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2")
    assert (first.roles, second.roles, third.roles) == ("controller, trainer", "trainer", "rollout, generators")
    config = load_config("quickstart")
    assert first.memory - second.memory >= sum(LIBRARY_BYTES[role] for role in ("controller", "store"))
    workers = LIBRARY_BYTES["rollout"] * config.rollout.num_workers
    assert third.memory >= LIBRARY_BYTES["generator"] + config.generator.kv_cache_bytes + workers
    assert second.shared_memory > 0
    assert third.shared_memory == 2 * second.shared_memory  # two versions, which it receives whole


def test_generators_on_trainer_hosts_need_no_separate_host() -> None:
    (alone,) = needs("hosts.kind=launcher", "placement.generator=trainers")
    assert alone.roles == "controller, rollout, trainer, generators"
    first, second = needs(
        "hosts.kind=launcher", "hosts.trainer_hosts=2", "trainer.parallelism.dp_shard=2", "placement.generator=trainers"
    )
    assert (first.roles, second.roles) == ("controller, rollout, trainer, generators", "trainer")
    assert first.shared_memory == 2 * second.shared_memory  # it receives the other half
