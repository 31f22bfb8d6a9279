"""What a worker packs and a trainer reads; to the controller, an opaque handle."""


class Payload:
    """The columns of one group. It is gone with the controller that held it, unless spooled."""

    __slots__ = (
        "attempt",
        "incarnation",
        "newest",
        "oldest",
        "ordinal",
        "poison",
        "seed",
        "spooled",
    )

    def __init__(
        self,
        ordinal: int,
        attempt: int,
        incarnation: int,
        seed: int,
        versions: tuple[int, int],
        poison: str,
    ) -> None:
        self.ordinal, self.attempt, self.seed = ordinal, attempt, seed
        self.incarnation = incarnation  # of the controller that owns it
        self.oldest, self.newest = versions
        self.poison = poison
        self.spooled = False  # also on disk
