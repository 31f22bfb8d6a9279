"""Receiver of weights: begin -> apply every chunk -> verify -> commit, or abort.

``Receiver`` performs the transaction and checks every chunk. It is the same for every kind of
engine. Engines differ in their ``Target``, which stages the new tensors next to the served ones.
"""

# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false
# torch has no public names for its calls on lists of tensors, and exports them undeclared.

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from offbeat.doors import find_plugin
from offbeat.weight_sync.chunks import (
    BucketMemory,
    WeightChunk,
    dtype_name,
    iterate_weights,
    tensor_views,
    walk,
)
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.fingerprints import ReadBack
from offbeat.weight_sync.manifest import Manifest, digest_bytes
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.transaction import TensorSpecs, Transaction

Named = Sequence[tuple[str, Tensor]]


class Target(Protocol):
    """Weights of an engine that a receiver updates."""

    def specs(self) -> TensorSpecs:
        """Return shape and wire dtype of every tensor that a transfer must contain, by name."""
        ...

    def prepare(self, manifest: Manifest) -> None:
        """Prepare for a transfer. Its manifest has been checked."""
        ...

    def load(self, tensors: Named) -> None:
        """Stage these whole tensors, all of one chunk. The served weights do not change.

        The tensors may be views of memory shared with the sender. The target may read them, but not
        write to them, until ``commit`` or ``rollback``.
        """
        ...

    def commit(self) -> None:
        """Serve the loaded tensors. All of them have been verified."""
        ...

    def rollback(self) -> None:
        """Drop the staged tensors of an aborted transfer. Restore the state before ``prepare``."""
        ...


class TensorRegion(NamedTuple):
    """Region of a tensor, with its values."""

    name: str
    region: Region  # of the whole tensor
    values: Tensor


@runtime_checkable
class RegionTarget(Target, Protocol):
    """Target that also loads regions, for releases that are cut into regions."""

    def regions(self) -> Mapping[str, Sequence[Region]]:
        """Return, by name, the disjoint regions held of each tensor that is not held as a whole."""
        ...

    def load_regions(self, regions: Sequence[TensorRegion]) -> None:
        """Stage these regions, all of one chunk, like ``load`` stages whole tensors."""
        ...


class Receiver:
    """Loads transfers into a target, atomically.

    An epoch is one transfer. A newer epoch replaces an older, unfinished one. Duplicate chunks and
    chunks of other epochs are dropped and counted. Any other unexpected or altered chunk is refused
    before it reaches the target. After any error, the caller must call ``abort``.
    """

    def __init__(self, target: Target, name: str = "receiver") -> None:
        self._target = target
        self._manifest: Manifest | None = None  # manifest of the open transfer
        self._chunks: list[WeightChunk] = []
        self._pieces: list[list[tuple[str, Region]]] = []  # by chunk; empty: whole tensors
        self.transaction = Transaction(name)

    def begin(self, epoch: int, manifest: Manifest) -> None:
        """Open a transfer. It must contain exactly the target's tensors.

        Raises:
            TransferRefused: The epoch is not newer than all before, or a name, shape or dtype does
                not match. The target is unchanged.
        """
        if epoch > self.transaction.epoch:
            self.abort()
        target = self._target
        needed = target.regions() if isinstance(target, RegionTarget) else None
        if manifest.pieces and needed is None:
            raise TransferRefused(epoch, "a chunk", "regions of tensors", "whole tensors")
        self.transaction.begin(epoch, manifest, target.specs(), needed)
        if self._manifest is None or not self._manifest.describes_as(manifest):
            self._manifest, self._chunks = manifest, list(walk(manifest))
            self._pieces = [[] for _ in self._chunks] if manifest.pieces else []
            for piece in manifest.pieces:
                name = manifest.tensors[piece.tensor].name
                self._pieces[piece.chunk].append((name, piece.region))
        self._target.prepare(manifest)

    def apply(self, epoch: int, index: int, data: BucketMemory) -> bool:
        """Load a chunk. Return False if it was dropped.

        The chunk's memory must not change until commit or abort.

        Raises:
            TransferRefused: It is not the next chunk, or was altered on the way.
        """
        if not self.transaction.arrived(epoch, index, data.nbytes, digest_bytes(data)):
            return False
        views, target = tensor_views(self._chunks[index], data), self._target
        if self._pieces and isinstance(target, RegionTarget):
            pieces = zip(self._pieces[index], views, strict=True)
            target.load_regions([TensorRegion(*piece, values) for piece, (_, values) in pieces])
        else:
            target.load(views)
        return True

    def verify(self, digest: str) -> None:
        """Check that all chunks arrived and form the release with this digest.

        Raises:
            TransferRefused: A chunk is missing, or the digest differs.
        """
        self.transaction.verify(digest)

    def commit(self, version: int) -> None:
        """Serve the verified weights. Idempotent."""
        if self.transaction.may_commit(version):
            self._target.commit()
            self.transaction.commit(version)

    def abort(self) -> None:
        """Abort the open transfer, if any. Idempotent."""
        if self.transaction.open:
            self._target.rollback()
            self.transaction.abort()


class ModuleTarget:
    """Target for a plain module. New weights are staged, then copied into it at the commit."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors: Mapping[str, Tensor] = dict(iterate_weights(module))
        self._specs: TensorSpecs = {
            name: (tuple(tensor.shape), dtype_name(tensor))
            for name, tensor in self._tensors.items()
        }
        self._staged: list[tuple[Tensor, Tensor]] = []  # place, values

    def specs(self) -> TensorSpecs:
        return self._specs

    def prepare(self, manifest: Manifest) -> None:
        del manifest

    def load(self, tensors: Named) -> None:
        self._staged += [(self._tensors[name], values) for name, values in tensors]

    def regions(self) -> Mapping[str, Sequence[Region]]:
        return {}

    def load_regions(self, regions: Sequence[TensorRegion]) -> None:
        self._staged += [
            (self._tensors[each.name][each.region.slices], each.values) for each in regions
        ]

    def commit(self) -> None:
        """Overwrite the weights in place, so that references to the tensors stay valid."""
        if self._staged:
            places, values = map(list, zip(*self._staged, strict=True))
            with torch.no_grad():  # one call, because a call per tensor adds up
                torch._foreach_copy_(places, values)
        self._staged = []
        torch.cuda.empty_cache()  # tensors may have arrived in device memory; no-op without CUDA

    def rollback(self) -> None:
        self._staged = []

    def read_back(self) -> ReadBack:
        """Return the module's own tensors."""
        return ReadBack(self._tensors)


class LoadedWeights(Protocol):
    """Weights of an engine as it loaded them from files."""

    def make_target(self, epoch: int, manifest: Manifest) -> tuple[Target, Callable[[], ReadBack]]:
        """Return a target for releases of one layout, and a function that reads back its weights.

        Raises:
            TransferRefused: The release belongs to a different model than the engine loaded.
        """
        ...


class ReleaseKind(Protocol):
    """Applies the releases of one kind, which ``Adapter.kind`` names."""

    def open_base(self, module: nn.Module, digest: str) -> LoadedWeights:
        """Return the weights of a module before any release replaces them.

        Args:
            module: The engine's module.
            digest: Digest of the files from which it was loaded.
        """
        ...


def find_release_kind(kind: str) -> ReleaseKind:
    """Return the plug-in that applies releases of a kind.

    Raises:
        PluginUnusable: No package provides the plug-in, or its import fails.
    """
    return cast("ReleaseKind", find_plugin("release", kind))
