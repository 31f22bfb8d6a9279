"""Order of a train step's calls for fake trainers, independent of the trainers' guard.

If a fake called the product's ``StepGuard``, it could not show that the guard is wrong.
"""

from collections.abc import Callable
from typing import Any

from offbeat.messages.failures import StepAlreadyOpen, StepBroken, StepOutOfOrder
from offbeat.messages.fences import StepKey


class StepKeys:
    """The answered keys of one attempt, and the next key."""

    def __init__(self) -> None:
        self._newest = 0  # newest attempt that was begun or aborted
        self._next: StepKey | None = None  # None: no step is open
        self._has_failed = False
        self._answered: dict[tuple[StepKey, str], Any] = {}

    @property
    def is_open(self) -> bool:
        return self._next is not None

    def once(self, key: StepKey, call: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 -- any reply
        """Return the earlier answer to this call, or run ``work`` if the call is the next one."""
        if (key, call) in self._answered:
            return self._answered[key, call]
        refused, due = f"{call} {key}", self._next
        is_of_open = due is not None and key.attempt_id == due.attempt_id
        if call == "begin_train_step":
            if due is not None and not is_of_open:
                raise StepAlreadyOpen(*due.attempt_id, key.step)
            if key.seq or key.attempt <= self._newest:
                raise StepOutOfOrder(refused, f"an attempt after {self._newest}, with seq 0")
            self._newest, self._next, self._answered = key.attempt, key, {}
        elif self._has_failed and is_of_open and due is not None and key.seq >= due.seq:
            raise StepBroken(refused, "abort_train_step")
        elif self._has_failed or key != due:
            raise StepOutOfOrder(refused, str(due))
        self._has_failed = True
        answer = self._answered[key, call] = work()
        self._has_failed = False
        self._next = None if call == "finish_train_step" else key.next()
        return answer

    def abort(self, key: StepKey) -> bool:
        """Close the open attempt, unless ``key`` is of an older one. Return whether one closed."""
        was_open = self.is_open and key.attempt >= self._newest
        if was_open or key.attempt > self._newest:
            self._newest, self._answered = key.attempt, {}
            self._next, self._has_failed = None, False
        return was_open

    def close(self) -> None:
        """Forget the open attempt and all answers."""
        self._next, self._has_failed, self._answered = None, False, {}
