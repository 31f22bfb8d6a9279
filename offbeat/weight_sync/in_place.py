"""Transport without a transfer: engines compute with the tensors that the trainer updates."""

from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import release_digest
from offbeat.weight_sync.transport import DigestedSource, PublishedRelease


class InPlaceSender:
    """Sender whose releases name the weights and hold none: they have digests, but no handles."""

    handles = 0
    delta_handles = 0

    def __init__(self, source: DigestedSource) -> None:
        """``source``: the weights, which are hashed where they are."""
        self._source = source

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        """Return the digests of the current weights, equal to those of any other transport.

        They name the weights only until these change.
        """
        del version, layout
        manifest = self._source.manifest.sealed(list(self._source.digests()))
        digest = release_digest(manifest, manifest.chunk_digests)
        return PublishedRelease(manifest, digest, ())

    def forget(self) -> None:
        """Do nothing: no release is the base of another one."""

    def close(self) -> None:
        """Do nothing: there is no thread to stop."""
