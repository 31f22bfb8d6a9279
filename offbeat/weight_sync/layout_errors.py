"""Errors of reshard plans; each names the tensor and the region."""

from collections.abc import Mapping

from offbeat.messages.failures import OffbeatError


class PlanHasHole(OffbeatError):
    """A region that a receiver needs and no sender holds."""

    tensor: str
    region: str  # as in [0:128, 0:64]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.tensor}: no sender holds {self.region}, which receivers "
            f"{', '.join(map(str, self.ranks))} need. Both sides must describe the same model"
        )


class LayoutRefused(OffbeatError):
    """Parallel sizes that do not go together, or do not divide a model."""

    what: str
    got: str
    want: str
    where: str = ""  # senders or receivers, and the tensor; empty: known to the caller

    def of(self, where: str) -> "LayoutRefused":
        """Return this error with the side, or the tensor, that is at fault."""
        return LayoutRefused(self.what, self.got, self.want, where)

    def named(self, keys: Mapping[str, str]) -> "LayoutRefused":
        """Return this error with the name of the size as its reader sets it."""
        return LayoutRefused(keys.get(self.what, self.what), self.got, self.want, self.where)

    def __str__(self) -> str:
        return f"{self.where and f'{self.where}: '}{self.what} is {self.got}, expected {self.want}"


class LayoutNotRecorded(OffbeatError):
    """A loader whose writes into a parameter do not form a layout."""

    parameter: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.parameter} {self.problem}, so the engine's layout cannot be recorded. Send it whole "
            "tensors: sync.transport=object_store"
        )
