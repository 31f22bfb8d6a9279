"""Errors of the embedded engine, and a fix that several engines name."""

from typing import Final

from offbeat.messages.failures import OffbeatError

NO_TOKENIZER_FIX: Final = (
    "Put the tokenizer's files into the model directory, or end samples with stop_token_ids"
)
"""Way out for a request with stop strings where no tokenizer is."""


class UndecodableModel(OffbeatError):
    """A model that this engine would decode wrongly, or not at all."""

    model: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.model} cannot be served by the embedded engine: {self.problem}. {self.fix}"
