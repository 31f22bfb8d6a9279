from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offbeat.fakes.step_keys import StepKeys
from offbeat.messages.failures import StepAlreadyOpen, StepBroken, StepOutOfOrder
from offbeat.messages.fences import StepKey
from offbeat.trainers.backend import StepCall, StepGuard


def key(step: int, attempt: int = 1, seq: int = 0) -> StepKey:
    return StepKey(step, attempt, seq)


def boom() -> None:
    raise OSError("boom")


def never() -> Any:
    raise AssertionError("this call must not run")


@pytest.fixture
def guard() -> StepGuard:
    """Step 1, attempt 1 is open; seq 1 answered "one"."""
    guard = StepGuard()
    guard.once(key(1), StepCall.BEGIN, lambda: None)
    assert guard.once(key(1, 1, 1), StepCall.MICROBATCH, lambda: "one") == "one"
    return guard


def test_a_repeated_key_gets_its_stored_reply_and_nothing_runs(guard: StepGuard) -> None:
    assert guard.once(key(1), StepCall.BEGIN, never) is None
    assert guard.once(key(1, 1, 1), StepCall.MICROBATCH, never) == "one"


def test_replies_outlive_finish_until_the_next_attempt_begins(guard: StepGuard) -> None:
    assert guard.once(key(1, 1, 2), StepCall.FINISH, lambda: "done") == "done"
    assert not guard.is_open
    assert guard.once(key(1, 1, 2), StepCall.FINISH, never) == "done"
    assert guard.once(key(1, 1, 1), StepCall.MICROBATCH, never) == "one"
    guard.once(key(2, 2), StepCall.BEGIN, lambda: None)
    with pytest.raises(StepOutOfOrder):
        guard.once(key(1, 1, 2), StepCall.FINISH, never)


def test_another_step_is_refused_while_one_is_open(guard: StepGuard) -> None:
    with pytest.raises(StepAlreadyOpen) as refused:
        guard.once(key(2), StepCall.BEGIN, never)
    assert refused.value.args == (1, 1, 2)
    with pytest.raises(StepAlreadyOpen):
        guard.once(key(1, 2), StepCall.BEGIN, never)


@pytest.mark.parametrize("wrong", [key(1, 1, 3), key(1, 2, 2), key(2, 1, 2), key(1, 1, 9)])
def test_a_call_that_is_not_the_next_is_refused(guard: StepGuard, wrong: StepKey) -> None:
    with pytest.raises(StepOutOfOrder, match=r"expected \(step 1, attempt 1, seq 2\)"):
        guard.once(wrong, StepCall.MICROBATCH, never)


def test_a_key_answered_for_another_call_is_refused(guard: StepGuard) -> None:
    with pytest.raises(StepOutOfOrder, match="train_microbatch, which had this key"):
        guard.once(key(1, 1, 1), StepCall.FINISH, never)


def test_an_attempt_cannot_begin_twice_nor_in_the_middle(guard: StepGuard) -> None:
    guard.abort(key(1))
    for wrong in (key(1), key(1, 2, 1)):
        with pytest.raises(StepOutOfOrder):
            guard.once(wrong, StepCall.BEGIN, never)
    guard.once(key(1, 2), StepCall.BEGIN, lambda: None)


def test_after_a_failed_call_only_an_abort_is_taken(guard: StepGuard) -> None:
    with pytest.raises(OSError, match="boom"):
        guard.once(key(1, 1, 2), StepCall.MICROBATCH, boom)
    for next_key in (key(1, 1, 2), key(1, 1, 3)):
        with pytest.raises(StepOutOfOrder, match="abort_train_step"):
            guard.once(next_key, StepCall.FINISH, never)
    assert guard.once(key(1, 1, 1), StepCall.MICROBATCH, never) == "one"
    assert guard.abort(key(1))
    guard.once(key(1, 2), StepCall.BEGIN, lambda: None)


def test_an_abort_may_be_repeated_and_may_find_nothing() -> None:
    guard = StepGuard()
    assert not guard.abort(key(1))
    guard.once(key(1, 2), StepCall.BEGIN, lambda: None)
    assert guard.abort(key(1, 2))
    assert not guard.abort(key(1, 2))


