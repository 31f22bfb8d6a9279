"""The controller's own speed: no-op ports, a real event loop, a real journal on a real disk.

    python -m benchmarks.controller [--quick] [--runs N] [--profile]

Three questions: how many prompt groups a second go through admission, commit, claim, train and
clear, and what the journal takes of it; whether a group costs more when 100,000 are buffered than
when 100 are; whether bounds hold with a thousand and ten thousand engines.

Medians over the runs, lowest and highest beside them; cases that are compared are run in turn. ``us``
is time of the clock, ``cpu`` that of all threads of the process. The first steps do not count, nor
do the last ones, which need no new groups.
"""

import argparse
import asyncio
import cProfile
import logging
import os
import pstats
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from benchmarks.noop_ports import (
    SAMPLES,
    NoJournal,
    NoopRollouts,
    StepClock,
    names,
)
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.journal import open_journal
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import Journal, NoPayloads, NoTrace, Ports
from offbeat.fakes.instant_ports import InstantEngine, InstantTrainer
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.fences import Fence
from offbeat.sampler.build import build_sampler


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration to run."""

    sampler: str = "ready_first"
    max_staleness: int = 1
    groups_per_step: int = 64
    steps: int = 300
    warm: int = 20  # first steps, not measured
    engines: int = 4
    journal: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one run, without its first and last steps."""

    us_per_group: float
    cpu_us_per_group: float
    peak_in_flight: int
    max_outstanding_groups: int
    evicted: int
    buffered: float  # mean of the groups outstanding, while it was measured


@dataclass(frozen=True, slots=True)
class _Step:
    """The end of one."""

    at_s: float
    cpu_s: float
    outstanding: int


async def _run(case: Case, journal: Journal, ledger: Ledger) -> Measured:
    config = RunConfig.model_validate(
        {
            "steps": case.steps,
            "groups_per_step": case.groups_per_step,
            "samples_per_group": SAMPLES,
            "model": {"path": "none"},
            "sampler": {"name": case.sampler, "max_staleness": case.max_staleness},
            "buffer": {"capacity_mib": 1e9},
            "checkpoint": {"final": False, "interval": 0},
        }
    )
    generators = {name: InstantEngine(name) for name in names(case.engines)}
    rollouts, ends = NoopRollouts(generators), list[_Step]()

    def note(_: Mapping[str, float]) -> None:
        ends.append(_Step(time.perf_counter(), time.process_time(), ledger.outstanding))

    policy = build_sampler(config.sampler, config.groups_per_step)
    controller = Controller(
        config,
        Fence("bench", 1),
        Ports(
            prompts=FakePrompts(),
            rollouts=rollouts,
            generators=generators,
            trainer=InstantTrainer(),
            journal=journal,
            telemetry=StepClock(note),
            trace=NoTrace(),
            payloads=NoPayloads(),
        ),
        sampler=policy,
        advantages=lambda rewards, _valid: rewards,
        loss=LossSpec(),
        max_group_bytes=1,
        rng=random.Random(0),
        ledger=ledger,
    )
    await controller.run()
    last = max(
        case.warm + 1, case.steps - policy.max_outstanding_groups // case.groups_per_step - 1
    )
    first, end = ends[case.warm], ends[last]
    groups = (last - case.warm) * case.groups_per_step
    return Measured(
        us_per_group=(end.at_s - first.at_s) / groups * 1e6,
        cpu_us_per_group=(end.cpu_s - first.cpu_s) / groups * 1e6,
        peak_in_flight=rollouts.peak_in_flight,
        max_outstanding_groups=policy.max_outstanding_groups,
        evicted=ledger.totals.evicted,
        buffered=statistics.fmean(each.outstanding for each in ends[case.warm : last]),
    )


async def _run_in(case: Case, directory: Path) -> Measured:
    if not case.journal:
        return await _run(case, NoJournal(), Ledger())
    ledger, file = open_journal(
        directory / "journal",
        partial(asyncio.get_running_loop().run_in_executor, None),
        snapshot_records=20_000,
    )
    try:
        return await _run(case, file, ledger)
    finally:
        file.close()


