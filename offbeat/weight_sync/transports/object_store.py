"""Transport through Ray's object store: on one machine, engines read chunks in shared memory.

The release outlives the process that published it: an engine that starts later receives it without
the trainer.
"""

from offbeat.weight_sync.delta import DeltaPacker
from offbeat.weight_sync.transport import PublishedRelease, Source


class ObjectStoreSender:
    """Sender whose releases have one handle per chunk: an object that contains it."""

    def __init__(self, source: Source, *, delta: bool = False) -> None:
        """``delta``: whether each release also has what changed since the one before."""
        self._source, self._packer = source, DeltaPacker(enabled=delta)
        self.delta_handles = self.handles if delta else 0

    @property
    def handles(self) -> int:
        return len(self._source.manifest.chunk_nbytes)

    def publish(self, version: int) -> PublishedRelease:
        del version
        manifest, digest, chunks, delta, reason = self._packer.pack(self._source)
        return PublishedRelease(manifest, digest, chunks, delta, reason)

    def forget(self) -> None:
        self._packer.forget()

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""
