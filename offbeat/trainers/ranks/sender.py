"""Sender of a rank that only helps rank 0 to gather."""

from typing import Protocol

from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.transport import PublishedRelease, Source


class SharedSource(Source, Protocol):
    """Weight source of which every rank has a part."""

    def take_part(self) -> None:
        """Take part in the gathering while rank 0 iterates over all chunks."""
        ...


class NullSender:
    """Sender of every rank but rank 0: it takes part in the gathering and sends nothing."""

    handles = delta_handles = 0

    def __init__(self, source: SharedSource) -> None:
        self._source = source

    def publish(self, version: int, layout: EngineLayout | None = None) -> PublishedRelease:
        del version, layout
        self._source.take_part()
        return PublishedRelease(self._source.manifest, "", ())

    def forget(self) -> None:
        """Do nothing: rank 0 keeps the base."""

    def close(self) -> None:
        """Do nothing: no thread was started."""
