"""The sending end: the weights of a module, packed chunk by chunk."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.weight_sync.chunks import Bytes, pack, walk
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import Manifest, TensorMeta, plan


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers in a fixed order; tied ones once, under their first name.

    Two names are tied if they are the same elements of the same memory, in the same type.
    """
    seen = set[tuple[object, ...]]()
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = _identity(tensor)
        if key not in seen:
            seen.add(key)
            yield name, tensor.detach()


def _identity(tensor: Tensor) -> tuple[object, ...]:
    if not tensor.numel() or tensor.device.type == "meta":
        return (id(tensor),)  # no memory to be recognised by
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory as uint8 [nbytes]; a copy only if it is strided."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def dtype_name(tensor: Tensor) -> str:
    """A tensor's type as manifests spell it."""
    return str(tensor.dtype).removeprefix("torch.")


class ModuleSource:
    """Packs the weights of a plain module.

    The manifest is made once: names, shapes and types do not change while a run goes on.
    """

    def __init__(
        self, module: nn.Module, chunk_bytes: int, policy: WirePolicy | None = None
    ) -> None:
        wire = policy or WirePolicy()
        self._module = module
        self.manifest: Manifest = plan(
            (
                TensorMeta(name, tuple(tensor.shape), wire(name, held), held)
                for name, tensor in named_weights(module)
                for held in (dtype_name(tensor),)
            ),
            chunk_bytes,
        )
        self._chunks = list(walk(self.manifest))

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Each chunk's bytes with their digest: a snapshot, made when the chunk is drawn.

        Args:
            room: ``(chunk index, bytes)`` -> where it is to be packed; new memory unless told.
        """
        tensors = self._module.state_dict(keep_vars=True)  # tied ones too; nobody asks for them
        for chunk in self._chunks:
            into = room(chunk.index, chunk.nbytes) if room else np.empty(chunk.nbytes, np.uint8)
            yield into, pack(chunk, tensors, into)
