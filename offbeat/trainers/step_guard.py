"""Order of the calls of a split train step, the same for every backend. Pure.

    state            begin                microbatch, finish           abort
    CLOSED           opens a newer        only repeats                 nothing to do
    OPEN             only repeats         the next one, or repeats     closes
    BROKEN           refused              only repeats                 closes

A repeat is a key that already has a reply; the stored reply is returned and nothing runs. Replies
are kept until the next attempt begins. A call that raises may have left half a microbatch in the
gradients: the attempt is BROKEN, and an abort is the only way on.

Attempts increase over the whole run, steps need not: a restored trainer repeats older steps.
So the attempt alone decides which of two keys is newer.
"""

import enum
from collections.abc import Callable
from typing import TypeVar, cast

from offbeat.messages.failures import StepAlreadyOpen, StepBroken, StepOutOfOrder
from offbeat.messages.fences import StepKey

T = TypeVar("T")


class StepCall(enum.StrEnum):
    """The calls of a train step that carry a key and leave a reply."""

    BEGIN = "begin_train_step"
    MICROBATCH = "train_microbatch"
    FINISH = "finish_train_step"


class _State(enum.Enum):
    CLOSED = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()


class StepGuard:
    """Runs each call of a step once, in order, and stores its reply."""

    def __init__(self) -> None:
        self._state = _State.CLOSED
        self._last = (0, 0)  # (step, attempt) of the newest attempt that was begun or aborted
        # Of that attempt, in order of seq
        self._replies: dict[StepKey, tuple[StepCall, object]] = {}

    @property
    def is_open(self) -> bool:
        """Return whether an attempt has begun and is neither finished nor aborted."""
        return self._state is not _State.CLOSED

    def once(self, key: StepKey, call: StepCall, work: Callable[[], T]) -> T:
        """Return the stored reply of a repeated key; else run ``work``, if this call is next.

        Raises:
            StepAlreadyOpen: A begin while another attempt is open.
            StepOutOfOrder: Not the next call, or a key whose reply belongs to another call.
            Exception: Whatever ``work`` raised; nothing but an abort is accepted after it.
        """
        if key in self._replies:
            answered, reply = self._replies[key]
            if answered is not call:
                raise StepOutOfOrder(_text(key, call), f"{answered}, which had this key")
            return cast("T", reply)
        if call is StepCall.BEGIN:
            self._open(key)
        elif self._state is not _State.OPEN or key != self._next_key():
            is_broken = self._state is _State.BROKEN and key.attempt_id == self._last
            refusal = StepBroken if is_broken else StepOutOfOrder
            raise refusal(_text(key, call), self._expected())
        self._state = _State.BROKEN
        reply = work()
        self._state = _State.CLOSED if call is StepCall.FINISH else _State.OPEN
        self._replies[key] = (call, reply)
        return reply

    def abort(self, key: StepKey) -> bool:
        """Close the open attempt; True if there was one, whose work the caller then undoes.

        The key's attempt and all before it can never be begun again. An abort of an older attempt
        than the open one is late, and does nothing.
        """
        if key.attempt < self._last[1]:
            return False
        was_open = self.is_open
        if was_open or key.attempt > self._last[1]:
            self._state, self._last, self._replies = _State.CLOSED, key.attempt_id, {}
        return was_open

    def close(self) -> None:
        """Discard the open attempt, if any, and all replies: they belong to weights that are gone.

        Older attempts than the newest are still refused.
        """
        self._state, self._replies = _State.CLOSED, {}

    def _open(self, key: StepKey) -> None:
        if self.is_open and key.attempt_id != self._last:
            raise StepAlreadyOpen(*self._last, key.step)
        if key.seq != 0 or key.attempt <= self._last[1]:
            raise StepOutOfOrder(_text(key, StepCall.BEGIN), self._expected())
        self._last, self._replies = key.attempt_id, {}

    def _next_key(self) -> StepKey:
        return StepKey(*self._last, len(self._replies))

    def _expected(self) -> str:
        step, attempt = self._last
        if self._state is _State.CLOSED:
            return f"{StepCall.BEGIN} of an attempt after {attempt}, of step {step}, with seq 0"
        if self._state is _State.BROKEN:
            return f"abort_train_step of (step {step}, attempt {attempt}): a call of it failed"
        return f"(step {step}, attempt {attempt}, seq {len(self._replies)})"


def _text(key: StepKey, call: StepCall) -> str:
    return f"{call} (step {key.step}, attempt {key.attempt}, seq {key.seq})"
