"""Errors of the megatron trainer."""

from offbeat.messages.failures import OffbeatError


class UnsupportedLayout(OffbeatError):
    """A setting that this world of ranks or this model does not support.

    Fix: change the named size or setting (docs/megatron.md).
    """

    setting: str
    got: str
    want: str

    def __str__(self) -> str:
        return f"{self.setting} is {self.got}. Set it to {self.want}"


class UnmappedParameter(OffbeatError):
    """A parameter of the megatron model for which no rule yields a Hugging Face name.

    Fix: set ``trainer.backend=torch``.
    """

    parameter: str
    problem: str

    def __str__(self) -> str:
        return f"{self.parameter} {self.problem}. Add a rule for it to megatron/mapping.py"


class IncompleteWeights(OffbeatError):
    """Files that do not contain all weights of a model.

    Fix: repair the model directory.
    """

    where: str
    tensor: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where} does not hold the weights of this model: {self.tensor} {self.problem}"
