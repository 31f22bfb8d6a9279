"""A rank's end of weight sync: the first one sends, the others help to make weights whole."""

from collections.abc import Callable
from typing import Protocol, cast

from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.transport import PublishedRelease, Sender, Source
from offbeat.weight_sync.transports.choose import make_sender


class SharedSource(Source, Protocol):
    """Weights of which every rank has a part."""

    def take_part(self) -> None:
        """What the other ranks do while the first draws all chunks."""
        ...


class NullSender:
    """Of all ranks but the first."""

    handles = 0

    def __init__(self, source: SharedSource) -> None:
        self._source = source

    def publish(self, version: int) -> PublishedRelease:
        del version
        self._source.take_part()
        return PublishedRelease(self._source.manifest, "", ())

    def close(self) -> None:
        """Nothing to stop."""


def sender_of(spec: TrainerSpec, source: Source, host: Callable[[], str], life: str) -> Sender:
    """The sender of a rank. With several ranks its source is a shared one."""
    if spec.rank:
        return NullSender(cast("SharedSource", source))
    return make_sender(spec.config.sync, source, host, life)
