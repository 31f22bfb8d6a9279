"""A sender, receivers in threads, and ways to break them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from weight_models import Model

from offbeat.weight_sync.manifest import Bytes
from offbeat.weight_sync.receiver import ModuleReceiver, Receiver
from offbeat.weight_sync.source import ModuleSource
from offbeat.weight_sync.transport import PublishedRelease
from offbeat.weight_sync.transports.gloo_receiver import GlooReceiver, Received
from offbeat.weight_sync.transports.gloo_sender import GlooSender, StagedRelease
from offbeat.weight_sync.transports.messages import TransferTimeouts

PATIENT = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=60.0)  # on a busy machine too
HASTY = TransferTimeouts(slowest_bytes_per_s=1e6, slack_s=1.0)  # where somebody hangs on purpose
CHUNK_BYTES = 200
HOST = "127.0.0.1"


@dataclass
class Chunks(Sequence[Bytes]):
    """The chunks of a snapshot; ``strike`` is called before one of them is sent."""

    chunks: Sequence[Bytes]
    strike: Callable[[int], None]

    def __getitem__(self, index: Any) -> Any:
        self.strike(index)
        return self.chunks[index]

    def __len__(self) -> int:
        return len(self.chunks)


class Bench:
    """One model at the sender."""

    def __init__(
        self,
        seed: int = 1,
        timeouts: TransferTimeouts = PATIENT,
        incarnation: str = "incarnation-1",
    ) -> None:
        self.model = Model(seed)
        self.source = ModuleSource(self.model, CHUNK_BYTES)
        self.sender = GlooSender(self.source, host=HOST, incarnation=incarnation, timeouts=timeouts)
        self.count = len(self.source.manifest.chunk_nbytes)

    def struck(self, strike: Callable[[int], None]) -> PublishedRelease:
        """A release whose chunks are sent through ``strike``."""
        published = self.sender.publish(1)
        snapshot = self.sender.snapshot
        assert snapshot is not None
        self.sender.snapshot = StagedRelease(
            snapshot.manifest, snapshot.digest, Chunks(snapshot.chunks, strike)
        )
        return published


@dataclass
class End:
    """A receiver and what became of its last transfer."""

    name: str
    receiver: Receiver
    transport: GlooReceiver = field(init=False)
    outcome: Received | Exception | None = None

    def __post_init__(self) -> None:
        self.transport = GlooReceiver(self.name)

    def take(
        self,
        published: PublishedRelease,
        epoch: int,
        members: tuple[str, ...],
        sink: Callable[[int, Bytes], object] | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """One transfer, as an engine does it; never raises."""
        manifest, digest, (route,), *_ = published
        receiver = self.receiver

        def apply(index: int, data: Bytes) -> bool:
            return receiver.apply(epoch, index, data)

        try:
            receiver.begin(epoch, manifest)
            receiver.transaction.pause()
            self.outcome = self.transport.receive(
                route, epoch, members, manifest, sink or apply, given_up
            )
            receiver.verify(digest)
            receiver.commit(epoch)
        except Exception as error:  # noqa: BLE001 -- the test looks at it
            self.outcome = error
            receiver.abort()


def end(name: str, model: Model) -> End:
    return End(name, ModuleReceiver(model, name))


def together(*calls: Callable[[], None]) -> None:
    """All at once, to their ends."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def names(count: int) -> tuple[str, ...]:
    return tuple(f"g{index}" for index in range(count))


def flipped(data: Bytes) -> Bytes:
    """The same bytes but for one bit."""
    copy = data.copy()
    copy[0] ^= np.uint8(1)
    return copy
