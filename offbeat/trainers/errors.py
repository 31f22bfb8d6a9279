"""What trainers refuse, and why."""

from offbeat.messages.failures import OffbeatError


class UntrainableModel(OffbeatError):
    """A model this trainer would train wrongly, or not at all."""

    def __init__(self, model: str, problem: str, fix: str) -> None:
        super().__init__(model, problem, fix)
        self.model, self.problem, self.fix = model, problem, fix

    def __str__(self) -> str:
        return f"{self.model} cannot be trained: it {self.problem}. {self.fix}"


class UnfitColumns(OffbeatError):
    """A group whose columns cannot be trained, by its place among the groups a rank was given."""

    def __init__(self, place: int, column: str, got: str, want: str, rank: int = 0) -> None:
        super().__init__(place, column, got, want, rank)
        self.place, self.column, self.got, self.want, self.rank = place, column, got, want, rank

    def on(self, rank: int) -> "UnfitColumns":
        """The same, of this rank's groups."""
        return UnfitColumns(self.place, self.column, self.got, self.want, rank)

    def __str__(self) -> str:
        return f"column {self.column!r} is {self.got}; the trainer needs {self.want}"


class ColumnsMissing(OffbeatError):
    """The columns that a rank was sent apart from a call did not arrive."""

    def __init__(self, rank: int, during: str) -> None:
        super().__init__(rank, during)
        self.rank, self.during = rank, during

    def __str__(self) -> str:
        return f"trainer rank {self.rank} did not receive the columns of {self.during}"


class CheckpointMismatch(OffbeatError):
    """A whole checkpoint that this trainer cannot take up. It is left as it is."""

    def __init__(self, checkpoint: str, what: str, got: str, want: str, fix: str) -> None:
        super().__init__(checkpoint, what, got, want, fix)
        self.checkpoint, self.what, self.fix = checkpoint, what, fix
        self.got, self.want = got, want

    def __str__(self) -> str:
        return (
            f"{self.checkpoint} is of {self.what} {self.got}; this trainer is of {self.what} "
            f"{self.want}. {self.fix}"
        )
