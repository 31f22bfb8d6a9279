"""Forward passes with the weights that engines use under ``sync.quantize``."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from contextlib import AbstractContextManager
from functools import partial

from torch import Tensor, nn

from offbeat.plugins.float8.precision import is_quantized
from offbeat.plugins.float8.quantize import round_matrix
from offbeat.trainers.expert_names import APART, split_experts
from offbeat.trainers.torch.exchanged_weights import exchange_weights
from offbeat.weight_sync.region import Shape


def has_quantized(name: str, shape: Shape) -> bool:
    """Return whether releases quantize a weight, or the experts' matrices that it contains."""
    metas = APART.metas([(name, shape, "float32")])
    return any(is_quantized(each, part) for each, part, _ in metas)


def as_quantized(name: str, weight: Tensor) -> Tensor:
    """Return a copy of a whole weight, with its quantized matrices rounded as in releases.

    Raises:
        UnquantizableWeights: A block holds an infinity or a NaN.
    """
    made = weight.detach().clone()
    for each, matrix in split_experts([(name, made)]):
        if is_quantized(each, tuple(matrix.shape)):
            matrix.copy_(round_matrix(each, matrix))
    return made


def quantize_matrices(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which a model computes like engines with quantized matrices.

    Gradients are off. All ranks must enter it together.
    """
    return exchange_weights(
        (module, module, key, partial(as_quantized, f"{prefix}.{key}"))
        for prefix, module in model.named_modules()
        for key, each in module.named_parameters(recurse=False)
        if has_quantized(f"{prefix}.{key}", tuple(each.shape))
    )
