"""A run reduced to its ledger, its engines' versions, and a staleness policy: no loop, no clock.

A ledger that keeps its own events, as a journal in memory would.
"""

from offbeat.controller.events import AnyEvent, DropReason, ReturnKind
from offbeat.controller.group_moves import Place
from offbeat.controller.ledger import GroupRecord, Ledger
from offbeat.controller.steps_after import steps_after
from offbeat.controller.view import LedgerView
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Receipt
from offbeat.sampler.checked_sampler import CheckedSampler, SamplerBroken
from offbeat.sampler.policy import Sampler, earliest_step


class RecordedLedger(Ledger):
    """A ledger whose rewinds find in the events so far what they undo."""

    def __init__(self) -> None:
        self.events = list[AnyEvent]()
        super().__init__(self.events.append)

    def rewound(self, to_version: int, reason: str = "rank_lost") -> list[int]:
        after = steps_after(to_version, reversed(self.events))
        return self.rewind(to_version, reason, after)


ENGINES = 2


class SamplerBench:
    """A run that does what a sampler says, and nothing else.

    Engines take new weights one by one, so ``serving_version`` is that of the slower one.
    """

    def __init__(self, sampler: Sampler, groups_per_step: int) -> None:
        self.sampler, self.groups_per_step = sampler, groups_per_step
        is_checked = isinstance(sampler, CheckedSampler)
        self._name = sampler.target if is_checked else type(sampler).__name__
        self.ledger = RecordedLedger()
        self.engines = [0] * ENGINES
        self.view = LedgerView(
            self.ledger,
            serving_version=lambda: self.serving_version,
            groups_needed=lambda: self.groups_needed,
        )
        self.staleness = list[int]()  # of every group claimed [weight versions]

    @property
    def trainer_version(self) -> int:
        return self.ledger.trainer_version

    @property
    def serving_version(self) -> int:
        return min(self.engines)

    @property
    def groups_needed(self) -> int:
        batch_deficits = self.ledger.batch_deficits.get(self.trainer_version + 1, 0)
        return self.groups_per_step - batch_deficits - len(self.ledger.training)

    # --- where groups are ------------------------------------------------------------------------

    def at(self, place: Place) -> list[GroupRecord]:
        return [group for group in self.ledger.groups.values() if group.place is place]

    @property
    def in_flight(self) -> list[GroupRecord]:
        return self.at(Place.IN_FLIGHT)

    def due(self) -> GroupRecord | None:
        """Return the waiting group that is first in turn, if its policy lets it go now."""
        waiting = sorted(
            (earliest_step(g.target_step), g.prompt_index) for g in self.at(Place.ADMITTED)
        )
        group = self.ledger.groups[waiting[0][1]] if waiting else None
        return group if group and self.sampler.may_dispatch(self.view, group) else None

    # --- moves -----------------------------------------------------------------------------------

    def admit(self, engine: int = 0) -> GroupRecord | None:
        """Draw a prompt and send it out, if the policy has room.

        Raises:
            SamplerBroken: It admits a group that it does not let go.
        """
        admission = self.sampler.admit(self.view)
        if admission is None:
            return None
        group = self.ledger.groups[self.ledger.admit(admission.target_step)]
        if not self.sampler.may_dispatch(self.view, group):
            got = f"returned False for group {group.prompt_index}, admitted just now"
            raise SamplerBroken(self._name, "may_dispatch", got, "True")
        self.dispatch(group, engine)
        return group

    def dispatch(self, group: GroupRecord, engine: int = 0) -> None:
        self.ledger.dispatch(group.prompt_index, f"generator-{engine}", self.engines[engine])

    def commit(self, group: GroupRecord, *, begun_late: bool = False) -> None:
        """Finish a group; ``begun_late``: it waited inside the engine until the last sync."""
        newest = max(group.oldest_version, self.engines[int(group.engine[-1])])
        oldest = newest if begun_late else group.oldest_version
        self.ledger.commit(receipt(group, oldest, newest))

    def claim(self) -> list[GroupRecord]:
        """Claim what the policy selects; with the last group the step is trained."""
        prompt_indices = self.sampler.select(self.view)
        claimed = (
            self.ledger.claim(prompt_indices, self.trainer_version + 1, 1) if prompt_indices else []
        )
        self.staleness += [self.trainer_version - group.oldest_version for group in claimed]
        if self.groups_needed <= 0 and self.ledger.training:
            self.ledger.applied(self.trainer_version + 1, 1)
        return claimed

    def stop(self) -> None:
        """End the step in progress with the groups that it has claimed."""
        self.ledger.applied(self.trainer_version + 1, 1)

    def drop(self, group: GroupRecord, step: int = 0) -> None:
        """Give a prompt up; ``step`` goes without it, 0: a fresh one takes its place."""
        self.ledger.drop(group.prompt_index, DropReason.DATA, "reward_raised", shrinks=step)

    def evict(self) -> None:
        for prompt_index in self.sampler.stale(self.view):
            self.ledger.evict(prompt_index, "stale")

    def cancel(self, prompt_indices: list[int]) -> None:
        for prompt_index in prompt_indices:
            self.ledger.retry(prompt_index, ReturnKind.CANCELLED, "stale")

    def serve(self, engine: int) -> None:
        self.engines[engine] = self.trainer_version

    def rewind(self, to_version: int) -> None:
        """Lose the trainer: groups in flight are cancelled, engines get the old weights."""
        self.cancel([group.prompt_index for group in self.in_flight])
        self.ledger.rewound(to_version)
        self.engines = [to_version] * ENGINES

    def round(self) -> list[GroupRecord]:
        """Let everything happen that can without a failure; return what was claimed."""
        for engine in range(ENGINES):
            self.serve(engine)
        self.evict()
        while group := self.due():
            self.dispatch(group)
        room = self.sampler.max_outstanding_groups
        while self.view.outstanding < room and self.admit():
            pass
        for group in self.in_flight:
            self.commit(group)
        return self.claim()


def receipt(group: GroupRecord, oldest: int, newest: int) -> Receipt:
    """Return a receipt of one sample: its first token of the one version, its last of the other."""
    return make_receipt(
        group.prompt_index,
        group.attempt,
        (((oldest, 1), (newest, 1)),),
        engine=group.engine,
        rewards=(1.0,),
    )


def step_of(group: GroupRecord, run: SamplerBench, max_staleness: int) -> int:
    """Return the step that can go without a waiting group while every other one keeps its place."""
    if group.target_step is not None:
        return max(group.target_step, run.trainer_version + 1)
    return max(run.trainer_version, run.serving_version + max_staleness) + 1
