"""Measures the growth with the length of a run.

Memory and disk of the controller, and the time to restart.

    python -m benchmarks.growth [--steps N] [--groups-per-step N] [--ledger-only | --everything] [--directory DIR]

The whole controller on no-op ports, a real event loop and a real journal, without checkpoints: the
trainer could only start over, so every step could still be undone. ``--ledger-only`` makes the same
moves on ledger and journal without the pumps, several times as fast; ``--everything`` writes metrics,
trace and an evaluation every 250 steps, too, into the directory above the journal. Resident memory and the bytes of
the journal are printed at 1 %, 2 %, 5 %, 10 % and each further tenth of the run; then what a new
process needs to take over from that journal, to find the steps that a rewind to the initial model
undoes, and to give their groups back.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import structlog

from benchmarks.noop_ports import (
    NoopRollouts,
    StepClock,
    names,
    receipt,
)
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.controller.journal import FileJournal, open_journal
from offbeat.controller.ledger import Ledger
from offbeat.controller.ports import NoEvaluationLog, NoPayloads, NoTrace, Ports
from offbeat.controller.recovery import GROUPS_PER_TURN
from offbeat.fakes.instant_ports import InstantEngine, InstantTrainer
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.fences import Fence
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.messages.weights import WeightsAck
from offbeat.sampler.build import build_sampler
from offbeat.telemetry.evaluation_files import EvaluationFiles
from offbeat.telemetry.hub import JsonlSink, Telemetry
from offbeat.telemetry.step_samples import StepSamples
from offbeat.telemetry.trace import TRACE_FILE, TraceFile

SAMPLES = 2
ENGINES = 2
STEPS_PER_BARRIER = 50  # a run has two barriers a step, which takes the time of two fsyncs


EVALUATION_STEPS = 250


def run_config(steps: int, groups_per_step: int, *, evaluates: bool = False) -> RunConfig:
    """A run without checkpoints."""
    return RunConfig.model_validate(
        {
            "steps": steps,
            "groups_per_step": groups_per_step,
            "samples_per_group": SAMPLES,
            "model": {"path": "none"},
            "sampler": {"name": "ready_first", "max_staleness": 1},
            "buffer": {"capacity_mib": 1e9},
            "checkpoint": {"final": False, "interval": 0},
            "eval": {"interval": EVALUATION_STEPS * evaluates, "prompts": 4, "samples": SAMPLES},
            "generator": {"backend": "stub", "engines": ENGINES},
        }
    )


def opened(directory: Path, snapshot_records: int = 20_000) -> tuple[Ledger, FileJournal]:
    """Open the journal as a new incarnation of the controller does; call on an event loop."""
    in_thread = partial(asyncio.get_running_loop().run_in_executor, None)
    return open_journal(directory, in_thread, snapshot_records=snapshot_records, unix_s=time.time)


class Growth:
    """Prints memory and disk at some of the steps."""

    def __init__(self, steps: int, groups_per_step: int, directory: Path) -> None:
        self._groups_per_step, self._directory = groups_per_step, directory
        self._marks = {steps * percent // 100 for percent in (1, 2, 5, *range(10, 101, 10))}
        self._done, self._began_s = 0, time.perf_counter()
        self._cpu_s, self._counted = time.process_time(), 0  # at the last line

    def step(self, _: Mapping[str, float] | None = None) -> None:
        """Count one more."""
        self._done += 1
        if self._done not in self._marks:
            return
        events, snapshots = journal_bytes(self._directory)
        groups = self._done * self._groups_per_step
        print(
            f"step {self._done:9,}  {groups:11,} groups  {resident_mib():7.1f} MiB resident  "
            f"segments {events / 2**20:8.1f} MiB ({events / groups:.0f} B a group)  "
            f"beside them {snapshots / 2**20:6.1f} MiB  {time.perf_counter() - self._began_s:7.0f} s  "
            f"{self._cpu_per_step_us():5.0f} us of CPU a step  {descriptors()} descriptors",
            flush=True,
        )

    def _cpu_per_step_us(self) -> float:
        """CPU of the process for each step since the last line."""
        cpu_s, steps = time.process_time() - self._cpu_s, self._done - self._counted
        self._cpu_s, self._counted = time.process_time(), self._done
        return 1e6 * cpu_s / steps


class Written:
    """What a run writes beside its journal; telemetry that counts the steps."""

    def __init__(self, run_dir: Path, growth: Growth) -> None:
        self._telemetry = Telemetry([JsonlSink(run_dir / "metrics.jsonl")])
        self.trace = TraceFile(run_dir / TRACE_FILE, asyncio.get_running_loop().time)
        self.scores = EvaluationFiles(run_dir)
        self._run_dir, self._growth = run_dir, growth
        self._telemetry.start()
        self.trace.start()

    def emit(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        samples: Callable[[], StepSamples] | None = None,
    ) -> None:
        self._telemetry.emit(step, version, metrics, samples)
        if "eval/version" not in metrics:
            self._growth.step()

    def close(self) -> None:
        """Write the rest, and print what there is of each."""
        self.scores.close()
        self._telemetry.close(60)
        self.trace.close(60)
        for path in sorted(self._run_dir.iterdir()):
            files = [path] if path.is_file() else list(path.iterdir())
            nbytes = sum(each.stat().st_size for each in files)
            print(f"{path.name}: {nbytes / 2**20:,.1f} MiB in {len(files):,} files")


async def run_everything(config: RunConfig, directory: Path, growth: Growth) -> None:
    """Train to the end, and write what a run writes."""
    written = Written(directory.parent, growth)
    try:
        await run(config, directory, written)
    finally:
        written.close()


async def run_ledger(config: RunConfig, directory: Path, growth: Growth) -> None:
    """The moves of such a run on ledger and journal alone."""
    ledger, journal = opened(directory)
    ledger.open("growth", 1)
    for step in range(1, config.steps + 1):
        version = step - 1
        for _ in range(config.groups_per_step):
            prompt_index = ledger.admit(None)
            attempt = ledger.dispatch(prompt_index, "generator-0", version)
            prompt = Prompt(prompt_index, 0, prompt_index, {})
            task = RolloutTask(prompt, attempt, SAMPLES, "generator-0", 0, 1.0)
            ledger.commit(receipt(task, ((version, 512),)))
        ledger.claim(list(ledger.ready), step, step)
        ledger.intend(step, step)
        ledger.applied(step, step)
        digest = f"digest-{step}"
        ledger.released(step, digest)
        for name in names(ENGINES):
            ledger.served(WeightsAck(name, "incarnation", step, step, digest, 0.0, 0.0))
        if step % STEPS_PER_BARRIER == 0:
            await journal.barrier()
        growth.step()
    journal.close()


async def run(
    config: RunConfig,
    directory: Path,
    telemetry: StepClock | Written,
    snapshot_records: int = 20_000,
) -> None:
    """Train to the end; ``telemetry`` sees every step."""
    ledger, journal = opened(directory, snapshot_records)
    generators = {name: InstantEngine(name) for name in names(ENGINES)}
    controller = Controller(
        config,
        Fence("growth", 1),
        Ports(
            prompts=FakePrompts(),
            rollouts=NoopRollouts(generators),
            generators=generators,
            trainer=InstantTrainer(),
            journal=journal,
            telemetry=telemetry,
            trace=telemetry.trace if isinstance(telemetry, Written) else NoTrace(),
            payloads=NoPayloads(),
            evaluation={"": FakePrompts()} if config.eval.interval else {},
            scores=telemetry.scores if isinstance(telemetry, Written) else NoEvaluationLog(),
        ),
        sampler=build_sampler(config.sampler, config.groups_per_step),
        advantages=lambda rewards, _valid: rewards,
        loss=LossSpec(),
        max_group_bytes=1,
        rng=random.Random(0),
        ledger=ledger,
    )
    try:
        await controller.run()
    finally:
        journal.close()


def resident_mib() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def descriptors() -> int:
    """Open files and sockets of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def journal_bytes(directory: Path) -> tuple[int, int]:
    """Bytes of its segments, and of what stands beside them: snapshots and aggregates."""
    sizes = {"events": 0, "snapshot": 0, "aggregates": 0}
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a snapshot was just renamed
            sizes[path.name.partition("-")[0]] += path.stat().st_size
    return sizes["events"], sizes["snapshot"] + sizes["aggregates"]


