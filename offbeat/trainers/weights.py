"""Dtype and digest of a model's weights, the same for every backend."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from offbeat.weight_sync.source import as_bytes


class TrainedWeights(Protocol):
    """Some weights of a model, which may be sharded over several ranks, in a fixed order."""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name. All ranks iterate together."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each weight, by the name of its parameter."""
        ...

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, whole shape and dtype of each weight."""
        ...


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name in a recipe."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def weights_digest(weights: Iterable[tuple[str, Tensor]], base: str = "") -> str:
    """Return the xxh3-128 digest over names and bytes of all weights, in their order.

    ``base``: digest of the model that they are adapters of, if they are.
    """
    digest = xxhash.xxh3_128(base.encode())
    for name, tensor in weights:
        digest.update(name.encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()
