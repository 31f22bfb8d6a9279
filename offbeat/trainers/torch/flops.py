"""Floating-point operations that a model's arithmetic needs, and the most that a device can do.

The count is that of model FLOPs utilisation (PaLM, arXiv:2204.02311, appendix B): of a matrix 2 per
weight and token forward, 2 for the gradient of its input and 2 for that of a trained weight; of a pair
of tokens 4 per dimension of every head forward, and twice that backward. Unlike there, only pairs
attend that a causal mask shows. Recomputation, padding and operations between the products do not
count.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch and transformers declare some functions without types.

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from offbeat.trainers.batches.packing import PADDING, PROMPT, PackedRows

PEAKS: Final = (
    ("H200", torch.bfloat16, 989e12),
    ("H200", torch.float32, 67e12),
    ("H100 PCIe", torch.bfloat16, 756e12),
    ("H100 PCIe", torch.float32, 51e12),
    ("H100", torch.bfloat16, 989e12),
    ("H100", torch.float32, 67e12),
    ("A100", torch.bfloat16, 312e12),
    ("A100", torch.float32, 19.5e12),
    ("L40S", torch.bfloat16, 362e12),
    ("L40S", torch.float32, 91.6e12),
    ("L4", torch.bfloat16, 121e12),
    ("L4", torch.float32, 30.3e12),
    ("RTX 4090", torch.bfloat16, 165e12),
    ("RTX 4090", torch.float32, 82.6e12),
)
"""FLOP/s by part of the device's name and dtype, dense, from the makers' data sheets; float32 without
TF32. The first entry that fits counts."""


def known_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the maker's FLOP/s of a device in a dtype; None where the table does not have it."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, held, peak in PEAKS if part in name and held == dtype), None)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of one forward and backward pass of a model, by what is computed."""

    token: float
    place: float  # whose logits are computed
    pair: float  # of tokens of which one attends to the other

    def of(self, packed: PackedRows) -> float:
        """Return the FLOPs of a microbatch."""
        tokens, pairs = tokens_and_pairs(packed)
        return self.token * tokens + self.place * len(packed.predicts_U) + self.pair * pairs


def model_flops(model: PreTrainedModel) -> ModelFlops | None:
    """Return the FLOPs of a dense causal LM; None for a model with other weights than matrices.

    Experts are such weights: how many of them a token uses, is not read from their shapes.
    """
    head = model.get_output_embeddings()
    matrices = [each for each in model.modules() if isinstance(each, nn.Linear | Conv1D)]
    seen = {id(each) for each in (*_weights(matrices), model.get_input_embeddings().weight)}
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    others = (each for each in model.parameters() if id(each) not in seen | tables)
    if not isinstance(head, nn.Linear | Conv1D) or any(each.ndim > 1 for each in others):
        return None
    config = model.config.get_text_config(decoder=True)
    heads: int = config.num_attention_heads
    size: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    body = (each for each in matrices if each is not head)
    return ModelFlops(
        token=sum(_per_weight(each) * each.numel() for each in _weights(body)),
        place=_per_weight(head.weight) * head.weight.numel(),
        pair=12 * config.num_hidden_layers * heads * size,
    )


def tokens_and_pairs(packed: PackedRows) -> tuple[int, int]:
    """Return the tokens of a microbatch without padding, and its pairs that attend."""
    if packed.trees:
        pairs = 0
        for tree in packed.trees:
            prompt = tree.prompt.stop - tree.prompt.start
            own = [branch.stop - branch.start for branch in tree.branches]
            pairs += _causal(prompt) + sum(_causal(each) + prompt * each for each in own)
        return packed.segments_RT.size, pairs
    pairs = 0
    for segments_T in packed.segments_RT:
        kinds, counts = np.unique(segments_T[segments_T != PADDING], return_counts=True)
        prompt = int(counts[kinds == PROMPT].sum())
        own = counts[kinds != PROMPT].tolist()
        pairs += _causal(prompt) + sum(_causal(each) + prompt * each for each in own)
    return int((packed.segments_RT != PADDING).sum()), pairs


def _causal(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


def _per_weight(weight: Tensor) -> int:
    return 6 if weight.requires_grad else 4


def _weights(modules: "Iterator[nn.Module] | list[nn.Linear | Conv1D]") -> Iterator[Tensor]:
    for module in modules:
        weight = module.weight
        assert isinstance(weight, Tensor)  # noqa: S101 -- of a matrix
        yield weight
