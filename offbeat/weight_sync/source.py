"""Sources of weights: the tensors of a model, packed chunk by chunk."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from torch import Tensor, nn

from offbeat.weight_sync.chunks import Bytes, hash_tensors, pack, walk
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.manifest import Adapter, Manifest, plan
from offbeat.weight_sync.wire_format import wire_metas, wire_tensors
from offbeat.weight_sync.wire_format_plugin import UnconvertibleWeights


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers in a fixed order; tied ones once, under their first name.

    Two names are tied if they are the same elements of the same memory, in the same type.
    """
    state = module.state_dict(keep_vars=True)
    for name in _first_names(state):
        yield name, state[name].detach()


def tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each weight, by its name in ``named_weights`` and in the same order."""
    return _first_names(module.state_dict(keep_vars=True))


def _first_names(state: Mapping[str, Tensor]) -> dict[str, list[str]]:
    names = dict[tuple[object, ...], list[str]]()
    for name, tensor in state.items():
        names.setdefault(_identity(tensor), []).append(name)
    return {each[0]: each for each in names.values()}


def _identity(tensor: Tensor) -> tuple[object, ...]:
    if not tensor.numel() or tensor.device.type == "meta":
        return (id(tensor),)  # no memory to compare
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype as it is spelled in manifests."""
    return str(tensor.dtype).removeprefix("torch.")


class GatheredSource:
    """Packs the weights of a model, which may be spread over several ranks, one chunk at a time.

    Rank 0 iterates over ``chunks`` while all others ``take_part``. The manifest is created once:
    names, shapes and dtypes do not change during a run.
    """

    def __init__(
        self,
        metas: Iterable[tuple[str, tuple[int, ...], str]],
        named: Callable[[], Iterator[tuple[str, Tensor]]],
        chunk_bytes: int,
        policy: WirePolicy | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Lay out the weights.

        Args:
            metas: Name, shape and dtype of every weight, in the order of ``named``.
            named: Iterates over the whole weights, on all ranks together.
            chunk_bytes: Maximum size of a chunk.
            policy: Wire formats of the tensors.
            adapter: How the tensors are applied, if they are adapters alone.

        Raises:
            OffbeatError: Tensors cannot be converted to these formats.
        """
        self._policy, self._named = policy or WirePolicy(), named
        self.manifest: Manifest = plan(wire_metas(metas, self._policy), chunk_bytes, adapter)
        self._chunks = list(walk(self.manifest))

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        """Yield each chunk's bytes with their digest: a snapshot, taken when the chunk is drawn.

        Args:
            room: ``(chunk index, bytes)`` -> memory to pack it into; new memory by default.

        Raises:
            UnconvertibleWeights: The wire format cannot represent a matrix.
        """
        gathered = self._named()
        weights = wire_tensors(gathered, self._policy)
        for chunk in self._chunks:
            try:
                tensors = dict(next(weights) for _ in chunk.specs)
            except UnconvertibleWeights:
                for _ in gathered:  # the other ranks take part to the end
                    pass
                raise
            into = room(chunk.index, chunk.nbytes) if room else np.empty(chunk.nbytes, np.uint8)
            digest = pack(chunk, tensors, into)
            del tensors  # before the next ones are gathered: each may be a fused matrix of GiB
            yield into, digest

    def digests(self) -> Iterator[str]:
        """Yield the digest of each chunk as ``chunks`` does, without packing it.

        Tensors in main memory are hashed where they are; of others, one at a time is copied.
        """
        weights = wire_tensors(self._named(), self._policy)
        for chunk in self._chunks:
            yield hash_tensors(chunk, dict(next(weights) for _ in chunk.specs))

    def take_part(self) -> None:
        """Take part in the gathering while rank 0 iterates over all chunks."""
        for _ in self._named():
            pass


class ModuleSource(GatheredSource):
    """Packs the weights of a plain module."""

    def __init__(
        self, module: nn.Module, chunk_bytes: int, policy: WirePolicy | None = None
    ) -> None:
        metas = (
            (name, tuple(each.shape), dtype_name(each)) for name, each in named_weights(module)
        )
        super().__init__(metas, lambda: named_weights(module), chunk_bytes, policy)
