"""Fences, which reject calls of older controllers, and keys of train-step calls.

Actors check the fence of each call and refuse calls of a controller that was replaced. Pure.
"""

import msgspec

from offbeat.messages.failures import StaleFence


class Fence(msgspec.Struct, frozen=True):
    """Run and incarnation that every controller call carries. Actors refuse a lower incarnation."""

    run_id: str
    incarnation: int  # counts the controller's processes in this run, from 1


class StepKey(msgspec.Struct, frozen=True):
    """Key of one call of a train step, so that a repeated call is recognised.

    If a key is repeated, the stored reply is returned. If another step is begun while one is open,
    this raises ``StepAlreadyOpen``. If ``seq`` is not the next number, it raises
    ``StepOutOfOrder``.
    """

    step: int  # optimizer step, from 1
    attempt: int  # rises at every begin of the run, so no key is used twice
    seq: int  # 0 is begin; rises by one with each call of the attempt

    @property
    def attempt_id(self) -> tuple[int, int]:
        """Return step and attempt, which identify one try of a step."""
        return self.step, self.attempt

    def next(self) -> "StepKey":
        """Return the key of the following call of this attempt."""
        return StepKey(self.step, self.attempt, self.seq + 1)


class FenceGuard:
    """Accepts the highest incarnation of one run. The first fence seen binds the run."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._highest: Fence | None = None

    def check(self, fence: Fence) -> None:
        """Check the fence of a call.

        Raises:
            StaleFence: The caller belongs to another run or to an older incarnation.
        """
        highest = self._highest
        if highest is not None and (
            fence.run_id != highest.run_id or fence.incarnation < highest.incarnation
        ):
            raise StaleFence(self._actor, _text(fence), _text(highest))
        self._highest = fence


def _text(fence: Fence) -> str:
    return f"({fence.run_id}, incarnation {fence.incarnation})"
