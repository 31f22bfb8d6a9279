"""Errors of weight transfers. They name the tensor, the chunk or the process."""

from collections.abc import Mapping

from offbeat.messages.failures import OffbeatError

_NAMED = 5  # tensor names listed in a message


class TransferRefused(OffbeatError):
    """A transfer does not match the weights, or was altered on the way.

    Fix: none: the engine is synced again.
    """

    epoch: int
    what: str
    got: str
    want: str

    def __str__(self) -> str:
        return f"transfer {self.epoch}: {self.what} is {self.got}, expected {self.want}"


class CoverageRefused(TransferRefused):
    """A transfer lacks tensors that the receiver needs, or has unknown tensors.

    Fix: load trainer and engines from the same model.
    """

    def __init__(self, epoch: int, missing: tuple[str, ...], unknown: tuple[str, ...]) -> None:
        super().__init__(epoch, "coverage", "", "")
        self.args = (epoch, missing, unknown)
        self.missing, self.unknown = missing, unknown

    def __str__(self) -> str:
        said = [
            f"{word} {len(names)} tensors: {', '.join(names[:_NAMED])}"
            for word, names in (("without", self.missing), ("with unknown", self.unknown))
            if names
        ]
        return (
            f"transfer {self.epoch}: coverage is {'; '.join(said)}. Trainer and generator must be "
            "loaded from the same model"
        )


class TransferFailed(OffbeatError):
    """A transfer could not continue because a peer ended, hangs, or stopped.

    ``at`` is the next chunk. All earlier chunks are verified, but nothing is committed.

    Fix: none: the engine is synced again; for slow links, see ``sync.slowest_mib_s`` and
    ``sync.slack_s``.
    """

    epoch: int
    at: int
    detail: str

    def __str__(self) -> str:
        return f"transfer {self.epoch} stopped before chunk {self.at}: {self.detail}"


class SenderGone(TransferFailed):
    """No process sends a transfer any more: its sender ended, or sends a different release.

    Fix: none: the weights are published again.
    """


class IllegalTransactionMove(OffbeatError):
    """A call is illegal in the state of a replica's transaction: a bug in the caller.

    Fix: report it.
    """

    replica: str
    call: str
    phase: str
    problem: str

    def __str__(self) -> str:
        return f"{self.replica} is {self.phase}: {self.call} is not possible, {self.problem}"


class WeightsNotCovered(OffbeatError):
    """The trainer's ranks together do not hold a tensor of a release completely.

    Fix: set ``sync.transport`` to ``object_store``.
    """

    tensor: str
    missing: int  # elements
    ranks: int

    def __str__(self) -> str:
        return (
            f"{self.tensor}: {self.missing} of its elements are on none of {self.ranks} trainer "
            "ranks. Set sync.transport to object_store, which gathers whole tensors"
        )


class ReplicasDiverged(OffbeatError):
    """Trainer ranks hold different values of the same weights.

    Fix: resume from the last checkpoint.
    """

    tensors: str
    ranks: tuple[int, ...]
    digests: tuple[str, ...]

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.ranks))
        digests = " and ".join(each[:8] for each in self.digests)
        return (
            f"trainer ranks {ranks} have different copies of {self.tensors}: digests {digests}. "
            "Their weights have diverged; resume from the last checkpoint"
        )


class PlansDiffer(OffbeatError):
    """Trainer ranks have different transfer plans.

    Fix: run the same recipe and version of offbeat everywhere.
    """

    ranks: tuple[int, ...]
    digests: tuple[str, ...]

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.ranks))
        digests = " and ".join(each[:8] for each in self.digests)
        return (
            f"trainer ranks {ranks} have different plans of a weight sync: {digests}. They must run "
            "the same recipe and the same version of offbeat"
        )


class PlanHasHole(OffbeatError):
    """A receiver needs a region that no sender holds.

    Fix: describe the same model on both sides.
    """

    tensor: str
    region: str  # as in [0:128, 0:64]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.tensor}: no sender holds {self.region}, which receivers "
            f"{', '.join(map(str, self.ranks))} need. Both sides must describe the same model"
        )


class LayoutRefused(OffbeatError):
    """Parallel sizes that contradict each other, or do not divide a model.

    Fix: change the named parallel size.
    """

    what: str
    got: str
    want: str
    where: str = ""  # senders or receivers, and the tensor; empty if the caller knows it

    def of(self, where: str) -> "LayoutRefused":
        """Return this error with the name of the faulty side or tensor."""
        return LayoutRefused(self.what, self.got, self.want, where)

    def name_key(self, keys: Mapping[str, str]) -> "LayoutRefused":
        """Return this error with the size named by the key that the user sets."""
        return LayoutRefused(keys.get(self.what, self.what), self.got, self.want, self.where)

    def __str__(self) -> str:
        return f"{self.where and f'{self.where}: '}{self.what} is {self.got}, expected {self.want}"


class LayoutNotRecorded(OffbeatError):
    """A loader writes into a parameter in a way that no layout can describe.

    Fix: set ``sync.transport`` to ``object_store``.
    """

    parameter: str
    problem: str

    def __str__(self) -> str:
        return (
            f"{self.parameter} {self.problem}, so the engine's layout cannot be recorded. Send it whole "
            "tensors: sync.transport=object_store"
        )