def measure(case: Case) -> Measured:
    """Measure one run, with a journal of its own."""
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        return runner.run(_run_in(case, Path(directory)))


def measure_in_turn(cases: Sequence[Case], runs: int) -> list[list[Measured]]:
    """``runs`` runs of each case, in the order of the cases; never two of one case in a row."""
    rounds = [[measure(case) for case in cases] for _ in range(runs)]
    return [list(of_case) for of_case in zip(*rounds, strict=True)]


# --- the three questions -------------------------------------------------------------------------


def throughput(runs: int, base: Case) -> None:
    """Groups a second, with the journal and without."""
    on, off = measure_in_turn([base, replace(base, journal=False)], runs)
    for name, measured in (("with the journal", on), ("without", off)):
        print(f"{name:18s} {_groups_per_s(measured)}   {_cost(measured)}")
    share = 1 - _median([m.cpu_us_per_group for m in off]) / _median(
        [m.cpu_us_per_group for m in on]
    )
    print(f"the journal takes {share:.1%} of the CPU time\n")


def buffered(runs: int, few: Case, many: Case) -> None:
    """Cost of a group by how many are outstanding, for each policy."""
    for name in ("ready_first", "windowed", "weight_fifo"):
        cases = [replace(few, sampler=name), replace(many, sampler=name)]
        small, large = measure_in_turn(cases, runs)
        ratio = _cpu(large) / _cpu(small)
        for measured in (small, large):
            print(f"{name:12s} {measured[0].buffered:9,.0f} buffered   {_cost(measured)}")
        print(f"{'':12s} ratio of the medians, CPU: {ratio:.2f}")
    print()


def engines(runs: int, counts: Sequence[int]) -> None:
    """Measure with as many groups per step as engines, so that every engine has work."""
    for count in counts:
        case = Case(groups_per_step=count, engines=count, steps=12, warm=3)
        (measured,) = measure_in_turn([case], runs)
        peak, evicted = max(m.peak_in_flight for m in measured), sum(m.evicted for m in measured)
        print(
            f"{count:6,} engines: at most {peak:,} of {measured[0].max_outstanding_groups:,} in flight, "
            f"{evicted} evicted   {_cost(measured)}"
        )


def profile(case: Case) -> None:
    """Print the most expensive functions, by time in the function itself."""
    profiler = cProfile.Profile()
    profiler.enable()
    measure(case)
    profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(15)


# --- printing ------------------------------------------------------------------------------------


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _cpu(measured: Sequence[Measured]) -> float:
    return _median([m.cpu_us_per_group for m in measured])


def _groups_per_s(measured: Sequence[Measured]) -> str:
    rates = [1e6 / m.us_per_group for m in measured]
    return f"{_median(rates):7,.0f} groups/s ({min(rates):,.0f} to {max(rates):,.0f})"


def _cost(measured: Sequence[Measured]) -> str:
    took = [m.us_per_group for m in measured]
    return f"{_median(took):6.1f} us ({min(took):.1f} to {max(took):.1f}), cpu {_cpu(measured):6.1f} us a group"


def main() -> None:
    """Answer the three questions, or profile the first."""
    parser = argparse.ArgumentParser(description="The controller's own speed.")
    parser.add_argument("--runs", type=int, default=3, help="of each case; the median is printed")
    parser.add_argument("--quick", action="store_true", help="small sizes, one run: does it work")
    parser.add_argument("--profile", action="store_true", help="what costs most, by cProfile")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    quick, runs = arguments.quick, 1 if arguments.quick else arguments.runs
    base = Case(steps=60) if quick else Case()
    if arguments.profile:
        profile(base)
        return
    print(f"{runs} runs of each, load {os.getloadavg()[0]:.1f} at the start\n")
    throughput(runs, base)
    few = Case(groups_per_step=50, steps=600, warm=100)
    many = Case(groups_per_step=50, steps=2600, warm=100, max_staleness=1999)
    if quick:
        few = replace(few, steps=60, warm=20)
        many = replace(many, steps=300, warm=20, max_staleness=199)
    buffered(runs, few, many)
    engines(runs, (100,) if quick else (1_000, 10_000))
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
