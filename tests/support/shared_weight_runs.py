"""Runs of one process with one copy of the weights and with two, and faults in them.

``python -m tests.support.shared_weight_runs DIRECTORY SCENARIO ...`` plays each in a directory below.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from offbeat.config.loader import load_recipe
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.launch.session import Runtime, drive
from offbeat.local.hosted import Hosted
from offbeat.local.parts import Makers, make_rank, make_shared_engine
from offbeat.local.run import run_local
from offbeat.local.threads import WorkThread
from offbeat.telemetry.cpu_clocks import CpuClocks
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch import TorchTrainer

RECIPE: Final = Path(__file__).parents[2] / "recipes" / "deterministic.yaml"
SMALL: Final = (
    "steps=6",
    "groups_per_step=4",
    "samples_per_group=4",
    "runtime.backend=local",
    "wandb.mode=disabled",
    "checkpoint.interval=2",
    "checkpoint.final=false",
)
TWO_COPIES: Final[tuple[str, ...]] = ()
ONE_COPY: Final = ("generator.share_weights=true",)
TWO_ENGINES: Final = (*ONE_COPY, "generator.engines=2", "generator.deterministic=false")
FAULT_AT: Final = 4  # the step with the fault
SCENARIOS: Final = {
    "two-copies": (TWO_COPIES, ""),
    "one-copy": (ONE_COPY, ""),
    "two-engines": (TWO_ENGINES, ""),
    "two-copies-not-applied": (TWO_COPIES, "not_applied"),
    "one-copy-not-applied": (ONE_COPY, "not_applied"),
    "finish-raises": (ONE_COPY, "raises"),
    "finish-raises-two-engines": (TWO_ENGINES, "raises"),
    "killed": (ONE_COPY, "killed"),
}


class Watch:
    """Counts decode steps, and those that overlap a finish."""

    def __init__(self, log: Path) -> None:
        self._lock, self._log = threading.Lock(), log
        self._changing = self._decoding = self.steps = self.overlaps = 0

    @contextlib.contextmanager
    def decoding(self) -> Generator[None]:
        with self._lock:
            self.steps += 1
            self.overlaps += bool(self._changing)
            self._decoding += 1
        yield
        with self._lock:
            self._decoding -= 1

    @contextlib.contextmanager
    def changing(self) -> Generator[None]:
        with self._lock:
            self._changing += 1
            self.overlaps += bool(self._decoding)
        try:
            yield
        finally:
            with self._lock:
                self._changing -= 1

    def write(self) -> None:
        self._log.write_text(f"{self.steps} {self.overlaps}")


class Faults:
    """Makes the parts of a run, with one fault in its trainer, and watches the optimizer."""

    def __init__(self, fault: str, watch: Watch) -> None:
        self._fault, self._watch = fault, watch

    @property
    def makers(self) -> Makers:
        return Makers(rank=self.make_rank, shared_engine=self.make_engine)

    def make_rank(self, spec: TrainerSpec, cpu: CpuClocks, thread: WorkThread) -> TrainerRank:
        rank = make_rank(spec, cpu, thread)
        trainer: Any = vars(rank)["_split"]
        assert isinstance(trainer, TorchTrainer)
        apply: Any = vars(TorchTrainer)["_apply"]

        def apply_or_fail(denominator: float, rate: float) -> Any:
            fault, due = self._fault, trainer.steps_applied + 1 == FAULT_AT
            if due and fault == "not_applied":
                self._fault = ""
                for each in trainer.module.parameters():
                    each.grad = None if each.grad is None else torch.full_like(each, torch.nan)
            with self._watch.changing():
                result = apply(trainer, denominator, rate)
                if due and fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if due and fault == "raises":
                    self._fault = ""
                    raise ArithmeticError("planted behind the optimizer")
            return result

        vars(trainer)["_apply"] = apply_or_fail
        return rank

    def make_engine(
        self, spec: EngineSpec, trainer: Hosted[TrainerRank], cpu: CpuClocks, thread: WorkThread
    ) -> EngineServer:
        server = make_shared_engine(spec, trainer, cpu, thread)
        assert isinstance(server, EmbeddedEngineServer)
        engine: Any = vars(vars(server)["_engine"])["_engine"]
        step = engine.step

        def watched() -> Any:
            with self._watch.decoding():
                return step()

        engine.step = watched
        return server


def main(directory: Path, names: list[str]) -> None:
    for name in names:
        overrides, fault = SCENARIOS[name]
        watch = Watch(directory / f"{name}.steps")
        runtime = Runtime(partial(run_local, Faults(fault, watch).makers))
        loaded = load_recipe(RECIPE, [*SMALL, *overrides], dry_run=False)
        code = drive(runtime, loaded, directory / name, dry_run=False)
        watch.write()
        if code:
            sys.exit(f"{name} ended with {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
