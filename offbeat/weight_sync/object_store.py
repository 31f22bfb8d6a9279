"""Transport through Ray's object store. On one machine, engines read chunks in shared memory.

The release outlives the process that published it, so an engine that starts later can receive it
without the trainer.
"""

import msgspec
import numpy as np

from offbeat.weight_sync.delta_plugin import make_packer
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import release_digest
from offbeat.weight_sync.transport import PublishedRelease, Source, WholeShards


class ObjectStoreSender:
    """Sender of releases with one handle per chunk, a Ray object that holds the chunk's bytes."""

    def __init__(self, source: Source, *, delta: bool = False) -> None:
        """Create the sender.

        With ``delta``, each release also has its changes since the previous one.
        """
        self._source, self._packer = WholeShards(source), make_packer(delta=delta)
        self.delta_handles = self.handles if delta else 0

    @property
    def handles(self) -> int:
        return len(self._source.manifest.chunk_nbytes)

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        del version, layout
        packed = self._packer.pack(self._source, lambda _, nbytes: np.empty(nbytes, np.uint8))
        chunks = {each.bucket: each.data for each in packed.buckets}
        manifest = self._source.manifest.seal([each.digest for each in packed.buckets])
        digest = release_digest(manifest, manifest.chunk_digests)
        delta, reason = self._packer.agree([packed.changes], manifest, digest, str)
        if delta is not None:
            delta = msgspec.structs.replace(delta, chunks=tuple(packed.parts.values()))
        self._packer.published(digest, manifest.digest, chunks)
        return PublishedRelease(manifest, digest, tuple(chunks.values()), delta, reason)

    def forget(self) -> None:
        self._packer.forget()

    def close(self) -> None:
        """Do nothing, because no thread runs."""
