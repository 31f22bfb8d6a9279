"""Transport through Ray's object store: on one machine, engines read chunks in shared memory.

The release outlives the process that published it: an engine that starts later receives it without
the trainer.
"""

from offbeat.weight_sync.manifest import release_digest
from offbeat.weight_sync.transport import PublishedRelease, Source


class ObjectStoreSender:
    """Sender whose releases have one handle per chunk: an object that contains it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def handles(self) -> int:
        return len(self._source.manifest.chunk_nbytes)

    def publish(self, version: int) -> PublishedRelease:
        del version
        packed = list(self._source.chunks())
        manifest = self._source.manifest.sealed([digest for _, digest in packed])
        digest = release_digest(manifest, manifest.chunk_digests)
        return PublishedRelease(manifest, digest, tuple(chunk for chunk, _ in packed))

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""