def test_a_newer_controllers_abort_closes_what_an_older_one_left_open(guard: StepGuard) -> None:
    assert guard.abort(key(1, 7))
    with pytest.raises(StepOutOfOrder):
        guard.once(key(1, 7), StepCall.BEGIN, never)
    guard.once(key(1, 8), StepCall.BEGIN, lambda: None)


def test_an_older_step_is_taken_again_under_a_newer_attempt() -> None:
    guard = StepGuard()
    guard.once(key(9, 4), StepCall.BEGIN, lambda: None)
    guard.once(key(9, 4, 1), StepCall.FINISH, lambda: "done")
    guard.once(key(3, 5), StepCall.BEGIN, lambda: None)
    guard.abort(key(3, 5))
    with pytest.raises(StepOutOfOrder, match="of an attempt after 5"):
        guard.once(key(10, 5), StepCall.BEGIN, never)
    guard.once(key(3, 6), StepCall.BEGIN, lambda: None)


def test_closing_forgets_replies_and_what_is_open_but_not_which_attempts_were(
    guard: StepGuard,
) -> None:
    guard.close()
    assert not guard.is_open
    for known in (key(1), key(1, 1, 1), key(1, 1, 2)):
        with pytest.raises(StepOutOfOrder):
            guard.once(known, StepCall.BEGIN if known.seq == 0 else StepCall.MICROBATCH, never)
    guard.once(key(1, 2), StepCall.BEGIN, lambda: None)


def outcome_of(call: Callable[[], StepKey]) -> StepKey | type[Exception]:
    try:
        return call()
    except (StepAlreadyOpen, StepOutOfOrder, OSError) as refused:
        return type(refused)


class AnyOrderOfCalls(RuleBasedStateMachine):
    """Whatever is called in whatever order, no key runs twice, and attempts run in ascending order.

    The keys of the fakes, which are written apart from the guard, decide each call alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guard, self.of_fakes = StepGuard(), StepKeys()
        self.ran = list[StepKey]()

    keys = st.builds(StepKey, st.integers(1, 2), st.integers(1, 3), st.integers(0, 3))

    @rule(any_key=keys, call=st.sampled_from(StepCall), fails=st.booleans())
    def call(self, any_key: StepKey, call: StepCall, fails: bool) -> None:
        def work() -> StepKey:
            self.ran.append(any_key)
            if fails:
                raise OSError
            return any_key

        def plain_work() -> StepKey:
            if fails:
                raise OSError
            return any_key

        outcome = outcome_of(lambda: self.guard.once(any_key, call, work))
        assert outcome == outcome_of(lambda: self.of_fakes.once(any_key, call, plain_work))
        assert outcome in (any_key, StepAlreadyOpen, StepOutOfOrder, StepBroken, OSError)

    @precondition(lambda self: self.ran)
    @rule(back=st.integers(0, 2), call=st.sampled_from(StepCall))
    def call_next(self, back: int, call: StepCall) -> None:
        self.call(self.ran[-1].next() if back else self.ran[-1], call, fails=False)

    @rule(any_key=keys)
    def abort(self, any_key: StepKey) -> None:
        assert self.guard.abort(any_key) == self.of_fakes.abort(any_key)

    @rule()
    def close(self) -> None:
        self.guard.close()
        self.of_fakes.close()

    @invariant()
    def the_fakes_keys_agree(self) -> None:
        assert self.guard.is_open == self.of_fakes.is_open

    @invariant()
    def keys_ran_once_and_in_order(self) -> None:
        order = [(each.attempt, each.seq) for each in self.ran]
        assert order == sorted(set(order))
        assert len({each.attempt for each in self.ran}) == len({e.attempt_id for e in self.ran})


TestAnyOrderOfCalls = AnyOrderOfCalls.TestCase


def test_calls_behind_a_failed_one_are_refused_as_of_a_broken_step(guard: StepGuard) -> None:
    with pytest.raises(ZeroDivisionError):
        guard.once(key(1, 1, 2), StepCall.MICROBATCH, lambda: 1 // 0)
    with pytest.raises(StepBroken):
        guard.once(key(1, 1, 3), StepCall.MICROBATCH, never)
    with pytest.raises(StepOutOfOrder) as refused:
        guard.once(key(2, 1, 1), StepCall.MICROBATCH, never)
    assert type(refused.value) is StepOutOfOrder, "of a step that it does not know"
