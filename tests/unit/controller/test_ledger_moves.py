"""The ledger under any moves: nothing is lost, nothing counts twice, the journal is the state."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offbeat.controller.events import AnyEvent, DropReason, ReturnKind
from offbeat.controller.group_table import TableSnapshot
from offbeat.controller.ledger import CannotRewind, IllegalMove, Ledger, steps_after
from offbeat.messages.weights import WeightsAck
from tests.support.ledger_model import indices, receipt, recount, state_of

PICK = st.integers(0, 9)
"""Picks a group for which a move is legal; 8 any living one, 9 one that ended or was never drawn."""

ENDED = ("trained", "dropped")
_EVENTS = msgspec.msgpack.Decoder(AnyEvent)


class LedgerMoves(RuleBasedStateMachine):
    """Any move on any prompt index at any time: it happens where it is legal, else it raises.

    The model is a place for each prompt index, and what each version was made of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events = list[AnyEvent]()
        self.ledger = Ledger(self._record)
        self.snapshot: tuple[int, bytes] | None = None  # events before it; encoded
        self.stamping = False
        self.place = list[str]()  # of each prompt index
        self.newest = dict[int, int]()  # version of the newest token, of what is ready or training
        self.made_of = dict[int, list[int]]()  # prompt indices trained, by version
        self.batch_deficits = Counter[int]()
        self.went_without = dict[int, int]()  # groups that the step of a version went without
        self.dropped, self.retried = Counter[str](), Counter[str]()
        self.evicted = self.failed_prompts = self.failed_prompts_infrastructure = 0
        self.lineage = self.forgotten = 0
        self.checkpoints = list[int]()

    @initialize(stamping=st.booleans())
    def choose_a_sampler(self, stamping: bool) -> None:
        """One that binds each group to a step, or one that binds none."""
        self.stamping = stamping

    def _record(self, event: AnyEvent) -> None:
        """The very moment of an event: it reads back, and the ledger is in order."""
        self.events.append(_EVENTS.decode(msgspec.msgpack.encode(event)))
        assert self.events[-1] == event
        assert indices(self.ledger) == recount(self.ledger)

    # --- helpers ---------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self.ledger.trainer_version + 1

    def _all(self, place: str) -> list[int]:
        return [prompt_index for prompt_index, at in enumerate(self.place) if at == place]

    def _picked(self, pick: int, *places: str) -> int:
        fit = [o for o, at in enumerate(self.place) if pick < 8 and at in places]
        living = [o for o, at in enumerate(self.place) if pick < 9 and at not in ENDED]
        ended = [o for o, at in enumerate(self.place) if at in ENDED]
        among = fit or living or ended or [len(self.place)]
        return among[pick % len(among)]

    def _is_at(self, prompt_index: int, *places: str) -> bool:
        return prompt_index < len(self.place) and self.place[prompt_index] in places

    def _expect(self, move: Callable[[], object], *, legal: bool) -> bool:
        """The move is made, or raises and changes nothing."""
        if legal:
            move()
            return True
        before, recorded = state_of(self.ledger), len(self.events)
        with pytest.raises((IllegalMove, CannotRewind)):
            move()
        assert state_of(self.ledger) == before
        assert len(self.events) == recorded
        return False

    # --- rollouts --------------------------------------------------------------------------------

    @precondition(lambda self: len(self.ledger.groups) < 8)
    @rule(ahead=st.integers(0, 2))
    def admit(self, ahead: int) -> None:
        target_step = self.step + ahead if self.stamping else None
        assert self.ledger.admit(target_step) == len(self.place)
        self.place.append("admitted")

    @rule(pick=PICK, version=st.integers(0, 3))
    def dispatch(self, pick: int, version: int) -> None:
        prompt_index = self._picked(pick, "admitted")
        if self._expect(
            lambda: self.ledger.dispatch(prompt_index, "generator-0", version),
            legal=self._is_at(prompt_index, "admitted"),
        ):
            self.place[prompt_index] = "in_flight"

    @rule(newest_first=st.booleans())
    def dispatch_all(self, newest_first: bool) -> None:
        for prompt_index in sorted(self._all("admitted"), reverse=newest_first):
            self.ledger.dispatch(prompt_index, "generator-0", self.ledger.trainer_version)
            self.place[prompt_index] = "in_flight"

    @rule(pick=PICK, kind=st.sampled_from(ReturnKind))
    def retry(self, pick: int, kind: ReturnKind) -> None:
        prompt_index = self._picked(pick, "in_flight")
        if self._expect(
            lambda: self.ledger.retry(prompt_index, kind, "engine_lost"),
            legal=kind is not ReturnKind.EVICTED and self._is_at(prompt_index, "in_flight"),
        ):
            self.place[prompt_index] = "admitted"
            self.retried["engine_lost"] += 1

    @rule(
        pick=PICK, late=st.sampled_from([0, 0, 0, 1]), more=st.integers(0, 2),
        tokens=st.integers(1, 5),
    )  # fmt: skip
    def commit(self, pick: int, late: int, more: int, tokens: int) -> None:
        """``late``: the answer is of an attempt before the last one."""
        prompt_index = self._picked(pick, "in_flight")
        group = self.ledger.groups.get(prompt_index)
        attempt = group.attempt - late if group else 1
        version = group.oldest_version + more if group else 0
        if self._expect(
            lambda: self.ledger.commit(receipt(prompt_index, attempt, version, tokens)),
            legal=self._is_at(prompt_index, "in_flight") and not late,
        ):
            self.place[prompt_index], self.newest[prompt_index] = "ready", version + 1

    @rule(groups=st.integers(1, 3), behind=st.integers(0, 2))
    def roll_out(self, groups: int, behind: int) -> None:
        """What single rules would take long to do."""
        while len(self.ledger.groups) < 8 and groups:
            self.admit(0)
            groups -= 1
        for prompt_index in self._all("admitted"):
            version = max(0, self.ledger.trainer_version - behind)
            attempt = self.ledger.dispatch(prompt_index, "generator-0", version)
            self.ledger.commit(receipt(prompt_index, attempt, version))
            self.place[prompt_index], self.newest[prompt_index] = "ready", version + 1

    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        prompt_index = self._picked(pick, "ready")
        if self._expect(
            lambda: self.ledger.evict(prompt_index, "stale"),
            legal=self._is_at(prompt_index, "ready"),
        ):
            self.place[prompt_index] = "admitted"
            self.evicted += 1

    @rule(pick=PICK)
    def recover(self, pick: int) -> None:
        prompt_index = self._picked(pick, "in_flight", "ready")
        if self._expect(
            lambda: self.ledger.recover(prompt_index, "payload_gone"),
            legal=self._is_at(prompt_index, "in_flight", "ready"),
        ):
            self.place[prompt_index] = "admitted"
            self.retried["payload_gone"] += 1

    @rule(pick=PICK, shrink=st.booleans(), reason=st.sampled_from(DropReason))
    def drop(self, pick: int, shrink: bool, reason: DropReason) -> None:
        prompt_index = self._picked(pick, "admitted", "in_flight", "ready")
        step = self._stamp(prompt_index) if self.stamping else self.step
        shrinks = step if shrink else 0
        if self._expect(
            lambda: self.ledger.drop(prompt_index, reason, "reward_nan", shrinks=shrinks),
            legal=self._is_at(prompt_index, "admitted", "in_flight", "ready"),
        ):
            self.place[prompt_index] = "dropped"
            self.dropped["reward_nan"] += 1
            self.failed_prompts += reason is DropReason.DATA
            self.failed_prompts_infrastructure += reason is DropReason.INFRASTRUCTURE
            self.batch_deficits[step] += shrink

    # --- steps -----------------------------------------------------------------------------------

    @rule(picks=st.lists(PICK, max_size=3))
    def claim(self, picks: list[int]) -> None:
        """Also groups that are not ready, and the same one twice."""
        prompt_indices = [self._picked(pick, "ready") for pick in picks]
        if self.stamping and any(
            self._stamp(prompt_index) != self.step for prompt_index in prompt_indices
        ):
            return  # no sampler selects them
        ready = all(self._is_at(prompt_index, "ready") for prompt_index in prompt_indices)
        if self._expect(
            lambda: self.ledger.claim(prompt_indices, self.step, 1),
            legal=ready and len(set(prompt_indices)) == len(prompt_indices),
        ):
            for prompt_index in prompt_indices:
                self.place[prompt_index] = "training"

    def _stamp(self, prompt_index: int) -> int:
        group = self.ledger.groups.get(prompt_index)
        return self.step if group is None or group.target_step is None else group.target_step

    @rule()
    def claim_all(self) -> None:
        due = [o for o in self.ledger.ready if not self.stamping or self._stamp(o) == self.step]
        before = list(self.ledger.training)
        assert [group.prompt_index for group in self.ledger.claim(due, self.step, 1)] == due
        assert list(self.ledger.training) == before + due
        for prompt_index in due:
            self.place[prompt_index] = "training"

    @rule()
    def unclaim(self) -> None:
        claimed, waiting = list(self.ledger.training), list(self.ledger.ready)
        self.ledger.unclaim(self.step, 1)
        assert list(self.ledger.ready) == waiting + claimed
        assert self.ledger.intent is None
        for prompt_index in claimed:
            self.place[prompt_index] = "ready"

    @rule(attempt=st.integers(1, 3))
    def intend(self, attempt: int) -> None:
        self.ledger.intend(self.step, attempt)
        intent = self.ledger.intent
        assert intent is not None
        assert (intent.step, intent.attempt) == (self.step, attempt)
        assert list(intent.prompt_indices) == list(self.ledger.training)

    @rule(attempt=st.integers(1, 3))
    def apply_the_step(self, attempt: int) -> None:
        step, groups = self.step, list(self.ledger.training)
        assert not set(groups) & {o for made in self.made_of.values() for o in made}
        assert self.ledger.applied(step, attempt) == self.ledger.trainer_version == step
        assert self.ledger.intent is None
        self.made_of[step] = groups
        self.went_without[step] = self.batch_deficits.pop(step, 0)
        for prompt_index in groups:
            self.place[prompt_index] = "trained"

    @rule()
    def take_a_step(self) -> None:
        self.claim_all()
        self.intend(1)
        self.apply_the_step(1)

    @rule()
    def refuse_the_step(self) -> None:
        version, groups = self.ledger.trainer_version, list(self.ledger.training)
        self.ledger.refused(self.step, 1, "the gradient is not finite")
        assert self.ledger.trainer_version == version
        self.dropped["step_not_applied"] += len(groups)
        for prompt_index in groups:
            self.place[prompt_index] = "dropped"
        self.batch_deficits = Counter(
            {at - 1: count for at, count in self.batch_deficits.items() if at > self.step}
        )

    @rule()
    def publish(self) -> None:
        version = self.ledger.trainer_version
        self.ledger.released(version, f"digest-{version}")
        ack = WeightsAck("generator-0", "incarnation-1", 1, version, f"digest-{version}", 0.1, 0.1)
        self.ledger.served(ack)
        assert self.ledger.digest == f"digest-{version}"

    # --- checkpoints, rewinds, new controllers ---------------------------------------------------

    @rule(behind=st.integers(0, 1))
    def checkpoint(self, behind: int) -> None:
        """Of this version, or one that took its time."""
        last = max(self.checkpoints, default=0)
        version = max(last, self.ledger.trainer_version - behind)
        self.ledger.checkpointed(version, "digest")
        kept = [made for made in self.checkpoints if made != version]
        self.checkpoints = [*kept[-1:], version]
        self.forgotten = max(self.forgotten, self.checkpoints[0])

    @rule(to_version=st.integers(0, 12))
    def rewind_to_anywhere(self, to_version: int) -> None:
        self._rewind(to_version)

    @rule(to_version=st.integers(0, 12), groups=st.integers(1, 5))
    def rewind_in_parts(self, to_version: int, groups: int) -> None:
        self._rewind(to_version, groups)

    @rule(by=st.integers(0, 2))
    def cancel_all_and_rewind(self, by: int) -> None:
        for prompt_index in self._all("in_flight"):
            self.ledger.retry(prompt_index, ReturnKind.CANCELLED, "rewound")
            self.place[prompt_index] = "admitted"
            self.retried["rewound"] += 1
        self._rewind(self.ledger.trainer_version - by)

    def _rewind(self, to_version: int, groups_per_part: int = 10**9) -> None:
        version, given_back = self.ledger.trainer_version, list[int]()
        within = self.forgotten <= to_version <= version
        if not self._expect(
            lambda: given_back.extend(
                prompt_index
                for part in self.ledger.rewind_in_parts(
                    to_version,
                    "rank_lost",
                    steps_after(to_version, reversed(self.events)),
                    groups_per_part=groups_per_part,
                )
                for prompt_index in part
            ),
            legal=within and not self._all("in_flight"),
        ):
            return
        undone = [o for made, groups in self.made_of.items() if made > to_version for o in groups]
        held = self._all("ready") + self._all("training")
        newer = [prompt_index for prompt_index in held if self.newest[prompt_index] > to_version]
        assert sorted(given_back) == sorted(undone + newer)
        assert self.ledger.rewinding_to is None
        for prompt_index in held:
            self.place[prompt_index] = "ready"
        for prompt_index in given_back:
            self.place[prompt_index] = "admitted"
        for made in range(to_version + 1, version + 1):
            for prompt_index in self.made_of.pop(made):
                assert self.ledger.groups[prompt_index].target_step == (
                    made if self.stamping else None
                )
            self.batch_deficits[made] += self.went_without.pop(made)
        self.lineage += 1
        self.checkpoints = [made for made in self.checkpoints if made <= to_version]

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = len(self.events), msgspec.msgpack.encode(self.ledger.snapshot())

    @rule()
    def a_new_controller_takes_over(self) -> None:
        self.ledger = self._folded_from_the_snapshot()
        self.ledger.record = self._record
        incarnation = self.ledger.incarnation + 1
        self.ledger.open("run", incarnation)
        assert (self.ledger.run_id, self.ledger.incarnation) == ("run", incarnation)

    def _folded_from_the_snapshot(self) -> Ledger:
        if self.snapshot is None:
            return Ledger.fold(self.events)
        before, encoded = self.snapshot
        return Ledger.fold(
            self.events[before:], msgspec.msgpack.decode(encoded, type=TableSnapshot)
        )

    # --- what holds after each of them -----------------------------------------------------------

    @invariant()
    def every_prompt_index_is_in_one_place_the_one_it_was_moved_to(self) -> None:
        places, counts = Counter(self.place), self.ledger.counts()
        assert {o: str(group.place) for o, group in self.ledger.groups.items()} == {
            prompt_index: at for prompt_index, at in enumerate(self.place) if at not in ENDED
        }
        assert counts.pop("drawn") == len(self.place)
        assert counts == {name: places[name] for name in counts}
        assert sum(counts.values()) + sum(self.ledger.totals.dropped.values()) == len(self.place)

    @invariant()
    def every_index_is_what_a_recount_finds(self) -> None:
        assert indices(self.ledger) == recount(self.ledger)

    @invariant()
    def totals_and_history_are_as_one_counts(self) -> None:
        ledger, totals = self.ledger, self.ledger.totals
        assert totals.dropped == +self.dropped and totals.retried == +self.retried
        assert (totals.evicted, totals.failed_prompts) == (self.evicted, self.failed_prompts)
        assert totals.failed_prompts_infrastructure == self.failed_prompts_infrastructure
        assert ledger.batch_deficits == +self.batch_deficits
        assert ledger.lineage == self.lineage and ledger.checkpoints == self.checkpoints
        assert sum(ledger.steps.staleness.values()) == 2 * totals.trained
        assert len(ledger.steps.recent) == min(20, ledger.trainer_version)

    @invariant()
    def the_journal_knows_what_each_step_that_stands_was_made_of(self) -> None:
        known = steps_after(0, reversed(self.events)).undone
        assert {step.version: list(step.prompt_indices) for step in known} == self.made_of

    @invariant()
    def the_fold_of_the_events_is_the_ledger(self) -> None:
        assert state_of(Ledger.fold(self.events)) == state_of(self.ledger)

    @invariant()
    def the_fold_from_the_last_snapshot_on_is_the_ledger(self) -> None:
        assert state_of(self._folded_from_the_snapshot()) == state_of(self.ledger)

    @invariant()
    def a_snapshot_of_now_is_the_ledger(self) -> None:
        encoded = msgspec.msgpack.encode(self.ledger.snapshot())
        folded = Ledger.fold([], msgspec.msgpack.decode(encoded, type=TableSnapshot))
        assert state_of(folded) == state_of(self.ledger)


TestLedgerMoves = LedgerMoves.TestCase
