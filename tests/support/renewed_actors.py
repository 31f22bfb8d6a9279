"""Actors that tests share, each as new: a contract has many tests, and a process costs seconds."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from offbeat.actors.call import Handle
from offbeat.actors.engine_actor import StubEngineActor
from offbeat.actors.environment_worker_actor import EnvironmentActor
from offbeat.actors.trainer_actor import StubTrainerActor
from tests.support.holding_engines import HoldingEngine


class Renewed:
    """An actor of a run directory, which is made again in its process."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec)  # pyright: ignore[reportCallIssue] -- the actor's, behind this class
        self._made_of = spec

    def renew(self) -> None:
        """Be made again, in a directory that is empty again."""
        spec = self._made_of
        shutil.rmtree(spec.run_dir, ignore_errors=True)
        Path(spec.run_dir).mkdir(exist_ok=True)
        vars(self).clear()
        type(self).__init__(self, spec)


class RenewedTrainer(Renewed, StubTrainerActor): ...


class RenewedEngine(Renewed, StubEngineActor): ...


class RenewedHoldingEngine(HoldingEngine, RenewedEngine): ...


class RenewedWorker(Renewed, EnvironmentActor): ...


class SharedActors:
    """The actors of one test after another. Where one of them has died, all are made anew."""

    def __init__(self, make: Callable[[int], Sequence[Handle]]) -> None:
        """``make`` gets a number of its own for names."""
        self._make = make
        self._made = 0
        self._actors: Sequence[Handle] = ()

    def renewed(self) -> Sequence[Handle]:
        """Return actors that nobody has spoken to."""
        try:
            ray.get([each.renew.remote() for each in self._actors])
        except RayActorError:
            self.kill()
        if not self._actors:
            self._made += 1
            self._actors = self._make(self._made)
        return self._actors

    def kill(self) -> None:
        for each in self._actors:
            ray.kill(each)
        self._actors = ()
