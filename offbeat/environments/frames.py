"""Defines the messages between a child and its parent: length-prefixed JSON.

The only pickled data is the code of a function that the user passes by value.

Parent: ``RewardTarget`` once, then one ``RewardCall`` per group or episode, which ``CancelCall``
may cancel. Child: ``Ready`` or ``Refused`` once, then one ``RewardReply`` per sample, and a
``TryBegun`` before each try of an async function. JSON rather than MessagePack, because a row may
hold integers of any size.
"""

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.config.by_value import PackedValue
from offbeat.config.user_code import CallForm
from offbeat.environments.async_calls import CallLimits
from offbeat.environments.reward_value import BadReward, NamedRewards
from offbeat.messages import framing


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """Function that a child runs, and its limits. The first message to the child."""

    target: str  # module:name
    working_dir: Path
    options: dict[str, Any]  # keyword arguments of every call
    memory_mib: int | None  # address space; None: no limit
    deadline_s: float | None  # of one sample's call; None: the caller cancels late calls
    start_s: float  # to start the process and import the target in it
    source: str = ""  # digest of the target's source when the run began; empty: unknown
    variables: tuple[str, ...] | None = None  # environment variables that it inherits; None: all
    limits: CallLimits | None = None  # of an async function's calls; None: none
    may_be_none: bool = False  # whether it may return None, if it does not apply to the sample
    value: PackedValue | None = None  # the function, if it was given by value
    form: CallForm | None = None  # how it is called; None: its form is not checked


class RewardCall(msgspec.Struct, frozen=True, tag=True):
    """Request to score responses to one prompt. Calls of a child are numbered from 1."""

    number: int
    prompt: msgspec.Raw  # the row as JSON
    responses: list[str]


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Request to end a call. The child still replies, as at any other end."""

    number: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Notice that the target is imported.

    If ``concurrent``, the target is async, and the samples of a call run concurrently.
    """

    concurrent: bool
    bases: tuple[str, ...] = ()  # names of a class's bases


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Notice that the target could not be imported, or has the wrong form."""

    detail: str  # the problem and the fix in a sentence
    problem: str
    fix: str


class TryBegun(msgspec.Struct, frozen=True, tag=True):
    """Notice that a call of an async function, or its next try, begins."""


class RewardReply(msgspec.Struct, frozen=True, tag=True):
    """Reward of one sample, or the reason why it is missing."""

    call: int
    sample: int
    rewards: NamedRewards | None = None
    problem: BadReward | None = None  # None: there are rewards


LONGEST_ANSWER_BYTES: Final = 1 << 20
"""Largest reply of a child: a number or a bounded text. Longer replies are refused."""


def frame_message(message: msgspec.Struct | RewardTarget) -> bytes:
    """Return the message with its length in front."""
    return framing.add_header(msgspec.json.encode(message, enc_hook=str))  # encodes a path


_NUMBER_BYTES: Final = 8
_MARK_BYTES: Final = _NUMBER_BYTES + 248


class CallMark:
    """Number of the call that the process executes at the moment, or 0 if none.

    Also holds the line of this code if the code blocks the event loop of the process. It is in
    shared memory, because a process that crashes or blocks cannot report anything.
    """

    def __init__(self, fd: int) -> None:
        """Map the file behind this descriptor. The descriptor may be closed afterwards."""
        os.truncate(fd, _MARK_BYTES)
        self._memory = mmap.mmap(fd, _MARK_BYTES)
        self._number = memoryview(self._memory)[:_NUMBER_BYTES].cast("Q")

    @property
    def number(self) -> int:
        return self._number[0]

    @number.setter
    def number(self, number: int) -> None:
        self._number[0] = number

    @property
    def blocking(self) -> str:
        """Return the line of code that blocks the event loop, or "" while the loop runs."""
        return self._memory[_NUMBER_BYTES:].rstrip(b"\0").decode(errors="replace")

    @blocking.setter
    def blocking(self, line: str) -> None:
        size = _MARK_BYTES - _NUMBER_BYTES
        self._memory[_NUMBER_BYTES:] = line.encode(errors="replace")[:size].ljust(size, b"\0")

    def close(self) -> None:
        self._number.release()
        self._memory.close()
