"""Errors of the trainers."""

from offbeat.messages.failures import OffbeatError


class UntrainableModel(OffbeatError):
    """A model that this trainer cannot train correctly."""

    def __init__(self, model: str, problem: str, fix: str) -> None:
        super().__init__(model, problem, fix)
        self.model, self.problem, self.fix = model, problem, fix

    def __str__(self) -> str:
        return f"{self.model} cannot be trained: it {self.problem}. {self.fix}"


class UnfitColumns(OffbeatError):
    """A group whose columns cannot be trained; ``place`` is its index among a rank's groups."""

    def __init__(self, place: int, column: str, got: str, want: str, rank: int = 0) -> None:
        super().__init__(place, column, got, want, rank)
        self.place, self.column, self.got, self.want, self.rank = place, column, got, want, rank

    def on(self, rank: int) -> "UnfitColumns":
        """Return a copy of this error that names ``rank``."""
        return UnfitColumns(self.place, self.column, self.got, self.want, rank)

    def __str__(self) -> str:
        return f"column {self.column!r} is {self.got}; the trainer needs {self.want}"


class ColumnsMissing(OffbeatError):
    """The columns that were sent to a rank ahead of a call did not arrive."""

    def __init__(self, rank: int, during: str) -> None:
        super().__init__(rank, during)
        self.rank, self.during = rank, during

    def __str__(self) -> str:
        return f"trainer rank {self.rank} did not receive the columns of {self.during}"


class CheckpointMismatch(OffbeatError):
    """An intact checkpoint that this trainer cannot load. It is left as it is."""

    def __init__(self, checkpoint: str, what: str, got: str, want: str, fix: str) -> None:
        super().__init__(checkpoint, what, got, want, fix)
        self.checkpoint, self.what, self.fix = checkpoint, what, fix
        self.got, self.want = got, want

    def __str__(self) -> str:
        return (
            f"{self.checkpoint} belongs to {self.what} {self.got}; this trainer has {self.what} "
            f"{self.want}. {self.fix}"
        )
