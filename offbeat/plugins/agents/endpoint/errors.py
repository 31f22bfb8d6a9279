"""Refusals of the endpoint, as errors in OpenAI's form."""

from http import HTTPStatus
from typing import Any, Final

_TYPES: Final = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "server_error",
    HTTPStatus.INTERNAL_SERVER_ERROR: "server_error",
}


class SessionFinished(Exception):
    """The sample of this session has ended, and nothing more is sampled for it."""

    def __str__(self) -> str:
        return "this sample is finished, so its token is no longer valid"


class LimitExceeded(Exception):
    """A request beyond a limit of its sample."""

    def __init__(self, limit: str, bound: int) -> None:
        super().__init__(limit, bound)
        self.limit, self.bound = limit, bound

    def __str__(self) -> str:
        return f"this sample has reached {self.limit}={self.bound}"


class RequestRefused(Exception):
    """Request that is answered with an error; nothing is sampled for it."""

    def __init__(
        self, status: HTTPStatus, code: str, message: str, param: str | None = None
    ) -> None:
        super().__init__(status, code, message, param)
        self.status, self.code, self.message, self.param = status, code, message, param

    def __str__(self) -> str:
        return f"{self.status.value} {self.code}: {self.message}"

    @property
    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


def refuse_field(param: str, problem: str) -> RequestRefused:
    """Return the refusal of one field of a request."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, "unsupported_value", f"{param}: {problem}", param)
