"""Who may still speak, and which call of a step this is."""

import msgspec


class Fence(msgspec.Struct, frozen=True):
    """Sent with every call of the controller; a lower incarnation is refused."""

    run_id: str
    incarnation: int  # process lives of the controller in this run, from 1


class StepKey(msgspec.Struct, frozen=True):
    """Names one call of a train step, so that a repeated call is recognised.

    The same key again returns the stored reply; another step while one is open raises
    ``StepAlreadyOpen``; a ``seq`` that is not the next one raises ``StepOutOfOrder``.
    """

    step: int  # optimizer step, from 1
    attempt: int  # rises at every begin of the run, so no key is used twice
    seq: int  # 0 is begin; each following call of the attempt is one more

    @property
    def attempt_id(self) -> tuple[int, int]:
        """Which try of which step."""
        return self.step, self.attempt

    def next(self) -> "StepKey":
        """The key of the following call of this attempt."""
        return StepKey(self.step, self.attempt, self.seq + 1)
