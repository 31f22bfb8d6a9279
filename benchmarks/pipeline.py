"""Measures how much of a cluster the real controller keeps busy.

A virtual clock, ports that take time.

    python -m benchmarks.pipeline [--quick] [--limits] [--seeds 0,1,2] [--jobs N]

**Efficiency** is ``ideal / wall`` of steps 11 to 110. ``wall`` is the time between the ends of step
10 and step 110. ``ideal`` is the time that the busier side would take for the same work if it never
waited for the other::

    trainer     steps * (compute of a step + making a release)
    generation  decoding time of the groups trained in these steps / slots of all engines
                + steps * taking a release
    ideal       max(trainer, generation)

Both sides count their share of a weight sync as work, since neither trains nor decodes meanwhile.
Whatever was decoded and not trained, because a policy discarded it, counts as lost. 1 is out of
reach: the other side would have to have groups, or room, at every moment.

**Work**: steps of 64 groups; each group holds one slot of one of four engines for a log-normal time
(sigma 0.8, mean 0.31 s) that is cut at 1.1 s, twice the time of a step. A step is 0.5 s of compute,
nine tenths of it spread over its groups, which are sent as they come; a release takes the trainer 0.05 s and each
engine 0.05 s; a message 1 ms, the journal's fsync 2 ms. Generation-bound is 20 slots, balanced 40,
training-bound 80: decoding the groups of a step then takes 1.0, 0.5 and 0.25 s.
"""

import argparse
import asyncio
import logging
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from statistics import NormalDist
from typing import Any, Final

import structlog

from benchmarks.noop_ports import SAMPLES, StepClock, names
from benchmarks.timed_ports import Costs, TimedEngine, TimedJournal, TimedRollouts, TimedTrainer
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import NoPayloads, NoTrace, Ports
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.fences import Fence
from offbeat.plugins.simulation.loop import VirtualLoop
from offbeat.sampler.build import build_sampler
from offbeat.telemetry.time_accounting import TrainerTime

COSTS: Final = Costs()
GROUPS: Final = 64  # of a step
ENGINES: Final = 4
SLOTS: Final = {"generation-bound": 20, "balanced": 40, "training-bound": 80}  # over all engines
SIGMA: Final = 0.8
MEAN_S: Final = COSTS.step_s * SLOTS["balanced"] / GROUPS
LONGEST_S: Final = 2 * (COSTS.step_s + COSTS.publish_s)
FIRST, LAST = 10, 110  # the ends of these steps are the ends of what is measured


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the table."""

    load: str = "balanced"
    max_staleness: int = 2
    sync: str = "keep"
    sampler: str = "ready_first"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    max_in_flight: int | None = None
    costs: Costs = COSTS
    sigma: float = SIGMA
    longest_s: float = LONGEST_S


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps 11 to 110 of one run. Shares are of the time of the trainer, or of all slots."""

    efficiency: float
    step_s: float
    staleness: float  # mean over the groups trained, of their oldest token
    trainer: dict[str, float]
    decoding: float
    loading: float
    lost: float  # decoded and never trained, of all decoded
    length: float  # mean length of the groups trained, over the mean of all


@dataclass(frozen=True, slots=True)
class _Point:
    """The counters at the end of a step."""

    at_s: float
    trainer_s: dict[str, float]
    decoded_s: float
    loads: int


