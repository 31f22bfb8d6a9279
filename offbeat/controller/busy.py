"""Who was busy and who waited for what: every moment of trainer and engines is attributed.

What the controller sees is attributed by ``TimeAccount``; how long an actor really computed is its
own word. So the time of an open call splits into compute and calls, and the time in which an engine
had groups out into compute and episodes: environment, reward, transport.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

from offbeat.controller.fleet import Engine, Health
from offbeat.telemetry.time_accounting import (
    GeneratorTime,
    TimeAccount,
    TrainerTime,
    added,
    fractions,
)


class Busy:
    """Time accounts of the trainer and of every engine, since their creation."""

    def __init__(self, clock: Callable[[], float], engines: Mapping[str, Engine]) -> None:
        self._trainer = TimeAccount(clock, TrainerTime.STARTING)
        self._engines = {name: TimeAccount(clock, GeneratorTime.STARTING) for name in engines}
        self._fleet = engines
        self._trainer_compute_s = 0.0
        self._paused_s = 0.0
        self._calls = 0
        self._idle: TrainerTime = TrainerTime.STARTING

    # --- the trainer -----------------------------------------------------------------------------

    def trainer_waits(self, category: TrainerTime) -> None:
        """What the trainer waits for while no call to it is open."""
        self._idle = category
        if not self._calls:
            self._trainer.switch(category)

    def call_opened(self) -> None:
        self._calls += 1
        self._trainer.switch(TrainerTime.COMPUTE)

    def call_answered(self) -> None:
        self._calls -= 1
        if not self._calls:
            self._trainer.switch(self._idle)

    def computed(self, compute_s: float) -> None:
        """The trainer says how long it computed in a step."""
        self._trainer_compute_s += compute_s

    @contextmanager
    def saving(self) -> Generator[None, None, None]:
        """The trainer writes a checkpoint while the block runs."""
        with self._trainer.spending(TrainerTime.CHECKPOINT):
            yield

    def trainer_seconds(self) -> dict[str, float]:
        seconds = self._trainer.seconds()
        open_s = seconds.get(TrainerTime.COMPUTE, 0.0)
        compute_s = min(open_s, self._trainer_compute_s)
        return {
            **seconds,
            TrainerTime.COMPUTE: compute_s,
            TrainerTime.CALLS: open_s - compute_s,
        }

    # --- engines ---------------------------------------------------------------------------------

    def engine_changed(self, engine: Engine) -> None:
        """Its health or its number of outstanding groups changed."""
        if engine.outstanding:
            category = GeneratorTime.COMPUTE
        elif engine.health is Health.HEALTHY:
            category = GeneratorTime.WAITING_GATE
        else:
            category = GeneratorTime.STARTING
        account = self._engines[engine.name]
        if account.category != category:
            account.switch(category)

    def paused(self, pause_s: float) -> None:
        """An engine says how long it stood still for a weight sync."""
        self._paused_s += pause_s

    def engine_seconds(self) -> dict[str, float]:
        """Of all engines together."""
        seconds = added(account.seconds() for account in self._engines.values())
        out_s = seconds.get(GeneratorTime.COMPUTE, 0.0)
        compute_s = min(out_s, sum(engine.busy_s for engine in self._fleet.values()))
        paused_s = min(out_s - compute_s, self._paused_s)
        return {
            **seconds,
            GeneratorTime.COMPUTE: compute_s,
            GeneratorTime.SYNC: paused_s,
            GeneratorTime.EPISODES: out_s - compute_s - paused_s,
        }

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of trainer and engines, since the first weights were served; each sums to 1."""
        trainer, engines = self.trainer_seconds(), self.engine_seconds()
        trainer.pop(TrainerTime.STARTING, None)
        engines.pop(GeneratorTime.STARTING, None)
        return fractions(trainer), fractions(engines)
