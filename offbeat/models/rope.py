"""Rotary frequencies that are fixed before the first forward pass.

With ``rope_type`` dynamic or longrope, transformers chooses frequencies by the longest row of each
batch: a sample's log-probabilities would depend on the samples beside it, and on how far each of them
has been decoded. They are fixed here to those of a row of ``max_model_len`` tokens, which is also
what vLLM does with longrope.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

_FROZEN: Final = "frozen"  # a rope_type that transformers does not update


@torch.no_grad()
def freeze_rope(model: nn.Module, max_model_len: int) -> None:
    """Fix the frequencies of every rotary embedding that would change with the length of a batch.

    The embeddings compute the frequencies themselves, in one call with the last position.
    """
    for module in model.modules():
        # Transformers' name on all its embeddings
        kinds: object = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            _reach(module, max_model_len)
            module.rope_type = _FROZEN  # pyright: ignore[reportArgumentType] -- a plain attribute
        elif isinstance(kinds, Mapping):
            changing = [name for name, kind in kinds.items() if _depends_on_length(kind)]
            for name in changing:
                _reach(module, max_model_len, layer_type=name)
            if changing:
                fixed: Any = {**kinds, **dict.fromkeys(changing, _FROZEN)}
                module.rope_type = fixed


def _depends_on_length(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


def _reach(module: nn.Module, max_model_len: int, **layer: str) -> None:
    buffer: Tensor = next(module.buffers())
    module(buffer.float(), torch.tensor([[max_model_len - 1]], device=buffer.device), **layer)
