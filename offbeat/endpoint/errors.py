"""Refusals of the endpoint, each with the fields of an error in OpenAI's form."""


class SessionFinished(Exception):
    """The sample of this session is over; nothing more is sampled for it."""

    def __str__(self) -> str:
        return "this sample is finished: its token is of no use any more"


class LimitExceeded(Exception):
    """A request beyond a limit of its sample."""

    def __init__(self, limit: str, bound: int) -> None:
        super().__init__(limit, bound)
        self.limit, self.bound = limit, bound

    def __str__(self) -> str:
        return f"this sample has reached {self.limit}={self.bound}"
