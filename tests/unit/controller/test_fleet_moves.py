"""The fleet under any news in any order, late, twice and of former incarnations, against a naive model."""

from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.controller.engine_record import Health, IllegalHealth
from offbeat.controller.fleet import Fleet, NothingOutstanding
from offbeat.messages.weights import EngineState, WeightsAck

NAMES = ("generator-0", "generator-1")
NAME = st.sampled_from(NAMES)
STRIKES = 2
LEGAL = {
    ("restarting", "stale"), ("restarting", "dead"),
    ("stale", "healthy"), ("stale", "dead"),
    ("healthy", "suspect"), ("healthy", "stale"), ("healthy", "dead"),
    ("suspect", "healthy"), ("suspect", "stale"), ("suspect", "dead"),
    ("dead", "restarting"),
}  # fmt: skip


def incarnation(name: str, number: int) -> str:
    return f"{name}-incarnation-{number}"


@dataclass
class Known:
    """What a plain reader of the news knows of one engine."""

    number: int = 1  # incarnation number of the process that runs
    heard: int = 0  # the latest incarnation number that was taken in; 0 for none
    former: int = 0  # the one that was taken in before it
    proven: int = -1  # version of the ack that nothing has cast doubt on since
    doubted: int = -1  # a proven version that a failed request cast doubt on
    highest: int = -1  # acked by this incarnation since the last rewind
    outstanding: int = 0
    turn: int = 0  # when it came to this load, or back to work
    strikes: int = 0
    pinned_to: int = -1
    syncs_apart: bool = False  # a transfer to it passed its deadline, and none ended well since

    def distrust(self) -> None:
        self.proven = self.doubted = self.pinned_to = -1


