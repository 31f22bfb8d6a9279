"""Runs of one process with one copy of the weights and with two, and faults in them.

``python -m tests.support.shared_weight_runs DIRECTORY SCENARIO ...`` plays each in a directory below.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from offbeat.config.loader import load_recipe
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import EngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.launch.session import Runtime, drive
from offbeat.local.hosted import Hosted
from offbeat.local.parts import CpuClocks, Makers, make_rank, make_shared_engine
from offbeat.local.run import run_local
from offbeat.local.threads import WorkThread
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch import TorchTrainer
from tests.support.model_families import family_model

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
EXPERTS: Final[dict[str, tuple[str, ...]]] = {
    "Qwen3Moe": ("trainer.moe.load_balancing_coef=1.0", "trainer.optimizer.learning_rate=0.01"),
    # Its routers have a bias, a float32 buffer that a step changes without a gradient
    "DeepseekV3": ("trainer.moe.bias_update_rate=0.1", "model.dtype=bfloat16"),
}
"""Families of models with experts, and settings that change their weights without a reward."""


class Scenario(NamedTuple):
    """A run."""

    settings: tuple[str, ...]
    fault: str = ""
    family: str = ""  # of a random model; empty: the model of the recipe


SCENARIOS: Final = {
    "two-copies": Scenario(TWO_COPIES),
    "one-copy": Scenario(ONE_COPY),
    "two-engines": Scenario(TWO_ENGINES),
    "two-copies-not-applied": Scenario(TWO_COPIES, "not_applied"),
    "one-copy-not-applied": Scenario(ONE_COPY, "not_applied"),
    "finish-raises": Scenario(ONE_COPY, "raises"),
    "finish-raises-two-engines": Scenario(TWO_ENGINES, "raises"),
    "killed": Scenario(ONE_COPY, "killed"),
    **{
        f"{family}-{copies}": Scenario((*settings, *of_copies), family=family)
        for family, settings in EXPERTS.items()
        for copies, of_copies in (("two-copies", TWO_COPIES), ("one-copy", ONE_COPY))
    },
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
        updates: Any = trainer.updates
        step = updates.step

        def step_or_fail(denominator: float, rate: float) -> Any:
            fault, due = self._fault, trainer.steps_applied + 1 == FAULT_AT
            if due and fault == "not_applied":
                self._fault = ""
                for each in trainer.module.parameters():
                    each.grad = None if each.grad is None else torch.full_like(each, torch.nan)
            with self._watch.changing():
                result = step(denominator, rate)
                if due and fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if due and fault == "raises":
                    self._fault = ""
                    raise ArithmeticError("planted behind the optimizer")
            return result

        updates.step = step_or_fail
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


def save_model(family: str, path: Path) -> None:
    """Save a random model with the tokenizer of the recipe's model."""
    of_recipe = Path(load_recipe(RECIPE, []).config.model.path)
    vocabulary = json.loads((of_recipe / "config.json").read_text())["vocab_size"]
    family_model(family, vocab_size=vocabulary).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(of_recipe / name, path)


def main(directory: Path, names: list[str]) -> None:
    for name in names:
        settings, fault, family = SCENARIOS[name]
        if family:
            save_model(family, directory / f"model-{name}")
            path = directory / f"model-{name}"
            settings = (*settings, f"model.path={path}", "generator.max_model_len=128")
        watch = Watch(directory / f"{name}.steps")
        runtime = Runtime(partial(run_local, Faults(fault, watch).makers))
        loaded = load_recipe(RECIPE, [*SMALL, *settings], dry_run=False)
        code = drive(runtime, loaded, directory / name, dry_run=False).code
        watch.write()
        if code:
            sys.exit(f"{name} ended with {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
