"""The receiving end: begin -> apply every chunk -> verify -> commit, or abort.

``Receiver`` is the same for every kind of engine: it keeps the transaction and checks every chunk.
What differs is the ``Target``: where the tensors go, and whether the old weights are still whole
while new ones come in.
"""

# pyright: reportPrivateImportUsage=false
# torch exports its calls on lists of tensors without declaring it.

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from offbeat.weight_sync.chunks import Bytes, WeightChunk, digest_of, tensor_views, walk
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.source import dtype_name, named_weights
from offbeat.weight_sync.transaction import Held, Transaction

Named = Sequence[tuple[str, Tensor]]


class Target(Protocol):
    """What holds the weights."""

    @property
    def in_place(self) -> bool:
        """``load`` overwrites what is served: from its first call on it is a mixture."""
        ...

    def held(self) -> Held:
        """Shape and wire type of every tensor that a transfer has to bring, by name."""
        ...

    def prepare(self, manifest: Manifest) -> None:
        """A transfer is about to come, and fits."""
        ...

    def load(self, tensors: Named) -> None:
        """Take these whole tensors, all of one chunk.

        Views of memory that the sender may share: they are only read, and may be kept until
        ``commit`` or ``rollback``.
        """
        ...

    def commit(self) -> None:
        """All tensors were loaded and are verified: serve them."""
        ...

    def rollback(self) -> None:
        """The transfer is given up. Afterwards a whole one succeeds, whatever came of this one.

        A target that is not ``in_place`` is as before ``prepare``.
        """
        ...


class Receiver:
    """Takes transfers into a target, wholly or not at all.

    An epoch is one transfer; a newer one drops what an older one left behind. A chunk of any epoch
    but the open one, or one that had come before, is dropped and counted; anything else that is not
    the next chunk as it was sent is refused, before the target sees it. After whatever raised, call
    ``abort``.
    """

    def __init__(self, target: Target, name: str = "receiver") -> None:
        self._target = target
        self._manifest: Manifest | None = None  # that the chunks are of
        self._chunks: list[WeightChunk] = []
        self.transaction = Transaction(name, in_place=target.in_place)

    def begin(self, epoch: int, manifest: Manifest) -> None:
        """Open a transfer; its tensors must be exactly those the target holds.

        Raises:
            TransferRefused: An older epoch, or a name, shape or type that does not fit. The target
                has not been touched.
        """
        if epoch > self.transaction.epoch:
            self.abort()
        self.transaction.begin(epoch, manifest, self._target.held())
        if self._manifest is None or not self._manifest.describes_as(manifest):
            self._manifest, self._chunks = manifest, list(walk(manifest))
        self._target.prepare(manifest)

    def apply(self, epoch: int, index: int, data: Bytes) -> bool:
        """Take a chunk; False if it was dropped. It must not change until commit or abort.

        Raises:
            TransferRefused: It is not the next one, or differs from what was sent.
        """
        if not self.transaction.arrived(epoch, index, data.nbytes, digest_of(data)):
            return False
        self._target.load(tensor_views(self._chunks[index], data))
        return True

    def verify(self, digest: str) -> None:
        """All chunks are here, and are the release with this digest.

        Raises:
            TransferRefused: They are not.
        """
        self.transaction.verify(digest)

    def commit(self, version: int) -> None:
        """Serve the verified weights. Idempotent: a commit that comes again changes nothing."""
        if self.transaction.may_commit(version):
            self._target.commit()
            self.transaction.commit(version)

    def abort(self) -> None:
        """Give the open transfer up. Idempotent; without one, nothing happens."""
        if self.transaction.open:
            self.transaction.aborting()
            self._target.rollback()
            self.transaction.aborted()


class ModuleTarget:
    """A plain module. New weights are kept beside the old ones and copied over at the commit."""

    in_place = False

    def __init__(self, module: nn.Module) -> None:
        self._tensors: Mapping[str, Tensor] = dict(named_weights(module))
        self._held: Held = {
            name: (tuple(tensor.shape), dtype_name(tensor))
            for name, tensor in self._tensors.items()
        }
        self._staged: list[tuple[str, Tensor]] = []

    def held(self) -> Held:
        return self._held

    def prepare(self, manifest: Manifest) -> None:
        del manifest

    def load(self, tensors: Named) -> None:
        self._staged.extend(tensors)

    def commit(self) -> None:
        """Overwrite in place, so that whoever holds a tensor sees it."""
        if self._staged:
            places = [self._tensors[name] for name, _ in self._staged]
            with torch.no_grad():  # one call: a call a tensor adds up
                torch._foreach_copy_(places, [tensor for _, tensor in self._staged])
        self._staged = []

    def rollback(self) -> None:
        self._staged = []


class ModuleReceiver(Receiver):
    """Takes releases into a plain module, which serves the old weights until the commit."""

    def __init__(self, module: nn.Module, name: str = "receiver") -> None:
        super().__init__(ModuleTarget(module), name)


class Collected:
    """Keeps the chunks of one transfer, each checked as it comes, for whoever takes them together."""

    def __init__(self, epoch: int, manifest: Manifest) -> None:
        self.chunks: list[Bytes] = []
        self._epoch, self._transaction = epoch, Transaction("this process", in_place=False)
        held = {spec.name: (spec.shape, spec.dtype) for spec in manifest.tensors}
        self._transaction.begin(epoch, manifest, held)

    def take(self, index: int, data: Bytes) -> bool:
        """As ``Receiver.apply``."""
        taken = self._transaction.arrived(self._epoch, index, data.nbytes, digest_of(data))
        if taken:
            self.chunks.append(data)
        return taken
