"""Maps what a session raises to the error that an agent is answered with."""

from http import HTTPStatus
from typing import Final

from offbeat.endpoint.chat_bridge import TemplateRefused
from offbeat.endpoint.errors import LimitExceeded, RequestRefused, SessionFinished
from offbeat.generators.errors import InvalidRequest
from offbeat.messages.failures import OffbeatError, RolloutFailed, StrayMediaToken

CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
"""The code by which agent frameworks know that a conversation has become too long."""


def refusal_of(error: Exception) -> RequestRefused | None:
    """Return the answer to a request whose turn failed; None for a bug of this package."""
    match error:
        case SessionFinished():
            status, code = HTTPStatus.UNAUTHORIZED, "sample_finished"
        case (
            LimitExceeded(limit="max_sample_tokens" | "max_branches")
            | RolloutFailed(reason="prompt_too_long")
        ):
            return too_long(str(error))
        case LimitExceeded():
            status, code = HTTPStatus.TOO_MANY_REQUESTS, error.limit
        case TemplateRefused():
            status, code = HTTPStatus.BAD_REQUEST, "template_refused"
        case StrayMediaToken():
            message = f"{error.detail}. An agent's messages are text alone"
            return RequestRefused(HTTPStatus.BAD_REQUEST, error.reason, message, "messages")
        case InvalidRequest() | RolloutFailed(reason="prompt_empty"):
            status, code = HTTPStatus.BAD_REQUEST, "invalid_request"
        case OffbeatError():
            status, code = HTTPStatus.SERVICE_UNAVAILABLE, "engine_unavailable"
        case _:
            return None
    return RequestRefused(status, code, str(error))


def too_long(problem: str) -> RequestRefused:
    """Return the refusal of a conversation that has become too long."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, CONTEXT_LENGTH_EXCEEDED, problem, "messages")
