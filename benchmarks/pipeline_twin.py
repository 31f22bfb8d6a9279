"""Compares the virtual clock of ``benchmarks.pipeline`` with real actors at some of its points.

    python -m benchmarks.pipeline_twin [--staleness 0,2]

The real command on the actors of stub backends, and the same run on the virtual clock; steps 11 to
110 of both. A stub engine has no slots and goes on decoding while it takes weights, and its trainer
makes a release for nothing. So on both sides 40 groups are in flight at most, lengths are not cut,
and a sync stops nobody. The lengths are drawn from one distribution (sigma 0.8, and 0.5, with which
few groups take longer than two steps), but not the same ones.
"""

import argparse
import math
import os
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

from benchmarks.noop_ports import SAMPLES
from benchmarks.pipeline import (
    COSTS,
    ENGINES,
    FIRST,
    GROUPS,
    LAST,
    SIGMA,
    SLOTS,
    Case,
    log_median_s,
    measure,
)
from benchmarks.stub_runs import run
from offbeat.telemetry.time_accounting import TrainerTime

_UNCUT_S: Final = 1e6
_IN_FLIGHT: Final = SLOTS["balanced"]


def real(staleness: int, sigma: float) -> tuple[float, float]:
    """Seconds a step, and the trainer's share of time without groups, of a run on real actors."""
    settings = (
        f"steps={LAST + staleness + 2}",
        f"groups_per_step={GROUPS}",
        f"samples_per_group={SAMPLES}",
        f"sampler.max_staleness={staleness}",
        f"rollout.max_in_flight={_IN_FLIGHT}",
        f"generator.engines={ENGINES}",
        f"stub.median_rollout_s={math.exp(log_median_s(sigma, _UNCUT_S))}",
        f"stub.tail_sigma={sigma}",
        f"stub.step_s={COSTS.step_s}",
        f"stub.sync_s={COSTS.load_s}",
        "trainer.min_tokens_per_chunk=1",
    )
    with tempfile.TemporaryDirectory() as scratch:
        done = run(Path(scratch), settings)
    measured = done.steps[FIRST:LAST]
    wall_s = measured[-1].time_s - done.steps[FIRST - 1].time_s
    return wall_s / len(measured), done.summary.trainer_waits.get(TrainerTime.WAITING_GROUPS, 0.0)


def main() -> None:
    """Print one line a point."""
    parser = argparse.ArgumentParser(description="The pipeline on real actors and its twin.")
    parser.add_argument("--staleness", default="0,2", help="comma-separated")
    costs = replace(COSTS, publish_s=0.0, load_stops=False)
    bounds = map(int, parser.parse_args().staleness.split(","))
    for staleness, sigma in product(bounds, (SIGMA, 0.5)):
        case = Case(
            max_staleness=staleness,
            max_in_flight=_IN_FLIGHT,
            costs=costs,
            sigma=sigma,
            longest_s=_UNCUT_S,
        )
        runs = sorted((measure(case, seed) for seed in range(5)), key=lambda each: each.step_s)
        step_s, waits = real(staleness, sigma)
        twin = runs[2]
        print(
            f"staleness {staleness}, sigma {sigma}: real {step_s:.3f} s a step, efficiency "
            f"{COSTS.step_s / step_s:.3f}, trainer without groups {waits:.1%}; twin "
            f"{twin.step_s:.3f} s ({runs[0].step_s:.3f} to {runs[-1].step_s:.3f}), efficiency "
            f"{twin.efficiency:.3f}, without groups "
            f"{twin.trainer.get(TrainerTime.WAITING_GROUPS, 0.0):.1%}; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
