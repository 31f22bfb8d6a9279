"""Errors of the trainers."""

from offbeat.messages.failures import FixableError, OffbeatError


class UntrainableModel(FixableError):
    """A model that this trainer cannot train correctly.

    Fix: use a different model, backend or parallel size (docs/model-proofs.md).
    """

    form = "{} cannot be trained: it {}. {}"


class UnfitColumns(OffbeatError):
    """A group with untrainable columns. ``place`` is its index among a rank's groups.

    Fix: none: the group is rolled out again within ``rollout.data_retries``.
    """

    place: int
    column: str
    got: str
    want: str
    rank: int = 0

    def on(self, rank: int) -> "UnfitColumns":
        """Return a copy of this error that names ``rank``."""
        return UnfitColumns(self.place, self.column, self.got, self.want, rank)

    def __str__(self) -> str:
        return f"column {self.column!r} is {self.got}; the trainer needs {self.want}"


class ColumnsMissing(OffbeatError):
    """The columns that were sent to a rank ahead of a call did not arrive.

    Fix: none: the columns are sent again.
    """

    rank: int
    during: str

    def __str__(self) -> str:
        return f"trainer rank {self.rank} did not receive the columns of {self.during}"


class PartPackageMissing(OffbeatError):
    """A recipe needs a package that this Python cannot import.

    Fix: install the package that the message names.
    """


class CheckpointMismatch(OffbeatError):
    """An intact checkpoint that this trainer cannot load. It is not moved or changed.

    Fix: put the run's own checkpoints back, or follow the message.
    """

    checkpoint: str
    what: str
    got: str
    want: str
    fix: str

    def __str__(self) -> str:
        return (
            f"{self.checkpoint} belongs to {self.what} {self.got}; this trainer has {self.what} "
            f"{self.want}. {self.fix}"
        )


class AbsentModule(OffbeatError):
    """A module was called in a model that does not hold it.

    Fix: omit ``trainer.encoder``, or set ``trainer.backend`` to ``torch``.
    """

    module: str
    side: str

    def __str__(self) -> str:
        return (
            f"{self.module} was called, and this model holds the {self.side} side only. "
            "Leave trainer.encoder out, or set trainer.backend to torch"
        )
