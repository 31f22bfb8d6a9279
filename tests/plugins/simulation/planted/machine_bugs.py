"""Bugs around the death of a machine: who is blamed, and what is rolled out again."""

from collections.abc import Mapping
from typing import Any, ClassVar

from planted.planting import EVERY, Planted, become

from offbeat.controller.errors import TrainerLost
from offbeat.controller.recovery import Recovery
from offbeat.controller.waits import Waits
from offbeat.messages.failures import PayloadLost

DEEP = {
    "sampler": {"name": "ready_first", "max_staleness": 3},
    "filters": {"zero_variance": False},
    "checkpoint": {"interval": 1},
    **EVERY,
}


class ALostPayloadIsBlamedOnTheTrainer(Planted):
    breaks = frozenset({"I17"})
    profile = "machines"
    settings: ClassVar[Mapping[str, Any]] = DEEP

    class Blaming(Recovery):
        async def payloads_lost(self, failure: PayloadLost) -> None:
            raise TrainerLost("microbatch", str(failure))

    def plant(self) -> None:
        become(self._recovery, self.Blaming)


class OneLossHasAllReadyGroupsRolledOutAgain(Planted):
    breaks = frozenset({"I17"})
    profile = "machines"
    settings: ClassVar[Mapping[str, Any]] = DEEP

    class Wasteful(Recovery):
        async def payloads_lost(self, failure: PayloadLost) -> None:
            self._rollouts.lost(list(self._state.ledger.ready), failure)

    def plant(self) -> None:
        become(self._recovery, self.Wasteful)


class WhatIsInTheSpoolIsRolledOutAgain(Planted):
    breaks = frozenset({"I17"})
    profile = "machines"
    settings: ClassVar[Mapping[str, Any]] = DEEP

    class Forgetful(Recovery):
        async def payloads_lost(self, failure: PayloadLost) -> None:
            self._rollouts.lost(failure.prompt_indices, failure)

    def plant(self) -> None:
        become(self._recovery, self.Forgetful)


class TheOthersWaitForTheEngineOfALostMachine(Planted):
    """A sync, and the groups of an engine, wait for a reply that never comes, until Ray says so."""

    breaks = frozenset({"I24"})
    profile = "machines"
    settings: ClassVar[Mapping[str, Any]] = {"filters": {"zero_variance": False}, **EVERY}

    class Patient(Waits):
        def give_up(self, engine: str, reason: str) -> None:
            pass

    def plant(self) -> None:
        become(self.state.waits, self.Patient)
