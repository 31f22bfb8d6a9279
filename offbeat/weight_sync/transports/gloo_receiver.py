"""Receiver of the gloo broadcast: joins a session, receives chunks, and rejoins if it breaks.

Blocking; run it in a thread of its own. Every wait has a timeout, so the thread ends by itself:
after a chunk's timeout if a peer hangs, after three times that and the slack if the sender does.
"""

import threading
from dataclasses import dataclass

from offbeat.messages.failures import OffbeatError
from offbeat.weight_sync.buffers import Buffers
from offbeat.weight_sync.errors import SenderGone, TransferFailed, TransferRefused
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.transport import Sink
from offbeat.weight_sync.transports.control import ControlClient
from offbeat.weight_sync.transports.group import (
    BroadcastGroup,
    BrokenLink,
    ChunkHeader,
    Device,
    meet,
    opened,
)
from offbeat.weight_sync.transports.messages import Join, Report, RoundPlan, Route


@dataclass(slots=True)
class Received:
    """Progress and counts of one received transfer."""

    at: int = 0  # chunks that the sink has received
    rounds: int = 0
    dropped_late: int = 0  # messages of another epoch or round
    dropped_twice: int = 0  # duplicate chunks


class GlooReceiver:
    """One engine's end of the broadcast.

    Its buffers are reused once no chunk of a transfer is referenced.
    """

    def __init__(self, member: str, buffers: Buffers | None = None) -> None:
        self._member, self._buffers = member, buffers or Buffers()
        # Bound to the address from which the last sender was reached
        self._device: Device | None = None

    def receive(
        self,
        route: Route,
        epoch: int,
        members: tuple[str, ...],
        manifest: Manifest,
        sink: Sink,
        cancelled: threading.Event | None = None,
    ) -> Received:
        """Pass every chunk of a release to ``sink``, in order, once.

        Args:
            route: Address of the sender.
            epoch: Epoch of the transfer; with ``members``, the same for every participant.
            members: Expected participants, including this one.
            manifest: Manifest of the release.
            sink: Receives each chunk; an error that it raises ends the transfer for this member
                only.
            cancelled: When set, stop at the next chunk.

        Raises:
            SenderGone: The sender ended, or holds another release.
            TransferFailed: The sender gave up, or this member was too slow.
        """
        join = Join(
            f"{epoch}.{members[0]}", epoch, members, self._member, route.incarnation, route.digest
        )
        control = ControlClient(route, epoch)
        try:
            control.send(join)
            if self._device is None or self._device.host != control.address:
                self._device = Device(control.address, route.timeouts.slack_s)
            transfer = _Transfer(control, route, join, manifest, sink, self._device)
            transfer.cancelled = cancelled or transfer.cancelled
            transfer.run(self._buffers)
        finally:
            control.close()
        return transfer.received


class _Transfer:
    def __init__(
        self,
        control: ControlClient,
        route: Route,
        join: Join,
        manifest: Manifest,
        sink: Sink,
        device: Device,
    ) -> None:
        self._control, self._route, self._join = control, route, join
        self._timeouts, self._epoch = route.timeouts, join.epoch
        self._sizes, self._sink, self._device = manifest.chunk_nbytes, sink, device
        self.received, self.cancelled = Received(), threading.Event()

    def run(self, buffers: Buffers) -> None:
        """Run rounds until every chunk has arrived."""
        got, most_s = self.received, self._timeouts.of(max(self._sizes, default=0))
        # The sender may be in the last round of another session, with a member that is silent; it
        # ends that as below, and then waits until the other members have joined.
        patience_s = 3 * most_s + 2 * self._timeouts.slack_s
        while True:
            plan = self._control.plan(got.at, patience_s)
            if plan.error:
                kind = SenderGone if plan.gone else TransferFailed
                raise kind(self._epoch, got.at, plan.error)
            error = self._round(plan, buffers)
            got.rounds += 1
            self._report(plan, error)
            if not error:
                return
            # The sender may still send a chunk, then wait for silent members.
            patience_s = 3 * most_s + self._timeouts.slack_s

    def _round(self, plan: RoundPlan, buffers: Buffers) -> str:
        """Take part until the last chunk has arrived; return why it ended earlier, if so."""
        rank = 1 + plan.members.index(self._join.member)
        try:
            place = meet(self._route, self._join.session, plan, rank)
            with opened(lambda: BroadcastGroup(place, self._device)) as group:
                while self.received.at < len(self._sizes):
                    self._check_wanted()
                    self._take(plan, group, buffers)
        except BrokenLink as broken:
            return str(broken)
        except OffbeatError as refused:
            self._report(plan, str(refused), left=True)
            raise
        except Exception as error:
            self._report(plan, f"{type(error).__name__}: {error}", left=True)
            raise
        return ""

    def _take(self, plan: RoundPlan, group: BroadcastGroup, buffers: Buffers) -> None:
        got, sizes, timeouts = self.received, self._sizes, self._timeouts
        room = ChunkHeader.room()
        group.broadcast(room, timeouts.of(max(sizes[max(got.at - 1, 0) : got.at + 1])))
        header = ChunkHeader.parsed(room)
        if header is None:
            raise TransferRefused(self._epoch, "a message", "no header", "a header")
        if not 0 <= header.chunk < len(sizes) or header.nbytes != sizes[header.chunk]:
            want = f"one of {len(sizes)} chunks with its size"
            raise TransferRefused(self._epoch, "a message", str(header), want)
        data = buffers.lend(header.nbytes)
        group.broadcast(data, timeouts.of(header.nbytes))
        if (header.epoch, header.round) != (self._epoch, plan.round):
            got.dropped_late += 1
        elif header.chunk < got.at:
            got.dropped_twice += 1
        elif header.chunk > got.at:
            raise TransferRefused(self._epoch, "chunk index", str(header.chunk), str(got.at))
        else:
            self._sink(header.chunk, data)
            got.at += 1

    def _check_wanted(self) -> None:
        if self.cancelled.is_set():
            raise TransferFailed(self._epoch, self.received.at, "nobody waits for it any more")

    def _report(self, plan: RoundPlan, error: str, *, left: bool = False) -> None:
        join, at = self._join, self.received.at
        self._control.send(Report(join.session, plan.round, join.member, at, error, left=left))
