"""Errors of the megatron trainer."""

from offbeat.messages.failures import OffbeatError


class UnsupportedLayout(OffbeatError):
    """A setting that this world of ranks or this model does not support."""

    def __init__(self, setting: str, got: str, want: str) -> None:
        super().__init__(setting, got, want)
        self.setting, self.got, self.want = setting, got, want

    def __str__(self) -> str:
        return f"{self.setting} is {self.got}. Set it to {self.want}"


class UnmappedParameter(OffbeatError):
    """A parameter of the megatron model for which no rule yields a Hugging Face name."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(parameter, problem)
        self.parameter, self.problem = parameter, problem

    def __str__(self) -> str:
        return f"{self.parameter} {self.problem}. Add a rule for it to megatron/mapping.py"


class IncompleteWeights(OffbeatError):
    """Files that do not contain all weights of a model."""

    def __init__(self, where: str, tensor: str, problem: str) -> None:
        super().__init__(where, tensor, problem)
        self.where, self.tensor, self.problem = where, tensor, problem

    def __str__(self) -> str:
        return f"{self.where} does not hold the weights of this model: {self.tensor} {self.problem}"
