"""Dtype and digest of a model's weights, the same for every backend."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec
import torch
import xxhash
from torch import Tensor

from offbeat.trainers.ranks.peers import Peers
from offbeat.weight_sync.chunks import as_bytes

_TEXT: Final = msgspec.msgpack.Decoder(str)


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


def shared_digest(weights: Iterable[tuple[str, Tensor]], peers: Peers, base: str = "") -> str:
    """Return ``weights_digest`` on all ranks, which call it together; only rank 0 hashes.

    Gathering the weights may need all ranks, so the others iterate too, and copy nothing.
    """
    if peers.rank:
        deque(weights, maxlen=0)
        return peers.broadcast("", _TEXT)
    return peers.broadcast(weights_digest(weights, base), _TEXT)


def weights_digest(weights: Iterable[tuple[str, Tensor]], base: str = "") -> str:
    """Return the xxh3-128 digest over names and bytes of all weights, in their order.

    ``base``: digest of the model that they are adapters of, if they are.
    """
    digest = xxhash.xxh3_128(base.encode())
    for name, tensor in weights:
        digest.update(name.encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()
