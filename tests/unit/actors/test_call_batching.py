"""Both ends of a coalesced call on a virtual clock; the wire between them is a function."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.actors.call_batching import BatchedReply, CallBatcher, ReplyBatcher
from offbeat.messages.failures import ActorLost, FailureKind, OffbeatError, RolloutFailed
from tests.support.counted_calls import calls_of
from tests.support.virtual_time import run

Question = tuple[str, float]
"""A name, and the seconds until it is answered."""


@dataclass
class Callee:
    """An outbox whose work takes time, and what became of each question."""

    weigh: Callable[[str], int] = len
    limit: int = 10**6
    begun: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])
    cancelled: list[str] = field(default_factory=list[str])
    raises: dict[str, Exception] = field(default_factory=dict[str, Exception])

    def __post_init__(self) -> None:
        self.outbox = ReplyBatcher[Question, str](
            self._work, _as_failure, weigh=self.weigh, limit=self.limit
        )

    async def _work(self, question: Question) -> str:
        name, takes_s = question
        self.begun.append(name)
        try:
            await asyncio.sleep(takes_s)
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name in self.raises:
            raise self.raises[name]
        self.ended.append(name)
        return name


def _as_failure(error: Exception) -> OffbeatError:
    if isinstance(error, OffbeatError):
        return error
    return RolloutFailed(FailureKind.BUG, 0, 1, type(error).__name__, str(error))


@dataclass
class Wire:
    """Carries exchanges to a callee, and remembers them. ``lost`` is raised instead, once set."""

    callee: Callee
    name: str = "caller"
    incarnation: str = "first"
    delay_s: Callable[[], float] = lambda: 0.0
    lost: Exception | None = None
    sent: list[tuple[list[int], list[int]]] = field(
        default_factory=list[tuple[list[int], list[int]]]
    )
    doubted: list[list[int]] = field(default_factory=list[list[int]])
    brought: list[list[int]] = field(default_factory=list[list[int]])
    in_transit: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])

    async def __call__(
        self,
        asked: Sequence[tuple[int, Question]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> list[BatchedReply[str]]:
        self.sent.append(([id_ for id_, _ in asked], list(cancelled)))
        if doubted:
            self.doubted.append(list(doubted))
        if self.lost is not None:
            raise self.lost
        broken = asyncio.get_running_loop().create_future()
        self.in_transit.append(broken)
        carried = asyncio.ensure_future(self._carried(asked, cancelled, doubted))
        await asyncio.wait((carried, broken), return_when=asyncio.FIRST_COMPLETED)
        self.in_transit.remove(broken)
        if broken.done():
            carried.cancel()
            await broken
            await asyncio.get_running_loop().create_future()  # nobody ever reports it
        answers = await carried
        self.brought.append([answer.id for answer in answers])
        return answers

    async def _carried(
        self,
        asked: Sequence[tuple[int, Question]],
        cancelled: Sequence[int],
        doubted: Sequence[int] = (),
    ) -> list[BatchedReply[str]]:
        callee = self.callee
        await asyncio.sleep(self.delay_s())
        answers = await callee.outbox.exchange(
            self.name, self.incarnation, asked, cancelled, doubted
        )
        await asyncio.sleep(self.delay_s())
        return answers

    def replace_callee(self) -> None:
        """Its process dies: all exchanges in transit fail, and the next ones reach a new incarnation."""
        self.callee.outbox.cancel_all()
        self.callee = Callee(self.callee.weigh, self.callee.limit)
        for broken in self.in_transit:
            self.fail(broken, ActorLost("callee", "exchange", "the process is gone"))

    def replace_callee_unreported(self) -> None:
        """Its process dies, and nobody tells the caller: exchanges in transit stay open."""
        self.callee.outbox.cancel_all()
        self.callee = Callee(self.callee.weigh, self.callee.limit)
        for broken in self.in_transit:
            broken.set_result(None)

    @staticmethod
    def fail(broken: asyncio.Future[None], failure: Exception) -> None:
        if not broken.done():
            broken.set_exception(failure)


async def together(*calls: Awaitable[str]) -> list[str]:
    return list(await asyncio.gather(*calls))


async def test_what_is_asked_in_one_turn_travels_in_one_exchange() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    answers = await together(*(calls.call((str(i), 1.0)) for i in range(5)))
    assert answers == ["0", "1", "2", "3", "4"]
    assert wire.sent == [([0, 1, 2, 3, 4], [])]
    assert [sorted(ids) for ids in wire.brought] == [[0, 1, 2, 3, 4]], (
        "what ended in one turn came back together"
    )


async def test_a_slow_question_does_not_hold_up_a_fast_one() -> None:
    clock = asyncio.get_running_loop()
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    slow = asyncio.ensure_future(calls.call(("slow", 20.0)))
    assert await calls.call(("fast", 1.0)) == "fast"
    assert clock.time() == 1.0
    assert await slow == "slow"
    assert clock.time() == 20.0
    assert wire.sent == [([0, 1], []), ([], [])], "one exchange is open while one is owed"


def test_an_answer_costs_the_same_however_many_calls_are_open() -> None:
    async def answered_one_by_one(waiting: int, answers: int) -> None:
        calls = CallBatcher(Wire(Callee()))
        long = [asyncio.ensure_future(calls.call(("long", 1e6))) for _ in range(waiting)]
        for number in range(answers):
            await calls.call((str(number), 1.0))
        calls.close()
        for each in long:
            each.cancel()
        await asyncio.wait(long)

    def hundred_answers(waiting: int) -> int:
        few, many = (
            calls_of(lambda answers=answers: run(answered_one_by_one(waiting, answers)))
            for answers in (50, 150)
        )
        return many - few

    assert hundred_answers(waiting=1000) < 1.1 * hundred_answers(waiting=10)


async def test_a_newer_exchange_takes_over_and_the_older_returns_at_once() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    first = asyncio.ensure_future(calls.call(("first", 10.0)))
    await asyncio.sleep(1)
    assert wire.brought == []
    second = asyncio.ensure_future(calls.call(("second", 10.0)))
    await asyncio.sleep(1)
    assert wire.brought == [[]]
    await together(first, second)
    assert wire.sent == [([0], []), ([1], []), ([], [])]


async def test_nothing_is_sent_while_nothing_is_owed() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    for name in "ab":
        assert await calls.call((name, 1.0)) == name
        await asyncio.sleep(50)
    assert wire.sent == [([0], []), ([1], [])]


async def test_a_cancelled_call_cancels_its_work_and_no_other() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    other = asyncio.ensure_future(calls.call(("other", 10.0)))
    call = asyncio.ensure_future(calls.call(("this", 10.0)))
    await asyncio.sleep(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await other == "other"
    assert (wire.callee.cancelled, wire.callee.ended) == (["this"], ["other"])


async def test_a_question_cancelled_before_its_work_began_leaves_nothing_behind() -> None:
    callee = Callee()
    asked = callee.outbox.exchange("caller", "first", [(0, ("this", 1.0))], [])
    cancelled = callee.outbox.exchange("caller", "first", [], [0])
    assert await asyncio.gather(asked, cancelled) == [[], []]
    assert callee.begun == []


async def test_a_lost_callee_fails_every_open_call_and_later_calls_work() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    open_calls = [asyncio.ensure_future(calls.call((str(i), 10.0))) for i in range(3)]
    await asyncio.sleep(1)
    open_calls.append(asyncio.ensure_future(calls.call(("in a later exchange", 10.0))))
    await asyncio.sleep(1)
    wire.replace_callee()
    for result in await asyncio.gather(*open_calls, return_exceptions=True):
        assert isinstance(result, ActorLost)
    assert await calls.call(("after", 1.0)) == "after"


async def test_a_late_failure_spares_the_calls_that_came_after_it() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    before = asyncio.ensure_future(calls.call(("before", 10.0)))
    await asyncio.sleep(1)
    (doomed,) = wire.in_transit
    wire.delay_s = lambda: 5.0
    after = asyncio.ensure_future(calls.call(("after", 1.0)))
    await asyncio.sleep(1)
    doomed.set_exception(ActorLost("callee", "exchange", "the process is gone"))
    with pytest.raises(ActorLost):
        await before
    assert await after == "after"


async def test_questions_that_a_new_process_never_heard_of_are_found_to_be_lost() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    forgotten = asyncio.ensure_future(calls.call(("forgotten", 10.0)))
    quick = asyncio.ensure_future(calls.call(("quick", 1.0)))
    await asyncio.sleep(0.5)
    wire.callee, old = Callee(), wire.callee  # between two exchanges: none fails
    assert await quick == "quick"
    with pytest.raises(ActorLost, match="no longer has this request"):
        await forgotten
    old.outbox.cancel_all()


@pytest.mark.parametrize("others_call", [False, True])
async def test_a_call_whose_loss_is_never_reported_fails_all_the_same(*, others_call: bool) -> None:
    clock = asyncio.get_running_loop()
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    lost = asyncio.ensure_future(calls.call(("lost", 1.0)))
    await asyncio.sleep(0.5)
    wire.replace_callee_unreported()
    if others_call:
        assert await calls.call(("other", 5.0)) == "other"
    with pytest.raises(ActorLost, match="no longer has this request"):
        await lost
    assert clock.time() < 100.0
    assert len(wire.sent) < 8, "an exchange that returns nothing is not repeated at once"
    assert await calls.call(("next", 5.0)) == "next"


async def test_neither_do_calls_that_go_on_without_a_pause_hide_a_lost_one() -> None:
    clock = asyncio.get_running_loop()
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    lost = asyncio.ensure_future(calls.call(("lost", 1.0)))
    await asyncio.sleep(0.5)
    wire.replace_callee_unreported()
    others = list[asyncio.Task[str]]()
    while clock.time() < 200.0:
        others.append(asyncio.create_task(calls.call((str(len(others)), 5.0))))
        await asyncio.sleep(2.0)
        if lost.done():
            break
    assert clock.time() < 100.0
    with pytest.raises(ActorLost, match="no longer has this request"):
        await lost
    assert await together(*others) == [str(number) for number in range(len(others))]
    assert wire.callee.cancelled == []


async def test_a_slow_reply_costs_no_call_that_the_callee_works_on() -> None:
    """Its exchange is presumed lost, and the callee, which is asked, knows the other call."""
    delays_s = iter((0.0, 0.0, 70.0))
    wire = Wire(Callee(), delay_s=lambda: next(delays_s, 0.0))
    calls = CallBatcher(wire)
    long = asyncio.ensure_future(calls.call(("long", 150.0)))
    await asyncio.sleep(0.0)
    other = asyncio.ensure_future(calls.call(("other", 1.0)))
    assert await other == "other"
    assert await long == "long"
    assert wire.doubted and all(ids == [0] for ids in wire.doubted)


async def test_a_question_that_travels_for_long_is_not_lost_to_those_that_overtake_it() -> None:
    way_s = iter((55.0, 0.0))
    wire = Wire(Callee(), delay_s=lambda: next(way_s, 0.0))
    calls = CallBatcher(wire)
    overtaken = asyncio.ensure_future(calls.call(("overtaken", 50.0)))
    await asyncio.sleep(50.0)
    assert await calls.call(("fast", 1.0)) == "fast"
    assert await overtaken == "overtaken"


@pytest.mark.parametrize(
    "bug", [ValueError("not one of ours"), RolloutFailed(FailureKind.BUG, 1, 1, "r", "d")]
)
async def test_an_exchange_that_fails_in_any_other_way_fails_the_open_calls(bug: Exception) -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    earlier = asyncio.ensure_future(calls.call(("earlier", 10.0)))
    await asyncio.sleep(1)
    wire.lost = bug
    results = await asyncio.gather(earlier, calls.call(("now", 1.0)), return_exceptions=True)
    assert results == [bug, bug]
    wire.lost = None
    assert await calls.call(("later", 1.0)) == "later"
    assert wire.callee.cancelled == ["earlier"], "the callee lives, and was told"
    assert len(wire.sent) == 3, "nothing was tried again by itself"


async def test_a_failure_is_delivered_as_its_own_class_to_its_own_caller() -> None:
    wire = Wire(Callee())
    failure = RolloutFailed(FailureKind.DATA, 7, 2, "reward_nan", "sample 3")
    wire.callee.raises = {"bad": failure, "worse": KeyError("nobody expected it")}
    calls = CallBatcher(wire)
    names = ("good", "bad", "worse")
    good, bad, worse = await asyncio.gather(
        *(calls.call((name, 1.0)) for name in names), return_exceptions=True
    )
    assert good == "good"
    assert bad is failure
    assert isinstance(worse, RolloutFailed) and worse.reason == "KeyError"


async def test_a_caller_that_comes_back_with_another_incarnation_cancels_the_former_ones_work() -> (
    None
):
    callee = Callee()
    former = asyncio.ensure_future(
        callee.outbox.exchange("caller", "first", [(0, ("former", 10.0))], [])
    )
    other = asyncio.ensure_future(
        callee.outbox.exchange("another", "first", [(0, ("other", 10.0))], [])
    )
    await asyncio.sleep(1)
    answers = await callee.outbox.exchange("caller", "second", [(0, ("new", 1.0))], [])
    assert [answer.value for answer in answers] == ["new"]
    assert await former == [], "an exchange of the former incarnation does not stay open"
    assert [answer.value for answer in await other] == ["other"]
    assert callee.cancelled == ["former"]


async def test_work_given_up_by_the_callee_is_lost_to_its_caller() -> None:
    wire = Wire(Callee())
    call = asyncio.ensure_future(CallBatcher(wire).call(("this", 10.0)))
    await asyncio.sleep(1)
    wire.callee.outbox.cancel_all()
    with pytest.raises(ActorLost):
        await call


async def test_a_limit_splits_replies_and_loses_nothing() -> None:
    wire = Wire(Callee(limit=4))
    calls = CallBatcher(wire)
    names = ["aaa", "bbb", "ccc", "ddd", "eee"]
    assert await together(*(calls.call((name, 1.0)) for name in names)) == names
    assert [len(ids) for ids in wire.brought] == [2, 2, 1]


async def test_after_close_nothing_stays_open() -> None:
    wire = Wire(Callee())
    calls = CallBatcher(wire)
    call = asyncio.ensure_future(calls.call(("this", 10.0)))
    await asyncio.sleep(1)
    call.cancel()
    calls.close()
    await asyncio.sleep(1)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert wire.callee.cancelled == ["this"]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    calls=st.integers(1, 60),
    limit=st.integers(1, 30),
    deaths=st.lists(st.floats(0, 20), max_size=3),
    bugs=st.booleans(),
)
def test_every_call_ends_once_whatever_the_interleaving(
    seed: int, calls: int, limit: int, deaths: list[float], bugs: bool
) -> None:
    """Delays are random both ways, so exchanges overtake each other, as on Ray's async actors."""
    dice = random.Random(seed)

    async def main() -> None:
        wire = Wire(Callee(limit=limit), delay_s=lambda: dice.choice((0.0, 0.01, dice.random())))
        coalescer = CallBatcher(wire)
        outcomes = Counter[str]()

        async def one(number: int) -> None:
            await asyncio.sleep(dice.random() * 10)
            name = f"{number}{'x' * dice.randrange(5)}"
            call = asyncio.ensure_future(
                coalescer.call((name, dice.choice((0.0, dice.random() * 5))))
            )
            if dice.random() < 0.2:
                asyncio.get_running_loop().call_later(dice.random() * 5, call.cancel)
            try:
                assert await call == name
                outcomes["answered"] += 1
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1
            except (ActorLost, ValueError):
                outcomes["failed"] += 1

        async def kill(after_s: float) -> None:
            await asyncio.sleep(after_s)
            wire.replace_callee()

        async def disturb() -> None:
            await asyncio.sleep(5)
            for broken in wire.in_transit[:1]:
                wire.fail(broken, ValueError("a bug"))

        disturbances = [kill(after_s) for after_s in deaths] + ([disturb()] if bugs else [])
        await asyncio.gather(*(one(number) for number in range(calls)), *disturbances)
        assert outcomes.total() == calls
        if not deaths and not bugs:
            assert not outcomes["failed"]
        await asyncio.sleep(30)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "nothing is left running"

    run(main())
