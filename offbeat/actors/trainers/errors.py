"""What trainers refuse, and why."""

from offbeat.messages.failures import OffbeatError


class UnsupportedModel(OffbeatError):
    """A model this trainer would train wrongly, or not at all."""

    def __init__(self, model: str, problem: str, fix: str) -> None:
        super().__init__(model, problem, fix)
        self.model, self.problem, self.fix = model, problem, fix

    def __str__(self) -> str:
        return f"{self.model} cannot be trained: it {self.problem}. {self.fix}"
