"""Sender of the gloo broadcast: a thread beside the trainer that serves joining engines.

    waits for                    woken by
    a join                       an engine that got the route of the release
    the others of its session    their joins; a limit
    reports of a round           its members; a timeout

Training continues meanwhile: a snapshot is sent, and gloo releases the interpreter lock.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog

from offbeat.rendezvous.frames import SharedKey
from offbeat.weight_sync.buffers import Buffers
from offbeat.weight_sync.chunks import Bytes, walk
from offbeat.weight_sync.delta import DeltaPacker
from offbeat.weight_sync.errors import TransferFailed
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.transport import PublishedRelease, Source
from offbeat.weight_sync.transports.control import ControlServer
from offbeat.weight_sync.transports.group import (
    BroadcastGroup,
    BrokenLink,
    ChunkHeader,
    Device,
    Rendezvous,
    opened,
)
from offbeat.weight_sync.transports.messages import (
    Close,
    Join,
    MemberGone,
    Message,
    Report,
    RoundPlan,
    Route,
    TransferTimeouts,
    another_release,
)
from offbeat.weight_sync.transports.session import SILENT, Session

log = structlog.stdlib.get_logger()
_CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class StagedRelease:
    """Release that is being sent."""

    manifest: Manifest
    digest: str
    chunks: Sequence[Bytes]


class GlooSender:
    """Sends the newest release to the members that join, one session after the other.

    It keeps one snapshot, and the one that is being sent if that is another. The release is lost
    with its process.
    """

    def __init__(
        self,
        source: Source,
        *,
        host: str,
        incarnation: str,
        timeouts: TransferTimeouts,
        clock: Callable[[], float] = time.monotonic,
        delta: bool = False,
    ) -> None:
        """Start to listen.

        Args:
            source: Weights to send.
            host: Address to listen at.
            incarnation: Name of this process; a route of another process is refused.
            timeouts: Limits of each wait.
            clock: Returns seconds.
            delta: Whether each release also has what changed since the one before.
        """
        self._source, self._incarnation, self._timeouts, self._clock = (
            source,
            incarnation,
            timeouts,
            clock,
        )
        self._buffers = Buffers()
        self._key = SharedKey.random()
        self._control = ControlServer(host, self._key, clock)
        self._rendezvous = Rendezvous(host, self._key, timeouts.slack_s)
        self._device = Device(host, timeouts.slack_s)
        # Snapshot to send; None before the first release
        self.snapshot: StagedRelease | None = None
        self._delta: StagedRelease | None = None  # of that snapshot
        self._packer, self.delta_handles = DeltaPacker(enabled=delta), int(delta)
        self._publishing = threading.Lock()
        self._parked = deque[Message]()  # joins that arrived while another session was served
        self._closed = False
        self._ended = ""  # why the thread ended unexpectedly
        self.dropped = 0  # messages that arrived too late
        self._thread = threading.Thread(target=self._work, name="weight-sender", daemon=True)
        self._thread.start()

    @property
    def handles(self) -> int:
        return 1

    def publish(self, version: int) -> PublishedRelease:
        """Publish a snapshot of the weights.

        Raises:
            TransferFailed: The sending thread has ended: no engine could ever receive this release.
        """
        if self._ended:
            raise TransferFailed(0, 0, f"the weight sender has ended: {self._ended}")
        with self._publishing:
            self.snapshot = self._delta = None  # memory is reused, unless a session uses it
            packed = self._packer.pack(self._source, lambda _, nbytes: self._buffers.lend(nbytes))
            manifest, digest, chunks, delta, reason = packed
            self.snapshot = StagedRelease(manifest, digest, chunks)
            if delta is not None:
                self._delta = StagedRelease(delta.manifest, delta.digest, delta.chunks)
        at = self._control.host, self._control.port, self._rendezvous.port, self._key
        route = Route(*at, self._incarnation, version, digest, self._timeouts)
        if delta is not None:
            route_of_delta = msgspec.structs.replace(route, digest=delta.digest)
            delta = msgspec.structs.replace(delta, chunks=(route_of_delta,))
        return PublishedRelease(manifest, digest, (route,), delta, reason)

    def forget(self) -> None:
        self._packer.forget()

    def close(self) -> None:
        """Stop sending; return when the thread has ended, or after a few seconds."""
        if not self._closed:
            self._control.stop()  # first: the thread closes the channel when it sees the flag
            self._closed = True
            self._thread.join(_CLOSE_S)

    # --- the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        """Serve until a request to stop. However it ends, no member is left waiting for this thread."""
        try:
            self._serve()
        except Exception as error:
            self._ended = f"{type(error).__name__}: {error}"
            log.exception("weights.sender_ended")
        finally:
            self._control.close()
            self._rendezvous.close()

    def _serve(self) -> None:
        while not self._closed:
            match self._parked.popleft() if self._parked else self._control.next():
                case Join() as join if self._control.connected(join.session, join.member):
                    self._run(join)
                case Report():
                    self.dropped += 1
                case Close():
                    break
                case _:
                    pass  # from a member of no current session

    def _run(self, first: Join) -> None:
        """Run one session to its end."""
        with self._publishing:
            delta = self._delta
            is_delta = delta is not None and delta.digest == first.digest
            snapshot = delta if is_delta else self.snapshot
        session = Session(first, len(snapshot.chunks) if snapshot else 0)
        self._take_parked(session)
        problem = self._problem(first, snapshot)
        is_gone = bool(problem)  # nobody sends this release any more; a broken round is tried again
        if not problem:
            self._collect(session, self._timeouts.slack_s)
        while (plan := session.plan(problem)) is not None:
            plan = msgspec.structs.replace(plan, gone=is_gone)
            self._control.post(session.name, plan.members, plan)
            self._notify_left_out(session, plan.round)
            if plan.error or snapshot is None:
                break
            problem = self._broadcast(session, plan, snapshot)
        self._notify_left_out(session, session.rounds)
        self._rendezvous.forget(session.name)
        self.dropped += session.dropped
        failed = {name: error for name, error in session.ended.items() if error}
        if failed:
            log.warning(
                "weights.not_all", session=session.name, rounds=session.rounds, failed=failed
            )

    def _take_parked(self, session: Session) -> None:
        """Admit members of this session that joined while another session was served."""
        parked = list(self._parked)
        self._parked.clear()
        for message in parked:
            if not isinstance(message, Join) or message.session != session.name:
                self._parked.append(message)
            elif self._control.connected(message.session, message.member):
                session.joined(message)

    def _notify_left_out(self, session: Session, round_: int) -> None:
        """Notify the members left out: they may be alive, and would wait for the next plan."""
        plan = RoundPlan(round_, error=f"left out: it {SILENT}")
        self._control.post(session.name, session.left_out, plan)
        session.left_out = ()

    def _problem(self, join: Join, snapshot: StagedRelease | None) -> str:
        if join.incarnation != self._incarnation:
            return f"the sender {join.incarnation} is gone; {self._incarnation} has taken its place"
        if snapshot is None or join.digest != snapshot.digest:
            return another_release(None if snapshot is None else snapshot.digest, join.digest)
        return ""

    def _broadcast(self, session: Session, plan: RoundPlan, snapshot: StagedRelease) -> str:
        """Send the chunks of this round and collect its reports; return why the sender failed, if so."""
        chunks, at = list(walk(snapshot.manifest)), plan.first
        patience_s = self._timeouts.of(max(snapshot.manifest.chunk_nbytes, default=0))
        try:
            place = self._rendezvous.of(session.name, plan, 0)
            with opened(lambda: BroadcastGroup(place, self._device)) as group:
                for chunk in chunks[plan.first :]:
                    at, limit_s = chunk.index, self._timeouts.of(chunk.nbytes)
                    header = ChunkHeader(session.epoch, plan.round, at, chunk.nbytes)
                    group.broadcast(header.packed(), limit_s)
                    group.broadcast(snapshot.chunks[at], limit_s)
                self._collect(session, patience_s)
        except BrokenLink as broken:
            log.warning("weights.round_broken", session=session.name, chunk=at, error=str(broken))
        except Exception as error:
            log.exception("weights.sender_failed", session=session.name, chunk=at)
            what = f"{type(error).__name__}: {error}"
            return f"rank 0 failed at chunk {at} ({chunks[at].tensors}): {what}"
        # The connections of this round are closed, so members that wait in it give up and report.
        self._collect(session, patience_s)
        return ""

    def _collect(self, session: Session, patience_s: float) -> None:
        """Receive messages until every member has sent its own, or the timeout has passed."""
        until_s = self._clock() + patience_s
        while not session.everybody:
            message = self._control.next(max(until_s - self._clock(), 1e-3))
            match message:
                case None:
                    return
                case Join():
                    if message.session != session.name:
                        self._parked.append(message)
                    else:
                        session.joined(message)
                case Report():
                    session.reported(message)
                case MemberGone():
                    if message.session == session.name:
                        session.gone(message.member)
                case Close():
                    self._closed = True
                    return
