"""Ctrl-C during an import waits for its end."""

import signal
import threading

import pytest

from offbeat.messages.delayed_interrupt import delay_interrupt

pytestmark = pytest.mark.usefixtures("default_signals")


def interrupted_import(interrupts: int, done: list[str]) -> None:
    with delay_interrupt():
        for _ in range(interrupts):
            signal.raise_signal(signal.SIGINT)
        done.append("the import")


@pytest.mark.parametrize(("interrupts", "done"), [(1, ["the import"]), (2, [])])
def test_one_interrupt_arrives_at_the_end_of_the_block_and_a_second_one_at_once(
    interrupts: int, done: list[str]
) -> None:
    seen = list[str]()
    with pytest.raises(KeyboardInterrupt):
        interrupted_import(interrupts, seen)
    assert seen == done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_block_without_an_interrupt_and_a_thread_change_nothing() -> None:
    seen = list[object]()

    def block() -> None:
        with delay_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    with delay_interrupt():
        pass
    assert seen == [signal.default_int_handler]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
