"""The receiving end: begin -> apply every chunk -> commit, or abort. All or nothing.

Chunks are checked and staged as they come; the module is written only in ``commit``, when all of
them have been verified. Until then it serves what it served before.
"""

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor, nn

from offbeat.messages.failures import OffbeatError
from offbeat.weight_sync.manifest import Manifest, TensorSpec, chunk_tensors, release_digest
from offbeat.weight_sync.source import as_bytes, named_weights


class TransferRefused(OffbeatError):
    """A transfer that does not fit the module, or did not arrive as it was sent."""

    def __init__(self, epoch: int, what: str, got: str, want: str) -> None:
        super().__init__(epoch, what, got, want)
        self.epoch, self.what, self.got, self.want = epoch, what, got, want

    def __str__(self) -> str:
        return f"transfer {self.epoch}: {self.what} is {self.got}, expected {self.want}"


class ModuleReceiver:
    """Takes releases into a plain module.

    An epoch is one transfer. A chunk of any epoch but the open one is refused; ``begin`` of a newer
    epoch drops what an older one left staged.
    """

    def __init__(self, module: nn.Module) -> None:
        self._targets: dict[str, Tensor] = dict(named_weights(module))
        self._epoch = -1
        self._manifest: Manifest | None = None
        self._walk: list[tuple[int, int, list[TensorSpec]]] = []
        self._staged: list[NDArray[np.uint8]] = []
        self._digests: list[str] = []

    def begin(self, epoch: int, manifest: Manifest) -> None:
        """Open a transfer; its tensors must be exactly the module's.

        Raises:
            TransferRefused: An older epoch, or a name, shape or type that does not fit.
        """
        if epoch <= self._epoch:
            raise TransferRefused(epoch, "epoch", str(epoch), f"more than {self._epoch}")
        self.abort()
        self._epoch = epoch
        names = {spec.name for spec in manifest.tensors}
        if missing := sorted(self._targets.keys() - names):
            raise TransferRefused(epoch, "coverage", f"without {missing[:3]}", "every tensor")
        if unknown := sorted(names - self._targets.keys()):
            raise TransferRefused(epoch, "coverage", f"with unknown {unknown[:3]}", "known names")
        for spec in manifest.tensors:
            target = self._targets[spec.name]
            got, want = (
                (spec.shape, f"torch.{spec.dtype}"),
                (tuple(target.shape), str(target.dtype)),
            )
            if got != want:
                raise TransferRefused(epoch, f"tensor {spec.name!r}", str(got), str(want))
        self._manifest, self._walk = manifest, list(chunk_tensors(manifest))

    def apply(self, epoch: int, index: int, chunk: NDArray[np.uint8]) -> None:
        """Stage the next chunk. The array must not change until ``commit`` or ``abort``."""
        if epoch != self._epoch or self._manifest is None:
            raise TransferRefused(epoch, "epoch", str(epoch), f"the open one, {self._epoch}")
        if index != len(self._staged):
            raise TransferRefused(epoch, "chunk index", str(index), str(len(self._staged)))
        if index >= len(self._walk) or chunk.nbytes != self._walk[index][1]:
            want = self._walk[index][1] if index < len(self._walk) else "no further chunk"
            raise TransferRefused(epoch, f"size of chunk {index}", str(chunk.nbytes), str(want))
        self._digests.append(xxhash.xxh3_128_hexdigest(chunk.data))
        self._staged.append(chunk)

    def verify(self, digest: str) -> None:
        """All chunks are here, as they were sent."""
        manifest, epoch = self._manifest, self._epoch
        if manifest is None or len(self._staged) != len(manifest.chunk_nbytes):
            want = len(manifest.chunk_nbytes) if manifest else 0
            raise TransferRefused(epoch, "chunks received", str(len(self._staged)), str(want))
        got = release_digest(manifest, self._digests)
        if got != digest:
            raise TransferRefused(epoch, "digest", got, digest)

    def commit(self) -> None:
        """Write the verified chunks into the module. Call ``verify`` first."""
        for (_, _, specs), chunk in zip(self._walk, self._staged, strict=True):
            for spec in specs:
                _write(self._targets[spec.name], chunk[spec.offset : spec.offset + spec.nbytes])
        self.abort()

    def abort(self) -> None:
        """Drop what is staged. Idempotent; the module is as before ``begin``."""
        self._manifest, self._walk, self._staged, self._digests = None, [], [], []


def _write(target: Tensor, source: NDArray[np.uint8]) -> None:
    """Overwrite a tensor with bytes; in place, so that whoever holds the tensor sees it."""
    if target.device.type == "cpu" and target.is_contiguous():
        np.copyto(as_bytes(target).numpy(), source)
    else:  # a copy first: torch warns about memory it may not write, such as shared memory
        staged = torch.from_numpy(source.copy())
        target.copy_(staged.view(target.dtype).view(target.shape))
