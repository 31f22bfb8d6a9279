"""The controller's own speed: no-op ports, a real event loop, a real journal on a real disk.

    python -m benchmarks.controller

Three questions: how many prompt groups a second go through admission, commit, claim, train and
clear; whether a group costs more when 100,000 are buffered than when 100 are; whether bounds hold
with a thousand and ten thousand engines.
"""

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from benchmarks.noop_ports import (
    SAMPLES,
    NoopGenerator,
    NoopPrompts,
    NoopRollouts,
    NoopTrainer,
    StepClock,
    names,
)
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.journal import open_journal
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import Journal, NoPayloads, NoTrace, Ports
from offbeat.messages.fences import Fence
from offbeat.messages.training import LossSpec
from offbeat.sampler.build import build_sampler


class NoJournal:
    def append(self, event: object) -> None: ...
    async def barrier(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, without its first steps."""

    us_per_group: float
    peak_in_flight: int
    reach: int
    evicted: int
    ready: float  # mean buffered while it was measured


async def go(
    sampler: dict[str, Any],
    *,
    gps: int,
    steps: int,
    engines: int,
    warm: int,
    journal: Journal,
    ledger: Ledger | None = None,
) -> Measured:
    config = RunConfig.model_validate(
        {
            "steps": steps,
            "groups_per_step": gps,
            "samples_per_group": SAMPLES,
            "model": {"path": "none"},
            "sampler": sampler,
            "buffer": {"capacity_mb": 1e9},
            "checkpoint": {"final": False, "interval": 0},
        }
    )
    generators = {name: NoopGenerator(name) for name in names(engines)}
    rollouts, clock = NoopRollouts(generators), StepClock()
    policy = build_sampler(config.sampler, config.groups_per_step)
    controller = Controller(
        config,
        Fence("bench", 1),
        Ports(
            prompts=NoopPrompts(),
            rollouts=rollouts,
            generators=generators,
            trainer=NoopTrainer(),
            journal=journal,
            telemetry=clock,
            trace=NoTrace(),
            payloads=NoPayloads(),
        ),
        sampler=policy,
        advantages=lambda rewards: rewards,
        loss=LossSpec(),
        max_group_bytes=1,
        rng=random.Random(0),
        ledger=ledger,
    )
    buffered = list[int]()
    emit = clock.emit

    def note(step: int, version: int, metrics: Any) -> None:
        emit(step, version, metrics)
        buffered.append(controller.state.ledger.outstanding)

    clock.emit = note  # type: ignore[method-assign]
    await controller.run()
    # The last steps need no new groups: only full pipelines are compared.
    last = max(warm + 1, steps - policy.reach // gps - 1)
    took = clock.at[last] - clock.at[warm]
    return Measured(
        us_per_group=took / ((last - warm) * gps) * 1e6,
        peak_in_flight=rollouts.peak_in_flight,
        reach=policy.reach,
        evicted=controller.state.ledger.totals.evicted,
        ready=statistics.fmean(buffered[warm:last]),
    )


def run(
    sampler: dict[str, Any], *, journal: bool = True, repeat: int = 3, **sizes: int
) -> Measured:
    """Median of several runs by cost per group."""
    runs = list[Measured]()
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
            runs.append(runner.run(_with_journal(sampler, Path(directory), journal, sizes)))
    return sorted(runs, key=lambda each: each.us_per_group)[len(runs) // 2]


async def _with_journal(
    sampler: dict[str, Any], directory: Path, journal: bool, sizes: dict[str, int]
) -> Measured:
    if not journal:
        return await go(sampler, journal=NoJournal(), **sizes)
    ledger, file = open_journal(
        directory / "journal",
        partial(asyncio.get_running_loop().run_in_executor, None),
        snapshot_records=20_000,
    )
    try:
        return await go(sampler, journal=file, ledger=ledger, **sizes)
    finally:
        file.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))

    base = {"gps": 64, "steps": 300, "engines": 4, "warm": 20, "repeat": repeat}
    first = {"name": "ready_first", "max_staleness": 1}
    on, off = run(first, **base), run(first, journal=False, **base)
    print(f"groups/s, ready_first, 64 a step        {1e6 / on.us_per_group:10,.0f}")
    print(f"  without the journal                   {1e6 / off.us_per_group:10,.0f}")

    for name in ("ready_first", "windowed", "weight_fifo"):
        small = run({"name": name, "max_staleness": 1}, gps=50, steps=600, engines=4, warm=100, repeat=repeat)  # fmt: skip
        large = run({"name": name, "max_staleness": 1999}, gps=50, steps=2600, engines=4, warm=100, repeat=1)  # fmt: skip
        print(
            f"us a group, {name:12s} {small.ready:9,.0f} buffered {small.us_per_group:8.1f}"
            f"   {large.ready:9,.0f} buffered {large.us_per_group:8.1f}"
            f"   ratio {large.us_per_group / small.us_per_group:.2f}"
        )

    for engines in (1_000, 10_000):
        sizes = {"gps": engines, "steps": 12, "engines": engines, "warm": 3, "repeat": 1}
        many = run(first, **sizes)
        print(
            f"{engines:6,} engines: peak in flight {many.peak_in_flight:,} of {many.reach:,}, "
            f"evicted {many.evicted}, {many.us_per_group:.1f} us a group"
        )


if __name__ == "__main__":
    main()
