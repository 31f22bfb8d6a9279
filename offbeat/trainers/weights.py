"""Dtype and digest of a model's weights, the same for every backend."""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from offbeat.weight_sync.source import as_bytes


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in a recipe."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return the xxh3-128 digest over names and bytes of all weights, in their order."""
    digest = xxhash.xxh3_128()
    for name, tensor in weights:
        digest.update(name.encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()
