"""Who is sent to in which round, whatever becomes of the members."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.weight_sync.transports.messages import Join, Report, RoundPlan
from offbeat.weight_sync.transports.session import Session

CHUNKS = 4
NAMES = ("g0", "g1", "g2", "g3")


def join(member: str, members: tuple[str, ...] = NAMES) -> Join:
    return Join("s", 7, members, member, "incarnation", "digest")


def report(member: str, round_: int, at: int, *, left: bool = False) -> Report:
    return Report("s", round_, member, at, "" if at == CHUNKS else "stopped", left=left)


def opened(*members: str) -> Session:
    session = Session(join(members[0], members), CHUNKS)
    for each in members[1:]:
        assert session.joined(join(each, members))
    assert session.everybody
    assert session.plan() == RoundPlan(0, members)
    return session


def test_when_everybody_has_everything_it_is_over() -> None:
    session = opened("g0", "g1")
    for member in ("g0", "g1"):
        assert not session.everybody
        assert session.reported(report(member, 0, CHUNKS))
    assert session.everybody
    assert session.plan() is None
    assert session.ended == {"g0": "", "g1": ""}


def test_whoever_does_not_come_is_left_out() -> None:
    session = Session(join("g1", ("g0", "g1")), CHUNKS)
    assert not session.everybody
    assert session.plan() == RoundPlan(0, ("g1",))
    assert session.ended == {"g0": "was not heard of in time"}
    assert not session.joined(join("g0", ("g0", "g1"))), "too late"


def test_those_that_stopped_are_sent_to_again_from_where_the_last_one_stands() -> None:
    session = opened("g0", "g1", "g2")
    session.reported(report("g0", 0, 2))
    session.gone("g1")
    session.reported(report("g2", 0, 1))
    assert session.everybody
    assert session.plan() == RoundPlan(1, ("g0", "g2"), first=1)


def test_whoever_found_a_wrong_chunk_leaves_and_the_others_go_on() -> None:
    session = opened("g0", "g1")
    session.reported(report("g0", 0, 1, left=True))
    session.reported(report("g1", 0, 1))
    assert session.plan() == RoundPlan(1, ("g1",), first=1)


def test_a_sender_that_cannot_go_on_tells_all_who_are_left() -> None:
    session = opened("g0", "g1")
    session.reported(report("g0", 0, CHUNKS))
    session.reported(report("g1", 0, 3))
    assert session.plan("disk on fire") == RoundPlan(1, ("g1",), error="disk on fire")
    assert session.plan() is None


def test_messages_of_other_sessions_and_rounds_are_dropped_and_counted() -> None:
    session = opened("g0", "g1")
    assert not session.reported(report("g0", 1, CHUNKS))
    assert not session.reported(report("g9", 0, CHUNKS))
    assert session.reported(report("g0", 0, CHUNKS))
    assert not session.reported(report("g0", 0, CHUNKS)), "once more"
    assert not session.joined(join("g1"))
    assert session.dropped == 4


@given(st.data())
def test_a_session_ends_whatever_its_members_do_and_each_of_them_in_one_way(
    data: st.DataObject,
) -> None:
    coming = data.draw(st.sets(st.sampled_from(NAMES), min_size=1))
    first, *others = sorted(coming)
    session = Session(join(first), CHUNKS)
    for each in others:
        session.joined(join(each))
    has: dict[str, int] = dict.fromkeys(NAMES, 0)
    rounds = 0
    while (plan := session.plan()) is not None and not plan.error:
        assert plan.round == rounds, "one round after the other"
        assert plan.first == min(has[each] for each in plan.members)
        rounds += 1
        for member in plan.members:
            fate = data.draw(st.sampled_from(["done", "stopped", "left", "gone", "silent"]))
            if fate == "gone":
                session.gone(member)
            elif fate != "silent":
                at = CHUNKS if fate == "done" else data.draw(st.integers(has[member], CHUNKS - 1))
                has[member] = at
                assert session.reported(report(member, plan.round, at, left=fate == "left"))
    assert rounds <= len(NAMES) + 1
    assert session.ended.keys() == set(NAMES)
    assert all((error == "") == (has[name] == CHUNKS) for name, error in session.ended.items())
