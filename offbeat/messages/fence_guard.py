"""Fence check of actors, which refuses calls of a replaced controller. Pure."""

from offbeat.messages.failures import StaleFence
from offbeat.messages.fences import Fence


class FenceGuard:
    """Accepts the highest incarnation of one run; the first fence seen binds the run."""

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self._highest: Fence | None = None

    def check(self, fence: Fence) -> None:
        """Check the fence of a call.

        Raises:
            StaleFence: The caller is of another run or of an older incarnation.
        """
        highest = self._highest
        if highest is not None and (
            fence.run_id != highest.run_id or fence.incarnation < highest.incarnation
        ):
            raise StaleFence(self._actor, _text(fence), _text(highest))
        self._highest = fence


def _text(fence: Fence) -> str:
    return f"({fence.run_id}, incarnation {fence.incarnation})"
