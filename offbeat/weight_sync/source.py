"""The sending end: the weights of a module, packed chunk by chunk."""

from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.weight_sync.manifest import Manifest, chunk_tensors, plan

Bytes = NDArray[np.uint8]


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers in a fixed order; tied ones once, under their first name."""
    seen = set[int]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8 [nbytes]; a copy only if it is strided."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class ModuleSource:
    """Packs the weights of a plain module.

    The manifest is made once: names, shapes and types do not change while a run goes on.
    """

    def __init__(self, module: nn.Module, chunk_bytes: int) -> None:
        self._module = module
        self.manifest: Manifest = plan(
            (
                (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in named_weights(module)
            ),
            chunk_bytes,
        )

    def chunks(self) -> Iterator[tuple[Bytes, str]]:
        """Each chunk's bytes with their digest: a snapshot, made when the chunk is drawn."""
        tensors = dict(named_weights(self._module))
        for _, nbytes, specs in chunk_tensors(self.manifest):
            packed = np.zeros(nbytes, np.uint8)
            into = torch.from_numpy(packed)
            for spec in specs:
                end = spec.offset + spec.nbytes
                into[spec.offset : end].copy_(as_bytes(tensors[spec.name]))
            yield packed, xxhash.xxh3_128_hexdigest(packed.data)
