"""What the driver makes of signals; whole runs that get them: ``tests/live/test_live_signals.py``."""

import signal

import pytest

from offbeat.launch.session import Interrupted, Signals, exit_code

pytestmark = pytest.mark.usefixtures("default_signals")


def test_while_nobody_watches_a_signal_strikes_where_the_process_is() -> None:
    signals = Signals()
    with signals.install(), pytest.raises(Interrupted, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    assert signals.received is signal.SIGTERM


def test_a_terminal_that_is_closed_ends_a_run_in_order_unless_it_was_started_with_nohup() -> None:
    signals = Signals()
    signals.watched = signals.begun = True
    with signals.install():
        signal.raise_signal(signal.SIGHUP)
    assert signals.received is signal.SIGHUP
    under_nohup = Signals()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with under_nohup.install():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert under_nohup.received is None


def start_of_ray(signals: Signals, interrupts: int, done: list[str]) -> None:
    with signals.held_back():
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
        done.append("the rest of it")
        raise ConnectionError("its processes were interrupted, too")


@pytest.mark.parametrize(("interrupts", "done"), [(1, ["the rest of it"]), (2, [])])
def test_ray_is_not_interrupted_while_it_starts_but_by_a_second_signal(
    interrupts: int, done: list[str]
) -> None:
    signals, seen = Signals(), list[str]()
    with signals.install(), pytest.raises(Interrupted, match="SIGINT"):
        start_of_ray(signals, interrupts, seen)
    assert seen == done


def test_the_first_thing_that_asks_for_the_end_is_its_reason() -> None:
    signals = Signals()
    signals.watched = True
    signals.stop("run.stop()")
    with signals.install():
        signal.raise_signal(signal.SIGTERM)
    assert signals.received is signal.SIGINT
    assert signals.reason == "run.stop()"


def test_a_run_that_has_not_begun_is_not_ended_in_order() -> None:
    signals = Signals()
    signals.watched = True
    with signals.install():
        assert not signals.at_once
        signal.raise_signal(signal.SIGINT)
    assert signals.at_once


def test_a_run_is_ended_in_order_until_a_second_signal_comes() -> None:
    signals = Signals()
    signals.watched = signals.begun = True
    with signals.install():
        signal.raise_signal(signal.SIGINT)
        assert not signals.at_once
        signal.raise_signal(signal.SIGTERM)
    assert signals.at_once
    assert signals.received is signal.SIGINT, "the exit code is that of the first"


def test_a_signal_that_comes_after_the_last_step_does_not_make_a_finished_run_an_aborted_one() -> (
    None
):
    assert exit_code("finished", signal.SIGINT) == 0
    assert exit_code("aborted", signal.SIGINT) == 130
    assert exit_code("failed", signal.SIGTERM) == 143
    assert exit_code("failed", None) == 1
