"""Weights as engines of ``sync.quantize`` compute with them, under the trainer's own names."""

from torch import Tensor

from offbeat.trainers.expert_names import metas_apart, named_apart
from offbeat.weight_sync.precision import is_quantized
from offbeat.weight_sync.quantize import rounded
from offbeat.weight_sync.region import Shape


def has_quantized(name: str, shape: Shape) -> bool:
    """Return whether releases quantize a weight, or matrices of experts that it joins."""
    metas = metas_apart([(name, shape, "")])
    return any(is_quantized(each, part) for each, part, _ in metas)


def as_quantized(name: str, weight: Tensor) -> Tensor:
    """Return a copy of a whole weight with each matrix that releases quantize rounded as they are.

    Raises:
        UnquantizableWeights: A block holds an infinity or a NaN.
    """
    made = weight.detach().clone()
    for each, matrix in named_apart([(name, made)]):
        if is_quantized(each, tuple(matrix.shape)):
            matrix.copy_(rounded(each, matrix))
    return made