class FleetMoves(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(NAMES, STRIKES)
        self.known = {name: Known() for name in NAMES}
        self.released, self.turns = 0, 0
        self.sent = list[WeightsAck]()  # every ack that was ever made, to come again
        self.serving_version = 0
        self.restarts = 0
        self.newest = -1
        self.were = dict.fromkeys(NAMES, "restarting")
        self.by_ack = False  # the last rule handed in an ack
        self.several = False  # it made several moves

    def _turn(self, name: str) -> None:
        self.turns += 1
        self.known[name].turn = self.turns

    def _health(self, name: str) -> str:
        return str(self.fleet.engines[name].health)

    # --- what happens to the processes -----------------------------------------------------------

    @rule()
    def release(self) -> None:
        self.released += 1
        self.newest = self.released
        self.fleet.released(self.released)

    @rule(name=NAME)
    def a_process_is_replaced(self, name: str) -> None:
        self.known[name].number += 1

    # --- what they say ---------------------------------------------------------------------------

    @rule(name=NAME, back=st.sampled_from([0, 0, 0, 1]), honest=st.booleans())
    def hear(self, name: str, back: int, honest: bool) -> None:
        engine, known = self.fleet.engines[name], self.known[name]
        number, was = known.former if back and known.former else known.number, self._health(name)
        says = engine.version if honest else self.released - 1
        late = (
            was == "dead" or number < known.heard or (was == "restarting" and number == known.heard)
        )
        before = str(engine), engine.incarnation
        answer = EngineState(name, incarnation(name, number), says, None, 0, 0, 0.0, 0)
        assert self.fleet.probe_answered(answer) is not late
        if late:
            assert (str(engine), engine.incarnation) == before
        elif number > known.heard:
            self.restarts += known.heard > 0
            known.former, known.heard = known.heard, number
            known.highest, known.strikes = -1, 0
            known.distrust()
        elif was == "suspect":
            if says == known.doubted >= 0:
                known.proven = known.doubted
                self._turn(name)
            else:
                known.distrust()

    def _hand_in(self, ack: WeightsAck) -> None:
        name, known = ack.engine, self.known[ack.engine]
        living = ack.incarnation == incarnation(name, known.heard)
        given_up = self._health(name) in ("dead", "restarting")
        lower = ack.version < known.highest
        before, engine = str(self.fleet.engines[name]), self.fleet.engines[name]
        accepted = self.fleet.acked(ack)
        self.by_ack = True
        assert accepted is (living and not (given_up or lower))
        if not accepted:
            assert str(engine) == before
            return
        known.proven = known.highest = ack.version
        known.syncs_apart = False
        known.pinned_to = ack.version if known.pinned_to == ack.version else -1
        self.newest = max(self.newest, ack.version)
        self._turn(name)

    @rule(name=NAME, back=st.sampled_from([0, 0, 0, 1]))
    def ack_the_release(self, name: str, back: int) -> None:
        its_incarnation = incarnation(name, self.known[name].number - back)
        ack = WeightsAck(name, its_incarnation, 1, self.released, "digest", 0.1, 0.1)
        self.sent.append(ack)
        self._hand_in(ack)

    @rule(name=NAME)
    def join(self, name: str) -> None:
        """What a living engine does sooner or later; by single rules that would be rare."""
        self.several = True
        if self._health(name) == "dead":
            self.restart(name)
            self.known[name].number += 1
        self.hear(name, 0, honest=True)
        self.ack_the_release(name, 0)

    @rule(first=NAME)
    def sync(self, first: str) -> None:
        """A release that every living engine takes, in some order."""
        self.release()
        for name in sorted(NAMES, key=lambda name: name != first):
            self.ack_the_release(name, 0)

    @precondition(lambda self: self.sent)
    @rule(place=st.integers(0, 10**6))
    def an_ack_comes_once_more(self, place: int) -> None:
        self._hand_in(self.sent[place % len(self.sent)])

    # --- what the controller finds out -----------------------------------------------------------

    def _suspected(self, name: str) -> None:
        known = self.known[name]
        if known.proven >= 0:
            known.proven, known.doubted = -1, known.proven

    @rule(name=NAME)
    def suspect(self, name: str) -> None:
        self.fleet.suspect(name)
        self._suspected(name)

    @rule(name=NAME, honest=st.booleans())
    def suspect_and_probe(self, name: str, honest: bool) -> None:
        self.several = True
        self.suspect(name)
        self.hear(name, 0, honest)

    @rule(name=NAME, former=st.booleans())
    def a_request_fails(self, name: str, former: bool) -> None:
        known, given_up = self.known[name], self._health(name) in ("dead", "restarting")
        to = incarnation(name, known.heard - 1) if former else None
        if former or given_up:
            assert not self.fleet.request_failed(name, to)
            return
        known.strikes += 1
        assert self.fleet.request_failed(name) == (known.strikes >= STRIKES)
        self._suspected(name)

    @rule(name=NAME, former=st.booleans())
    def a_request_is_answered(self, name: str, former: bool) -> None:
        known = self.known[name]
        number = known.heard - former
        self.fleet.request_answered(name, incarnation(name, number) if number else None)
        known.strikes = known.strikes if former and number else 0

    @rule(name=NAME)
    def a_sync_fails(self, name: str) -> None:
        self.fleet.stale(name)
        self.known[name].distrust()

    @rule(name=NAME)
    def a_sync_passes_its_deadline(self, name: str) -> None:
        self.fleet.sync_timed_out(name)
        self.known[name].distrust()
        self.known[name].syncs_apart = True

    @rule(name=NAME)
    def a_former_release_is_taken(self, name: str) -> None:
        self.fleet.took_former_release(name)
        self.known[name].distrust()
        self.known[name].syncs_apart = False

    @rule(name=NAME)
    def give_up(self, name: str) -> None:
        self.fleet.dead(name)
        self.known[name].distrust()

    @rule(name=NAME)
    def restart(self, name: str) -> None:
        if self._health(name) in ("dead", "restarting"):
            self.fleet.restarting(name)
            self.known[name].highest = -1
            return
        before = str(self.fleet)
        with pytest.raises(IllegalHealth):
            self.fleet.restarting(name)
        assert str(self.fleet) == before

    # --- work, evaluations, rewinds --------------------------------------------------------------

    @rule(name=NAME, groups=st.integers(1, 2))
    def give_work(self, name: str, groups: int) -> None:
        for _ in range(groups):
            self.fleet.took(name)
            self.known[name].outstanding += 1
            self._turn(name)

    @rule()
    def give_work_to_the_one_picked(self) -> None:
        if engine := self.fleet.pick():
            self.give_work(engine.name, 1)

    @rule(name=NAME)
    def take_back(self, name: str) -> None:
        if not self.known[name].outstanding:
            with pytest.raises(NothingOutstanding):
                self.fleet.gave_back(name)
            return
        self.fleet.gave_back(name)
        self.known[name].outstanding -= 1
        self._turn(name)

    @rule(behind=st.sampled_from([0, 0, 1]))
    def pin(self, behind: int) -> None:
        version = self.released - behind
        fit = [n for n, k in self.known.items() if k.proven == version >= 0 and k.pinned_to < 0]
        name = self.fleet.pin(version)
        assert name == min(fit, key=self._place, default=None)
        if name is not None:
            self.known[name].pinned_to = version
            self._turn(name)

    @rule(name=NAME)
    def unpin(self, name: str) -> None:
        known = self.known[name]
        self.fleet.unpin(name)
        if 0 <= known.pinned_to < self.newest:
            known.distrust()
            assert self._health(name) == "stale"
        elif known.pinned_to >= 0:
            known.pinned_to = -1
            self._turn(name)

    @rule(name=NAME)
    def evaluate_across_a_sync(self, name: str) -> None:
        self.several = True
        self.pin(0)
        self.sync(name)
        self.unpin(name)

    @rule(by=st.integers(0, 2))
    def rewind(self, by: int) -> None:
        """Acks of the abandoned lineage are not handed in any more."""
        self.released = max(0, self.released - by)
        self.fleet.rewound(self.released)
        for known in self.known.values():
            known.distrust()
            known.highest = -1
        self.serving_version, self.newest, self.sent = self.released, -1, []
        assert self.fleet.pick() is None
        assert self.fleet.serving_version == self.released

    # --- what holds after each of them -----------------------------------------------------------

    def _is_on_trial(self, name: str) -> bool:
        """Its last request failed, and one more is out."""
        return self.known[name].strikes > 0 and self.known[name].outstanding > 0

    def _place(self, name: str) -> tuple[int, int]:
        return self.known[name].outstanding, self.known[name].turn

    @invariant()
    def an_engine_serves_if_its_living_process_acked_and_nothing_failed_since(self) -> None:
        proven = {name: known.proven for name, known in self.known.items() if known.proven >= 0}
        assert {e.name: e.version for e in self.fleet.serving} == proven
        assert self.fleet.serving_count == len(proven)
        for engine in self.fleet.serving:
            assert engine.incarnation == incarnation(engine.name, self.known[engine.name].heard)

    @invariant()
    def the_idlest_is_picked_and_equals_take_turns(self) -> None:
        able = [name for name, known in self.known.items() if known.proven >= 0]
        free = [name for name in able if self.known[name].pinned_to < 0]
        pool = free or able
        for avoid in ("", *NAMES):
            fit = [name for name in pool if name != avoid and not self._is_on_trial(name)]
            expected = min(fit or pool, key=self._place, default=None)
            picked = self.fleet.pick(avoid)
            assert (picked.name if picked else None) == expected

    @invariant()
    def the_serving_version_is_the_lowest_that_is_served_pins_aside(self) -> None:
        able = [known for known in self.known.values() if known.proven >= 0]
        free = [known.proven for known in able if known.pinned_to < 0]
        pinned = [known.proven for known in able]
        self.serving_version = min(free or pinned, default=self.serving_version)
        assert self.fleet.serving_version == self.serving_version

    @invariant()
    def every_change_of_health_is_in_the_table_and_only_an_ack_ends_staleness(self) -> None:
        for name, was in self.were.items():
            now = self._health(name)
            assert now == was or (was, now) in LEGAL or self.several
            if (was, now) == ("stale", "healthy"):
                assert self.by_ack, "only a sync ends staleness"
            self.were[name] = now
        self.by_ack = self.several = False

    @invariant()
    def a_pinned_engine_is_left_out_of_syncs_and_at_its_version(self) -> None:
        pinned = {name for name, known in self.known.items() if known.pinned_to >= 0}
        assert {engine.name for engine in self.fleet.engines.values() if engine.pinned} == pinned
        for name in pinned:
            engine = self.fleet.engines[name]
            assert engine.health in (Health.HEALTHY, Health.SUSPECT)
            assert engine.version == self.known[name].pinned_to
        alive = {n for n in NAMES if self._health(n) not in ("dead", "restarting")}
        apart = {name for name, known in self.known.items() if known.syncs_apart}
        assert set(self.fleet.in_sync_set()) == alive - pinned - apart

    @invariant()
    def counts_are_as_one_counts(self) -> None:
        for name, engine in self.fleet.engines.items():
            assert engine.outstanding == self.known[name].outstanding
            assert engine.strikes == self.known[name].strikes
            assert engine.doubted == (engine not in self.fleet.serving)
        assert self.fleet.restarts == self.restarts


TestFleetMoves = FleetMoves.TestCase
