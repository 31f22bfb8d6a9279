"""Sender of weight sync on a rank: rank 0 sends, the others help to gather the weights."""

from collections.abc import Callable
from typing import Protocol, cast

from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.transport import PublishedRelease, Sender, Source
from offbeat.weight_sync.transports.choose import make_sender


class SharedSource(Source, Protocol):
    """Weight source of which every rank has a part."""

    def take_part(self) -> None:
        """Take part in the gathering while rank 0 iterates over all chunks."""
        ...


class NullSender:
    """Sender of every rank but rank 0: it takes part in the gathering and sends nothing."""

    handles = 0

    def __init__(self, source: SharedSource) -> None:
        self._source = source

    def publish(self, version: int) -> PublishedRelease:
        del version
        self._source.take_part()
        return PublishedRelease(self._source.manifest, "", ())

    def close(self) -> None:
        """Do nothing: no thread was started."""


def sender_of(
    spec: TrainerSpec, source: Source, host: Callable[[], str], incarnation: str
) -> Sender:
    """Create the sender of a rank. With several ranks ``source`` is a ``SharedSource``."""
    if spec.rank:
        return NullSender(cast("SharedSource", source))
    return make_sender(spec.config.sync, source, host, incarnation)
