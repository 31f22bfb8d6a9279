"""What an operator has requested: carried out in order, and nobody sleeps through it."""

from collections.abc import Callable

import pytest

from offbeat.controller.commands import Abort, Pause, Stop
from offbeat.controller.state import Operator


def test_commands_are_taken_out_in_the_order_they_were_sent() -> None:
    operator = Operator(lambda: None)
    for command in (Pause(), Stop(), Abort("enough")):
        operator.send(command)
    taken = [operator.next_command() for _ in range(3)]
    assert taken == [Pause(), Stop(), Abort("enough")]
    assert not operator.has_command()


REQUESTS: dict[str, Callable[[Operator], None]] = {
    "send": lambda operator: operator.send(Pause()),
    "pause": Operator.pause,
    "resume": Operator.resume,
    "stop": Operator.stop,
}


@pytest.mark.parametrize("request_of", REQUESTS.values(), ids=REQUESTS.keys())
def test_each_request_notifies_whoever_waits(request_of: Callable[[Operator], None]) -> None:
    notified = list[str]()
    request_of(Operator(lambda: notified.append("changed")))
    assert notified == ["changed"]


def test_a_run_that_stops_is_still_paused_until_it_is_resumed() -> None:
    operator = Operator(lambda: None)
    operator.pause()
    operator.stop()
    assert operator.is_paused and operator.is_stopping
    operator.resume()
    assert not operator.is_paused and operator.is_stopping


def test_the_first_reason_to_stop_is_what_ended_the_run() -> None:
    operator = Operator(lambda: None)
    assert operator.ended_by == ""
    operator.stop("supervision.wall_clock_limit_s=60")
    operator.stop()
    assert operator.ended_by == "supervision.wall_clock_limit_s=60"
