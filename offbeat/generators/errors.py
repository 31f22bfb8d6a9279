"""Errors of engines: refused requests, and the loss of an engine."""

from typing import Final

from offbeat.messages.failures import EngineUnavailable, OffbeatError

__all__ = ["NO_TOKENIZER_FIX", "EngineUnavailable", "InvalidRequest", "UndecodableModel"]

NO_TOKENIZER_FIX: Final = (
    "Put the tokenizer's files into the model directory, or end samples with stop_token_ids"
)
"""Way out for a request with stop strings where no tokenizer is."""


class InvalidRequest(OffbeatError):
    """A generate request that this engine can never serve. No part of it was accepted."""

    request_id: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"request {self.request_id!r} refused: {self.problem}. {self.fix}"


class UndecodableModel(OffbeatError):
    """A model that this engine would decode wrongly, or not at all."""

    model: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.model} cannot be served by the embedded engine: {self.problem}. {self.fix}"
