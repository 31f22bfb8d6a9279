"""Costs of a run over all incarnations: processes replaced, time spent. Pure.

It is folded from the journal, so a killed controller loses nothing that was recorded.
"""

from collections.abc import Mapping
from typing import Final

import msgspec

from offbeat.controller.events import (
    Event,
    Joined,
    Retired,
    RewardCallsMade,
    Spent,
    WorkerLost,
)
from offbeat.messages.failures import Component
from offbeat.telemetry.time_accounting import serving_shares, verdict

_FORMER_KEPT: Final = 64  # former processes of workers whose calls are remembered one by one


class RunCosts(msgspec.Struct):
    """Fold of a journal's cost events. Its size does not grow with the run."""

    processes: dict[str, str] = {}
    """Incarnation of each present engine, worker and trainer that answered last."""
    restarts: dict[Component, int] = {}
    """Processes that took the place of a lost one, by component; the trainer's ranks are one."""
    trainer_s: dict[str, float] = {}
    """Seconds of the trainer by ``TrainerTime``, over all steps."""
    engine_s: dict[str, float] = {}
    """Seconds of all engines by ``GeneratorTime``, over all steps."""
    generate_s: float = 0.0
    """Time of a group in its engine, a mean of each step, summed."""
    reward_s: float = 0.0
    """Time in environment and reward."""
    syncs: int = 0
    """Weight syncs that an engine took."""
    retired: dict[str, str] = {}
    """Engines retired since the run was last started or resumed, with the last failure of each."""
    reward_calls: int = 0
    """Calls of reward functions, over all workers and incarnations."""
    reward_calls_of: dict[str, int] = {}
    """Calls of each process of a worker since the run was last started or resumed.

    Of replaced processes only those that reported last are kept: a report of one may be late.
    """
    worker_losses: int = 0
    """How often an environment worker was lost, whether it came back or not."""
    lost_workers: dict[str, str] = {}
    """Workers that were lost and have not answered since, with the reason for each."""

    def take(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Joined():
                before = self.processes.get(event.name)
                if before is not None and before != event.incarnation:
                    self.restarts[event.component] = self.restarts.get(event.component, 0) + 1
                self.processes[event.name] = event.incarnation
                self.lost_workers.pop(event.name, None)
            case WorkerLost():
                self.worker_losses += 1
                self.lost_workers[event.worker] = event.reason
            case Retired():
                self.retired[event.engine] = event.reason
            case Spent():
                add(self.trainer_s, event.trainer)
                add(self.engine_s, event.engines)
                self.generate_s += event.generate_s
                self.reward_s += event.reward_s
                self.syncs += event.syncs
            case RewardCallsMade():
                self.reward_calls += event.calls - self.reward_calls_of.pop(event.process, 0)
                self.reward_calls_of[event.process] = event.calls  # last: in the order of reports
                if len(self.reward_calls_of) > _FORMER_KEPT + 2 * len(self.processes):
                    self._forget_former()
            case _:
                pass

    def _forget_former(self) -> None:
        """Forget the calls of processes that were replaced long ago; they stay counted."""
        present = set(self.processes.values())
        former = [each for each in self.reward_calls_of if each not in present]
        for each in former[:-_FORMER_KEPT]:
            del self.reward_calls_of[each]

    def forget_processes(self) -> None:
        """Forget all processes, because all actors are new.

        None of them replaces one, and no engine is retired. What they have cost stays counted.
        """
        self.processes, self.retired, self.reward_calls_of = {}, {}, {}
        self.lost_workers = {}

    def is_new(self, name: str, incarnation: str) -> bool:
        """Return whether this process did not answer last under this name, or was lost since."""
        return self.processes.get(name) != incarnation or name in self.lost_workers

    def is_unseen_loss(self, name: str, incarnation: str) -> bool:
        """Return whether this process replaces one whose loss nobody has noticed."""
        before = self.processes.get(name)
        return before not in {None, incarnation} and name not in self.lost_workers

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the shares of trainer and engines without their starts; each sums to 1."""
        return serving_shares(self.trainer_s, self.engine_s)

    def verdict(self) -> str:
        """Return the bottleneck of the run."""
        trainer, engines = self.shares()
        return verdict(trainer, engines, generate_s=self.generate_s, reward_s=self.reward_s)


def add(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Add seconds by category to a total."""
    for category, value in seconds.items():
        total[category] = total.get(category, 0.0) + value
