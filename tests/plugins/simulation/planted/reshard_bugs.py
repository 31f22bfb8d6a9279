"""Bugs in how engines fetch a release from the trainer ranks that hold its buckets."""

from typing import Any, ClassVar

import msgspec
from planted.delta_bugs import plant_engines
from planted.planting import Planted, become

from offbeat.controller.syncing import WeightSync
from offbeat.messages.failures import WeightSyncFailed
from offbeat.plugins.reshard.fetch import BucketFetch
from offbeat.plugins.simulation.draws import EpisodePlan
from offbeat.plugins.simulation.engine import FakeEngine
from offbeat.plugins.simulation.fetch import SimulatedFetch
from offbeat.plugins.simulation.schedule import PlannedFault
from offbeat.plugins.simulation.source_layout import SourceLayout
from offbeat.plugins.simulation.source_ranks import SourceRanks
from offbeat.plugins.simulation.trainer import FakeTrainer

SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {
        "transport": "reshard",
        "delta": False,
        "interval": 1,
        "canary_interval": 0,
        "chunk_mib": 16.0,
        "slowest_mib_s": 1000.0,
        "slack_s": 0.75,
    }
}


def at_every_step(action: str, target: str = "") -> tuple[PlannedFault, ...]:
    return tuple(PlannedFault(action, target, at_step=step) for step in range(1, 8))


class PlantedFetch(Planted):
    """A bug in what the engines do with buckets, or in what the ranks send."""

    settings: ClassVar = SETTINGS
    machine: ClassVar[type[BucketFetch]] = BucketFetch
    fetch: ClassVar[type[SimulatedFetch]] = SimulatedFetch
    ranks: ClassVar[type[SourceRanks]] = SourceRanks

    def plant(self) -> None:
        bug = type(self)

        class Fetch(bug.fetch):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                become(self._fetch, bug.machine)

        class Engine(FakeEngine):
            fetch_class = Fetch

        class Trainer(FakeTrainer):
            ranks_class = bug.ranks

        plant_engines(self, Engine)
        port: dict[str, object] = vars(vars(self._sync)["_trainer_client"].trainer)
        become(port["_trainer"], Trainer)


class ABucketIsNotCompared(PlantedFetch):
    """Whatever arrives is loaded."""

    breaks = frozenset({"I7"})
    planned_faults = at_every_step("bucket_corrupted")

    class fetch(SimulatedFetch):  # noqa: N801
        def _took(self, sender: int, bucket: int, content: str) -> bool:
            if self._fetch.took(sender, bucket):
                self._got[bucket] = content
            return True


class TheTowerIsNoPartOfARelease(PlantedFetch):
    """An engine loads when it has the buckets of the language ranks, and asks no encoder rank."""

    breaks = frozenset({"I7"})
    layout: ClassVar = SourceLayout(2, 1, encoders=1)

    @classmethod
    def plan(cls, seed: int) -> EpisodePlan:
        return msgspec.structs.replace(super().plan(seed), source_layout=cls.layout)

    class machine(BucketFetch):  # noqa: N801
        def next(self) -> tuple[int, tuple[int, ...]] | None:
            encoder = TheTowerIsNoPartOfARelease.layout.language_ranks
            self._waiting.pop(encoder, None)
            return super().next()


class ARankThatHangsHasNoLimit(PlantedFetch):
    """Whoever does not end its connection is waited for, whether anybody waits for the fetch or not."""

    breaks = frozenset({"I9"})
    planned_faults = at_every_step("bucket_lost")

    class fetch(SimulatedFetch):  # noqa: N801
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._limit_s = 1e6

        def stop(self) -> None:
            """Go on."""


class CopiesAreNotCompared(PlantedFetch):
    """The digests of a release are those of the last rank that holds a bucket."""

    breaks = frozenset({"I7"})
    planned_faults = at_every_step("copies_diverge", "trainer")

    class ranks(SourceRanks):  # noqa: N801
        def _agreed(self, by_rank: list[dict[int, str]]) -> tuple[str, ...]:
            found = {bucket: digest for each in by_rank for bucket, digest in each.items()}
            return tuple(found[bucket] for bucket in range(len(found)))


class ARankSendsItsNewestReleaseInThePlaceOfAnother(PlantedFetch):
    """And the engine goes by the digests that it gets with the buckets."""

    breaks = frozenset({"I6", "I7"})
    planned_faults = (*at_every_step("engine_killed"), *at_every_step("bucket_late"))

    class ranks(SourceRanks):  # noqa: N801
        def refusal(self, rank: int, digest: str) -> str:
            del digest
            return super().refusal(rank, self._digest)

    fetch = ABucketIsNotCompared.fetch


class TheTrainerIsNotAskedBeforeAnEngineIsReplaced(PlantedFetch):
    """Engines that get nothing from a rank that hangs are replaced."""

    breaks = frozenset({"I17"})
    planned_faults = at_every_step("rank_frozen")[1::4]

    class Sync(WeightSync):
        async def sender_answers(self, name: str) -> bool:
            del name
            return True

    def plant(self) -> None:
        super().plant()
        become(self._sync, self.Sync)


class TheDeathOfARankIsTheEnginesFault(TheTrainerIsNotAskedBeforeAnEngineIsReplaced):
    """Engines that ask for a release which nobody sends any more are replaced."""

    planned_faults = at_every_step("rank_killed")

    class fetch(SimulatedFetch):  # noqa: N801
        def _failure(self, problem: str) -> Exception:
            return WeightSyncFailed(self._engine.name, self._epoch, self._release.version, problem)
