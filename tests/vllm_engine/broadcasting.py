"""A trainer's end of a broadcast, here or in a process of its own that can be struck."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.chunks import Bytes, digest_of
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.transports.gloo_sender import GlooSender, StagedRelease
from offbeat.weight_sync.transports.messages import TransferTimeouts

PATIENT = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=60.0)  # on a busy machine too
HASTY = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=1.0)  # where somebody hangs on purpose


class Packed:
    """A source of weights that are packed already."""

    def __init__(self, release: WeightRelease) -> None:
        self.release = release

    @property
    def manifest(self) -> Manifest:
        """Manifest of the release that is held now, with its canary."""
        return self.release.manifest

    def chunks(
        self, room: Callable[[int, int], Bytes] | None = None
    ) -> Iterator[tuple[Bytes, str]]:
        for index, chunk in enumerate(self.release.chunks):
            into = room(index, chunk.nbytes) if room else np.empty(chunk.nbytes, np.uint8)
            np.copyto(into, chunk)
            yield into, digest_of(into)


def sender_of(source: Packed, timeouts: TransferTimeouts = PATIENT) -> GlooSender:
    return GlooSender(source, host="127.0.0.1", incarnation="incarnation-1", timeouts=timeouts)


@dataclass
class Struck(Sequence[Bytes]):
    """Chunks that strike the thread that sends them before chunk ``at``."""

    chunks: Sequence[Bytes]
    at: int
    sign: int

    def __getitem__(self, index: Any) -> Any:
        if index == self.at:
            signal.pthread_kill(threading.get_ident(), self.sign)
        return self.chunks[index]

    def __len__(self) -> int:
        return len(self.chunks)


def doomed_trainer(told: Connection, release: WeightRelease, at: int, sign: int) -> None:
    """A process that publishes a release, and is struck before it has sent chunk ``at``."""
    sender = sender_of(Packed(release), PATIENT if sign == signal.SIGKILL else HASTY)
    told.send(sender.publish(release.version))
    whole = sender.snapshot
    assert whole is not None
    sender.snapshot = StagedRelease(whole.manifest, whole.digest, Struck(whole.chunks, at, sign))
    told.send("ready")
    told.recv()