def grow(
    steps: int, groups_per_step: int, directory: Path, *, ledger_only: bool, everything: bool
) -> None:
    """Print memory and disk while the run goes on."""
    growth = Growth(steps, groups_per_step, directory)
    config = run_config(steps, groups_per_step, evaluates=everything)
    if ledger_only:
        asyncio.run(run_ledger(config, directory, growth))
    elif everything:
        asyncio.run(run_everything(config, directory, growth))
    else:
        asyncio.run(run(config, directory, StepClock(growth.step)))


async def _take_over(directory: Path) -> None:
    before = resident_mib()
    began_s = time.perf_counter()
    ledger, journal = opened(directory)
    took_s = time.perf_counter() - began_s
    print(
        f"a new controller: {took_s:.2f} s to read the journal, {resident_mib() - before:.0f} MiB; "
        f"{ledger.trainer_version:,} steps, {journal.stats.totals.samples:,} samples so far",
        flush=True,
    )
    began_s = time.perf_counter()
    after = await journal.steps_after(0)
    took_s = time.perf_counter() - began_s
    print(
        f"the steps that a rewind to the initial model undoes: {len(after.undone):,} in {took_s:.1f} s, "
        f"{resident_mib() - before:.0f} MiB",
        flush=True,
    )
    turns_s = list[float]()
    parts = ledger.rewind_in_parts(0, "measured", after, groups_per_part=GROUPS_PER_TURN)
    began_s = time.perf_counter()
    while next(parts, None) is not None:
        turns_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(0)
        began_s = time.perf_counter()
    print(
        f"that rewind: {ledger.outstanding:,} groups given back in {len(turns_s):,} turns of the event "
        f"loop, {sum(turns_s):.2f} s; the longest {1e3 * max(turns_s, default=0):.0f} ms; "
        f"{resident_mib() - before:.0f} MiB",
        flush=True,
    )
    journal.close()


def main() -> None:
    """Let a run grow, then take over from it in a new process."""
    parser = argparse.ArgumentParser(description="What grows with the length of a run.")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--groups-per-step", type=int, default=10)
    parser.add_argument("--ledger-only", action="store_true", help="no pumps: a longer run")
    parser.add_argument("--everything", action="store_true", help="metrics, trace, evaluations")
    parser.add_argument("--directory", type=Path, help="of the journal; default: a temporary one")
    parser.add_argument(
        "--take-over", action="store_true", help="only this, of an existing journal"
    )
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if arguments.take_over:
        asyncio.run(_take_over(arguments.directory))
        return
    print(f"load {os.getloadavg()[0]:.1f} at the start", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.directory or Path(temporary) / "journal"
        grow(
            arguments.steps,
            arguments.groups_per_step,
            directory,
            ledger_only=arguments.ledger_only,
            everything=arguments.everything,
        )
        again = [sys.executable, "-m", "benchmarks.growth", "--take-over", "--directory", directory]
        subprocess.run(again, check=True)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
