"""What the weights of a model are, whatever holds them: their type and their digest."""

from collections.abc import Iterable

import torch
import xxhash
from torch import Tensor

from offbeat.weight_sync.source import as_bytes


def torch_dtype(name: str) -> torch.dtype:
    """The type of a config's name for it."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def weights_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """xxh3-128 over names and bytes of all weights, in their order."""
    digest = xxhash.xxh3_128()
    for name, tensor in weights:
        digest.update(name.encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()