async def _run(case: Case, seed: int) -> Measured:
    costs = case.costs
    engines = {
        name: TimedEngine(name, SLOTS[case.load] // ENGINES, costs) for name in names(ENGINES)
    }
    trainer, points = TimedTrainer(GROUPS, costs), list[_Point]()
    staleness = list[float]()

    def note(metrics: Mapping[str, float]) -> None:
        points.append(
            _Point(
                asyncio.get_running_loop().time(),
                controller.state.observer.times.trainer_seconds(),
                sum(engine.decoded_s for engine in engines.values()),
                sum(engine.loads for engine in engines.values()),
            )
        )
        staleness.append(metrics["off_policy/staleness_mean"])

    def length_s(prompt_index: int) -> float:
        return _length_s(seed, prompt_index, case)

    config = _config(case)
    controller = Controller(
        config,
        Fence("bench", 1),
        Ports(
            prompts=FakePrompts(),
            rollouts=TimedRollouts(engines, length_s, costs),
            generators=engines,
            trainer=trainer,
            journal=TimedJournal(costs),
            telemetry=StepClock(note),
            trace=NoTrace(),
            payloads=NoPayloads(),
        ),
        sampler=build_sampler(config.sampler, GROUPS),
        advantages=lambda rewards, _valid: rewards,
        loss=LossSpec(),
        max_group_bytes=1,
        rng=random.Random(seed),
        ledger=Ledger(),
    )
    await controller.run()
    first, last, steps = points[FIRST - 1], points[LAST - 1], LAST - FIRST
    wall_s, slots = last.at_s - first.at_s, SLOTS[case.load]
    trained = [length_s(o) for o in chain.from_iterable(trainer.trained[FIRST:LAST])]
    training_s = steps * (costs.step_s + costs.publish_s)
    generation_s = sum(trained) / slots + steps * costs.load_s * costs.load_stops
    decoded_s = last.decoded_s - first.decoded_s
    return Measured(
        efficiency=max(training_s, generation_s) / wall_s,
        step_s=wall_s / steps,
        staleness=statistics.fmean(staleness[FIRST:LAST]),
        trainer={
            name: (spent_s - first.trainer_s.get(name, 0.0)) / wall_s
            for name, spent_s in last.trainer_s.items()
        },
        decoding=decoded_s / (slots * wall_s),
        loading=(last.loads - first.loads) / ENGINES * costs.load_s / wall_s,
        lost=1 - sum(trained) / decoded_s,
        length=statistics.fmean(trained) / MEAN_S,
    )


def _config(case: Case) -> RunConfig:
    ahead = case.max_staleness + 2  # the last steps need no new groups, and are not measured
    return RunConfig.model_validate(
        {
            "steps": LAST + ahead,
            "groups_per_step": GROUPS,
            "samples_per_group": SAMPLES,
            "model": {"path": "none"},
            "sampler": {
                "name": case.sampler,
                "max_staleness": case.max_staleness,
                **case.options,
            },
            "sync": {"mode": case.sync},
            "rollout": {"max_in_flight": case.max_in_flight},
            "buffer": {"capacity_mib": 1e9},
            "trainer": {"min_tokens_per_chunk": 1},
            "checkpoint": {"final": False, "interval": 0},
        }
    )


# --- lengths -------------------------------------------------------------------------------------


def _length_s(seed: int, prompt_index: int, case: Case) -> float:
    dice, mu = random.Random(f"{seed}/{prompt_index}"), log_median_s(case.sigma, case.longest_s)
    return min(case.longest_s, dice.lognormvariate(mu, case.sigma))


@cache
def log_median_s(sigma: float, longest_s: float) -> float:
    """Log of the median of the log-normal for which the mean, after the cut, is ``MEAN_S``.

    By bisection.
    """
    low, high = math.log(MEAN_S) - 3, math.log(MEAN_S) + 3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_s(middle, sigma, longest_s) < MEAN_S else (low, middle)
    return low


def _mean_s(mu: float, sigma: float, longest_s: float) -> float:
    """Mean of ``min(longest_s, log-normal)``."""
    below, cut = NormalDist().cdf, (math.log(longest_s) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * below(cut - sigma) + longest_s * (1 - below(cut))


# --- the table -----------------------------------------------------------------------------------


def measure(case: Case, seed: int) -> Measured:
    """Measure one run, the same each time."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    loop = VirtualLoop(random.Random(seed), max_events=100_000_000, max_s=1e6)
    try:
        return loop.run_until_complete(loop.create_task(_run(case, seed)))
    finally:
        loop.close()


def cases(*, quick: bool) -> list[Case]:
    """Return the curve of ``ready_first``, then the other policies with balanced sides."""
    if quick:
        return [Case(max_staleness=staleness) for staleness in (0, 2)]
    curve = [
        Case(load, staleness, sync)
        for load, sync, staleness in product(SLOTS, ("drain", "keep"), (0, 1, 2, 4))
    ]
    short_queue = [
        Case(load, staleness, sync, max_in_flight=SLOTS[load])
        for load, sync, staleness in product(("balanced",), ("drain", "keep"), (1, 2, 4))
    ]
    others = [
        Case(sampler="in_order"),
        Case(sampler="weight_fifo"),
        Case(sampler="windowed", options={"over_sampling_ratio": 1.5}),
        Case(
            sampler="windowed",
            options={"over_sampling_ratio": 1.5},
            max_in_flight=SLOTS["balanced"],
        ),
    ]
    return curve + short_queue + others


def limits() -> dict[str, Case]:
    """Balanced at staleness 2, with one thing after the other made better."""
    free_sync = replace(COSTS, publish_s=0.0, load_s=0.0)
    free_calls = replace(COSTS, call_s=0.0, barrier_s=0.0)
    return {
        "as it is": Case(),
        "in flight: as many as slots": Case(max_in_flight=SLOTS["balanced"]),
        "longest 0.9 s": Case(longest_s=0.9),
        "longest 0.7 s": Case(longest_s=0.7),
        "longest 2.2 s": Case(longest_s=2.2),
        "syncs cost nothing": Case(costs=free_sync),
        "messages, fsync cost nothing": Case(costs=free_calls),
        "staleness 3": Case(max_staleness=3),
    }


def _row(case: Case, runs: Sequence[Measured]) -> str:
    efficiency = [run.efficiency for run in runs]
    median = sorted(runs, key=lambda run: run.efficiency)[len(runs) // 2]
    trainer = median.trainer
    compute = trainer.get(TrainerTime.COMPUTE, 0.0)
    waits = [
        trainer.get(category, 0.0)
        for category in (
            TrainerTime.SYNC,
            TrainerTime.WAITING_GROUPS,
            TrainerTime.WAITING_WEIGHTS,
        )
    ]
    shares = [compute, *waits, 1 - compute - sum(waits), median.decoding, median.loading]
    shares.append(1 - median.decoding - median.loading)
    return (
        f"{case.load:16s} {case.sampler:11s} {case.sync:5s} {case.max_staleness:9d} "
        f"{case.max_in_flight or 'all':>9} {statistics.median(efficiency):6.3f} "
        f"{min(efficiency):6.3f} {max(efficiency):6.3f} {median.step_s:6.3f} "
        f"{median.staleness:5.2f} "
        + " ".join(f"{share:7.1%}" for share in shares)
        + f" {median.lost:6.1%} {median.length:6.3f}"
    )


_HEAD: Final = (
    "load             sampler     sync  staleness in flight median lowest   high step_s  mean"
    " compute publish  groups weights    else  decode    load    idle   lost length"
)


def main() -> None:
    """Print one line a case: efficiency, then where trainer and slots of the median run were."""
    parser = argparse.ArgumentParser(description="How busy the controller keeps a cluster.")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="processes; the figures are the same")
    parser.add_argument("--quick", action="store_true", help="two cases, one seed: does it work")
    parser.add_argument(
        "--limits", action="store_true", help="what costs efficiency, balanced at 2"
    )
    arguments = parser.parse_args()
    seeds = [0] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    table = cases(quick=arguments.quick)
    notes = [""] * len(table)
    if arguments.limits:
        notes, table = zip(*limits().items(), strict=True)
    print(_HEAD)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        runs = [[pool.submit(measure, case, seed) for seed in seeds] for case in table]
        for case, of_case, note in zip(table, runs, notes, strict=True):
            print(_row(case, [run.result() for run in of_case]), note, flush=True)


if __name__ == "__main__":
    main()
