"""Checks that healthy engines continue to work while a machine's loss is not known yet: I24."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.plugins.simulation import records
from offbeat.plugins.simulation.audit_workers import LASTING
from offbeat.plugins.simulation.audit_world import AuditTable, Findings
from offbeat.plugins.simulation.faults import MACHINES, POISON

_SLACK_S: Final = 20.0
"""Seconds that a run may be quiet beyond the time until an engine is given up."""
_SLOWEST_SIGMAS: Final = 5.0
"""Standard deviations of the slowest rollout from the median. The trainer may wait for it."""
_SLOWEST_STEP: Final = 1.5
"""Longest time of the simulated trainer's pass over a step, as a multiple of ``stub.step_s``."""
_OTHERS_S: Final = 150.0
"""Seconds for which another fault may explain a quiet run: more than the longest deadline."""
_WORK: Final = (
    records.CheckpointWritten,
    records.EngineServes,
    records.Generated,
    records.ReleasePublished,
    records.Scored,
    records.TrainerApplied,
    records.TrainerRestored,
)


class Survivors(AuditTable):
    """Finds spells in which nobody works although only one machine, without the trainer, is lost.

    It skips spells that another fault may explain. It also skips machines with columns that the
    trainer may be waiting for, because their loss is known only with the verdict on their machine.
    """

    def __init__(
        self, config: RunConfig, history: Sequence[records.WorldRecord], findings: Findings
    ) -> None:
        super().__init__(findings)
        self._records = history
        generator, stub = config.generator, config.stub
        self._engines = {f"generator-{index}" for index in range(generator.engines)}
        self._workers = {each.worker for each in history if isinstance(each, records.WorkerStarted)}
        passes = LossSpec.of(config).epochs + 1  # the first pass runs while groups arrive
        self._quiet_s = (
            generator.probe_interval_s
            + generator.probe_strikes * generator.probe_deadline_s
            + max(
                _SLACK_S,
                stub.median_rollout_s * math.exp(_SLOWEST_SIGMAS * stub.tail_sigma),
                _SLOWEST_STEP * passes * stub.step_s,  # engines may wait for its weights
            )
        )
        ends = [each.at for each in history if isinstance(each, records.Ended)]
        self._ended_at = ends[0] if ends else 0.0

    def check(self) -> None:
        """Check each loss of a machine to which the rule applies."""
        for lost, end in self.find_eligible():
            gone = set(lost.actors)
            times = [each.at for each in self._records if self._is_work(each, gone)]
            seen = [lost.at, *(at for at in times if lost.at < at < end), end]
            since, until = max(pairwise(seen), key=lambda spell: spell[1] - spell[0])
            if until - since > self._quiet_s:
                self._findings.current = lost
                self._add(
                    "I24",
                    f"nobody worked from {since:.1f} to {until:.1f} s; {lost.machine} was lost at "
                    f"{lost.at:.1f} s with {', '.join(lost.actors)}, the others were well",
                )

    def find_eligible(self) -> Iterator[tuple[records.MachineLost, float]]:
        """Yield each loss that lasts long enough for the rule, and the time when it was known."""
        for lost, given_up_at in self._losses():
            end = min(given_up_at, self._ended_at)
            if end - lost.at > self._quiet_s and self._is_alone(lost, end):
                yield lost, end

    def _losses(self) -> Iterator[tuple[records.MachineLost, float]]:
        """Yield each lost machine, and the time when the loss was known."""
        open_ = dict[str, records.MachineLost]()
        for record in self._records:
            if isinstance(record, records.MachineLost):
                lost = open_.pop(record.machine, None)
                if lost is None:
                    open_[record.machine] = record
                else:
                    yield lost, record.at
        for lost in open_.values():
            yield lost, self._ended_at

    def _is_alone(self, lost: records.MachineLost, end: float) -> bool:
        """Return whether all needed actors are healthy, and no other fault explains a silence."""
        gone = set(lost.actors)
        if "trainer" in gone or not (self._engines - gone and self._workers - gone):
            return False
        if self._holds_columns(lost):
            return False
        faults = [
            each for each in self._records if isinstance(each, records.Fault) and each.at < end
        ]
        others = [each for each in faults if each.kind not in MACHINES or each.at != lost.at]
        lasting = LASTING.union(POISON)
        return not any(each.kind in lasting or each.at > lost.at - _OTHERS_S for each in others)

    def _holds_columns(self, lost: records.MachineLost) -> bool:
        """Return whether the machine had columns of a group that was not trained yet."""
        held = set[tuple[int, int]]()
        for record in self._records:
            if record is lost:
                break
            if isinstance(record, records.Generated) and record.machine == lost.machine:
                held.add((record.prompt_index, record.attempt))
            elif isinstance(record, records.TrainerApplied):
                held.difference_update(zip(record.prompt_indices, record.attempts, strict=True))
        return bool(held)

    @staticmethod
    def _is_work(record: records.WorldRecord, gone: set[str]) -> bool:
        """Return whether the record shows work of an actor that is not lost."""
        if isinstance(record, records.Generated | records.Scored | records.EngineServes):
            return record.engine not in gone
        return isinstance(record, _WORK)
