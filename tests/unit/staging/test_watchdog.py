"""The watchdog on a virtual clock: who stands still is named and left, who is slow is not."""

from collections.abc import Sequence

import pytest

from offbeat.messages.failures import ActorLost
from offbeat.staging.outcome import NodeOutcome, StagingVerdict, as_node_outcome, table_of
from offbeat.staging.progress import ProgressMeter, StagingProgress
from offbeat.staging.thread_job import ThreadJob
from offbeat.staging.watchdog import Stalled, watch

LIMIT_S = 30.0
DONE = NodeOutcome(StagingVerdict.COPIED, 1, 2, 3 * 2**20)


class VirtualClock:
    """Time that passes in pauses alone."""

    def __init__(self) -> None:
        self.s = 0.0

    def now_s(self) -> float:
        return self.s

    def pause(self, seconds: float) -> None:
        self.s += seconds


class Node:
    """A node that moves a byte at some moments, and is done at one, or lost."""

    def __init__(
        self, clock: VirtualClock, moves_at_s: Sequence[float] = (), done_s: float = 1e9
    ) -> None:
        self._clock, self._moves, self._done_s = clock, moves_at_s, done_s
        self.lost_s, self.is_abandoned = 1e9, False

    def result(self) -> NodeOutcome | None:
        if self._clock.s >= self.lost_s:
            raise ActorLost("node", "staging", "its process was killed or crashed")
        return DONE if self._clock.s >= self._done_s else None

    def progress(self) -> StagingProgress:
        moved = sum(at <= self._clock.s for at in self._moves)
        return StagingProgress("copying", "1.safetensors", moved, 99, moved)

    def abandon(self) -> None:
        self.is_abandoned = True


def test_a_copy_that_stands_still_is_left_and_named_with_file_and_bytes() -> None:
    clock = VirtualClock()
    still, well = Node(clock, moves_at_s=[5, 10]), Node(clock, done_s=20)
    outcomes = watch({"still": still, "well": well}, LIMIT_S, clock, print)
    stalled = outcomes["still"]
    assert isinstance(stalled, Stalled)
    assert str(stalled) == "no byte moved for 30 s: copying 1.safetensors, 2 of 99 bytes"
    assert clock.s == pytest.approx(10 + LIMIT_S)
    assert still.is_abandoned
    assert outcomes["well"] is DONE
    assert not well.is_abandoned


def test_a_copy_that_is_slow_has_all_the_time_that_it_needs() -> None:
    clock = VirtualClock()
    slow = Node(clock, moves_at_s=range(0, 3600, 29), done_s=3600)
    assert watch({"slow": slow}, LIMIT_S, clock, lambda _: None) == {"slow": DONE}


def test_a_node_that_never_answers_is_left_after_the_same_time() -> None:
    clock = VirtualClock()
    outcome = watch({"dead": Node(clock)}, LIMIT_S, clock, print)["dead"]
    assert isinstance(outcome, Stalled)
    assert clock.s == LIMIT_S


def test_a_lost_node_does_not_keep_the_others_from_the_model() -> None:
    clock = VirtualClock()
    lost, well = Node(clock), Node(clock, done_s=20)
    lost.lost_s = 3
    outcomes = watch({"lost": lost, "well": well}, LIMIT_S, clock, print)
    assert isinstance(outcomes["lost"], ActorLost)
    assert outcomes["well"] is DONE


def test_a_line_every_few_seconds_names_the_slowest() -> None:
    clock, lines = VirtualClock(), list[str]()
    fast, slow = Node(clock, moves_at_s=range(25), done_s=25), Node(clock, done_s=25)
    watch({"fast": fast, "slow": slow}, LIMIT_S, clock, lines.append)
    line = "0 of 2 done; slowest: slow, copying 1.safetensors, 0 of 99 bytes"
    assert lines == [line, line]


def test_the_table_has_a_row_per_node_and_the_problems_below() -> None:
    progress = StagingProgress("copying", "1.safetensors", 2, 99, 2)
    lost = ActorLost("10.0.0.3", "staging", "its process was killed or crashed")
    table = table_of(
        {
            "10.0.0.1": as_node_outcome(DONE),
            "10.0.0.2": as_node_outcome(Stalled(progress, LIMIT_S)),
            "10.0.0.3": as_node_outcome(lost),
        }
    )
    assert table == (
        "node      verdict          kept  copied         MiB\n"
        "10.0.0.1  copied              1       2         3.0\n"
        "10.0.0.2  stalled             0       0         0.0\n"
        "10.0.0.3  lost                0       0         0.0\n"
        "10.0.0.2: no byte moved for 30 s: copying 1.safetensors, 2 of 99 bytes. Look at its disk and "
        "its network, and stage again\n"
        "10.0.0.3: 10.0.0.3 was lost during staging: its process was killed or crashed. Bring the node "
        "back, and stage again\n"
    )


@pytest.mark.parametrize("error", [ValueError("of the call"), OSError("of the disk")])
def test_what_a_call_in_a_thread_raises_is_raised_by_its_result(error: Exception) -> None:
    def call(meter: ProgressMeter) -> NodeOutcome:
        meter.begin("reading", "1.safetensors", 9)
        raise error

    with pytest.raises(type(error)) as raised:
        result_of(ThreadJob(call, "a thread"))
    assert raised.value is error


def test_the_value_of_a_call_in_a_thread_is_its_result() -> None:
    def call(meter: ProgressMeter) -> NodeOutcome:
        meter.begin("reading", "1.safetensors", 9)
        return DONE

    assert result_of(ThreadJob(call, "a thread")) is DONE


def result_of(job: ThreadJob[NodeOutcome]) -> NodeOutcome | None:
    job.join()
    return job.result()
