"""Senders of several ranks: rank 0 sends, the others help it to gather."""

from typing import Any

from offbeat.trainers.senders import NullSender
from offbeat.weight_sync.manifest import plan
from offbeat.weight_sync.transport import PublishedRelease


class GatheredWeights:
    """A source of several ranks that counts in how many gatherings this rank took part."""

    def __init__(self) -> None:
        self.manifest = plan([("w", (16,), "uint8")], chunk_bytes=1024)
        self.gatherings = 0

    def take_part(self) -> None:
        self.gatherings += 1


def test_a_rank_that_sends_nothing_takes_part_in_every_gathering() -> None:
    source: Any = GatheredWeights()
    sender = NullSender(source)
    for version in (1, 2):
        assert sender.publish(version) == PublishedRelease(source.manifest, "", ())
        assert source.gatherings == version
