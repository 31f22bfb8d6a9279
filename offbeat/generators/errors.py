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

    def __init__(self, request_id: str, problem: str, fix: str) -> None:
        super().__init__(request_id, problem, fix)
        self.request_id, self.problem, self.fix = request_id, problem, fix

    def __str__(self) -> str:
        return f"request {self.request_id!r} refused: {self.problem}. {self.fix}"


class UndecodableModel(OffbeatError):
    """A model that this engine would decode wrongly, or not at all."""

    def __init__(self, model: str, problem: str, fix: str) -> None:
        super().__init__(model, problem, fix)
        self.model, self.problem, self.fix = model, problem, fix

    def __str__(self) -> str:
        return f"{self.model} cannot be served by the embedded engine: {self.problem}. {self.fix}"
