"""Errors of engines: refused requests, and the loss of an engine."""

from offbeat.messages.failures import EngineUnavailable, OffbeatError

__all__ = ["EngineUnavailable", "InvalidRequest", "UndecodableModel"]


class InvalidRequest(OffbeatError):
    """A generate request this engine can never serve. Nothing of it was accepted."""

    def __init__(self, request_id: str, problem: str, fix: str) -> None:
        super().__init__(request_id, problem, fix)
        self.request_id, self.problem, self.fix = request_id, problem, fix

    def __str__(self) -> str:
        return f"request {self.request_id!r} refused: {self.problem}. {self.fix}"


class UndecodableModel(OffbeatError):
    """A model this engine would decode wrongly, or not at all."""

    def __init__(self, model: str, problem: str, fix: str) -> None:
        super().__init__(model, problem, fix)
        self.model, self.problem, self.fix = model, problem, fix

    def __str__(self) -> str:
        return f"{self.model} cannot be served by the embedded engine: {self.problem}. {self.fix}"
