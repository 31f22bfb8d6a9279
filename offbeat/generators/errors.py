"""Errors of the embedded engine, and a fix that several engines suggest."""

from typing import Final

from offbeat.config.engine_plugin import suggest_engine
from offbeat.messages.failures import OffbeatError

NO_TOKENIZER_FIX: Final = (
    "Put the tokenizer's files into the model directory, or end samples with stop_token_ids"
)
"""Suggested fix if a request has stop strings and the tokenizer is missing."""


def advise_another_engine() -> str:
    """Advise to use an engine of a plug-in or, without such plug-ins, a different model."""
    others = suggest_engine()
    return f"use generator.backend={others}" if others else "use a model of a different family"


class UndecodableModel(OffbeatError):
    """This engine would decode the model incorrectly, or not at all.

    Fix: use the other engine, or another model (docs/model-proofs.md).
    """

    model: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.model} cannot be served by the embedded engine: {self.problem}. {self.fix}"
