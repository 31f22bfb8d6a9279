"""Gate at which decode steps and optimizer steps take turns on one copy of the weights.

    trainer's thread    close -------- optimizer step ------- open
    engine's thread     step | nothing                            | commit of the release | step

An engine decodes only with the edition of the weights that it has committed. An applied step makes a
new edition; one that was not applied leaves the edition as it is.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class WeightGate:
    """Keeps users of the weights and changes of the weights apart. Any thread may call it.

    An edition is the weights between two changes.
    """

    def __init__(self) -> None:
        """Create an open gate."""
        self._changed = threading.Condition()
        self._edition, self._is_closed, self._users = 0, False, 0
        self._refused = dict[object, Callable[[], object]]()  # what to call at the next opening

    def close(self) -> bool:
        """Refuse new uses, wait for present ones to end, and return whether the gate was open."""
        with self._changed:
            was_open, self._is_closed = not self._is_closed, True
            self._changed.wait_for(lambda: not self._users)
            return was_open

    def open(self, *, changed: bool) -> None:
        """Permit use again: of a new edition if the weights have changed."""
        with self._changed:
            self._edition += changed
            self._is_closed = False
            self._changed.notify_all()
            refused = [*self._refused.values()]
            self._refused.clear()
        for retry in refused:
            retry()

    def begin(self, edition: int | None, user: object, retry: Callable[[], object]) -> bool:
        """Begin to use an edition, or return False; ``retry`` is then called at the next opening."""
        with self._changed:
            if self._is_closed or edition != self._edition:
                self._refused[user] = retry
                return False
            self._users += 1
            return True

    def enter(self, *, waits: bool = False) -> int | None:
        """Begin to use the present edition; return it, or None if the gate is closed.

        ``waits``: wait until it is open.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: not self._is_closed)
            if self._is_closed:
                return None
            self._users += 1
            return self._edition

    def end(self) -> None:
        """End a use that was begun."""
        with self._changed:
            self._users -= 1
            self._changed.notify_all()


class EngineTurns:
    """Steps of one engine, which decodes with the edition that it has adopted."""

    def __init__(self, gate: WeightGate) -> None:
        """``gate`` guards the weights that the engine computes with."""
        self._gate = gate
        self._edition: int | None = None

    def begin(self, retry: Callable[[], object]) -> bool:
        return self._gate.begin(self._edition, self, retry)

    def end(self) -> None:
        self._gate.end()

    @contextmanager
    def reading(self) -> Generator[bool]:
        """Keep the weights as they are in the block, unless they are not of the adopted edition."""
        edition = self._gate.enter()
        try:
            yield edition is not None and edition == self._edition
        finally:
            if edition is not None:
                self._gate.end()

    @contextmanager
    def adopting(self) -> Generator[bool]:
        """Use the present edition in the block, and adopt it if the block does not raise.

        The block gets False while the weights are changing. It must raise then.
        """
        edition = self._gate.enter()
        try:
            yield edition is not None
            self._edition = edition
        finally:
            if edition is not None:
                self._gate.end()
