"""Messages between a reward child and its parent: length-prefixed JSON, never pickle.

Parent: ``Hello`` once, then one ``RewardCall`` per group, or per episode of an agent, which
``CancelCall`` may end. Child: ``Ready`` or ``Refused`` once, then one ``RewardReply`` per sample, and a
``TryBegun`` before each try of an async function.
JSON rather than MessagePack, because a row may hold integers
of any size.
"""

from typing import Any, Final

import msgspec

from offbeat.environments.async_calls import CallLimits
from offbeat.environments.reward_value import RewardFault
from offbeat.messages import framing


class Hello(msgspec.Struct, frozen=True):
    """First message to a child: the function to import, and its limits."""

    target: str
    working_dir: str
    options: dict[str, Any]
    memory_mib: int
    source: str = ""  # digest that the target's source has to have; empty: any
    mark_fd: int | None = None  # of an ``EpisodeMark``: the target is an agent; None: a reward
    limits: CallLimits | None = None  # of an async function's calls; None: none


class RewardCall(msgspec.Struct, frozen=True, tag=True):
    """Request to score responses to one prompt. Calls of a child are numbered from 1.

    To an agent it is an episode: the prompt is its task, the one response an ``AgentClient``.
    """

    number: int
    prompt: msgspec.Raw  # the row as JSON
    responses: list[str]


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """Request to end an episode, which is replied to as at any other end."""

    number: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The target is imported.

    ``concurrent``: it is async, so the samples of a call run concurrently.
    """

    concurrent: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The target could not be imported."""

    detail: str


class TryBegun(msgspec.Struct, frozen=True, tag=True):
    """Notice that a call of an async function begins, or its next try."""


class RewardReply(msgspec.Struct, frozen=True, tag=True):
    """Reward of one sample, or the reason why it has none."""

    call: int
    sample: int
    reward: float | None
    reason: str = ""
    detail: str = ""
    fault: RewardFault = RewardFault.SAMPLE
    by_name: dict[str, float] = {}  # further rewards of an agent; msgspec copies the default
    answer: str | None = None  # final answer of the sample, see ``NamedRewards``
    traceback: str = ""  # of what user code raised


LONGEST_ANSWER_BYTES: Final = 1 << 20
"""Largest reply of a child: a number or a bounded text. Longer ones are refused."""


def framed(message: msgspec.Struct) -> bytes:
    """The message behind its length."""
    return framing.framed(msgspec.json.encode(message))
