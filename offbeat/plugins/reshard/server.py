"""Sending end of a reshard on one source rank. Its threads serve engines during training.

    waits for             woken by
    a request             an engine that got the release's handle
    the engine's link     the engine, which connects next; a limit
    a bucket's receipt    the engine; a limit

Every engine asks every rank itself, so an engine that dies or hangs delays no other engine.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import structlog

from offbeat.plugins.reshard.control import ControlServer
from offbeat.plugins.reshard.group import BrokenLink, meet, open_connection
from offbeat.plugins.reshard.group_wire import tcp_wire
from offbeat.plugins.reshard.messages import (
    Answer,
    Join,
    Route,
    TransferTimeouts,
)
from offbeat.plugins.reshard.section import BUCKETS_AT_ONCE, BUCKETS_IN_FLIGHT
from offbeat.plugins.reshard.wire import BucketLink, BucketWire
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.rendezvous.frames import SharedKey
from offbeat.weight_sync.rendezvous.store_server import StoreServer

log = structlog.stdlib.get_logger()
_CLOSE_S: Final = 5.0


def bucket_limit_s(timeouts: TransferTimeouts, nbytes: int) -> float:
    """Return the time limit of a bucket of ``nbytes`` that shares the receiver's link."""
    return timeouts.of(nbytes * BUCKETS_AT_ONCE)


@dataclass(frozen=True, slots=True)
class OfferedRelease:
    """Buckets of a release that this rank holds."""

    layout: str  # digest of the plan
    digest: str
    buckets: Mapping[int, BucketMemory]
    changes: "OfferedRelease | None" = None  # changes of each bucket since the previous release


class ReshardServer:
    """Serves the newest release of one rank. Each request has a separate thread."""

    def __init__(
        self,
        *,
        host: str,
        incarnation: str,
        timeouts: TransferTimeouts,
        wire: BucketWire | None = None,
    ) -> None:
        """Listen on free ports of ``host``.

        Args:
            host: Address of this machine.
            incarnation: Name of this process.
            timeouts: Timeouts of a transfer.
            wire: Wire of the buckets, or None for tcp.
        """
        key = SharedKey.random()
        self._control = ControlServer(host, key)
        self._store = StoreServer(host, key)
        self.wire: BucketWire = wire or tcp_wire()
        self.route = Route(
            host,
            self._control.port,
            self._store.port,
            key,
            incarnation,
            0,
            "",
            timeouts,
            self.wire.name,
            self.wire.place,
        )
        self.offered: OfferedRelease | None = None
        self._streams = dict[str, threading.Thread]()
        self._closed = False
        self.ended = ""  # why the thread ended unexpectedly
        self._thread = threading.Thread(target=self._work, name="weight-server", daemon=True)
        self._thread.start()

    def offer(self, release: OfferedRelease | None) -> None:
        """Serve this release from now on. Streams of the previous release run to their end."""
        self.offered = release

    def close(self) -> None:
        """Stop serving. Return when the threads have ended, or after a few seconds."""
        if not self._closed:
            self._control.stop()
            self._closed = True
            self._thread.join(_CLOSE_S)

    # --- the threads -----------------------------------------------------------------------------

    def _work(self) -> None:
        """Serve until a request to stop. The connections are closed even after an error."""
        try:
            while not self._closed and (join := self._control.next()) is not None:
                self._answer(join)
        except Exception as error:
            self.ended = f"{type(error).__name__}: {error}"
            log.exception("weights.server_ended")
        finally:
            self._control.close()
            for each in self._streams.values():
                each.join(_CLOSE_S)
            self._store.close()

    def _answer(self, join: Join) -> None:
        release = self._find_requested(join)
        gone = self._is_gone(join, release)
        answer = Answer(self._problem(join, release), gone)
        self._control.post(join, answer)
        if answer.error or release is None:
            return
        for session in [name for name, each in self._streams.items() if not each.is_alive()]:
            del self._streams[session]
            self._store.forget(f"{session}/")
        # Not a daemon thread: if Python ends a daemon thread inside gloo, the process aborts.
        stream = threading.Thread(
            target=self._stream, args=(join, release), name="weight-stream", daemon=False
        )
        self._streams[join.session] = stream
        stream.start()

    def _find_requested(self, join: Join) -> OfferedRelease | None:
        """Return the changes if the request's digest names them, else the release itself."""
        release = self.offered
        changes = None if release is None else release.changes
        return changes if changes is not None and join.digest == changes.digest else release

    def _is_gone(self, join: Join, release: OfferedRelease | None) -> bool:
        """Return whether this process no longer sends the requested release."""
        if join.incarnation != self.route.incarnation:
            return True
        return release is None or join.digest != release.digest

    def _problem(self, join: Join, release: OfferedRelease | None) -> str:
        if join.incarnation != self.route.incarnation:
            return f"the sender {join.incarnation} is gone; {self.route.incarnation} has taken its place"
        if release is None:
            return f"the sender holds no release, but {join.digest} is asked for"
        if join.digest != release.digest:
            return f"the sender now holds a different release: {release.digest}, not {join.digest}"
        if join.layout != release.layout:
            return (
                f"the sender follows a different plan: {release.layout[:8]}, not {join.layout[:8]}"
            )
        if missing := [each for each in join.buckets if each not in release.buckets]:
            return f"the sender does not hold bucket {missing[0]}"
        return ""

    def _stream(self, join: Join, release: OfferedRelease) -> None:
        """Send the buckets that one engine requested. The engine detects an early end itself."""
        about = {"member": join.member, "epoch": join.epoch}
        try:
            place, route = meet(self.route, join.session, 0), self.route
            with open_connection(lambda: self.wire.link(place, route, route.host)) as link:
                self._send(link, join, release)
        except BrokenLink as broken:
            log.warning("weights.stream_broken", **about, error=str(broken))
        except Exception as error:  # noqa: BLE001 -- the engine sees its connection end
            detail = f"{type(error).__name__}: {error}"
            log.error("weights.stream_failed", **about, error=detail)  # noqa: TRY400 -- one line

    def _send(self, link: BucketLink, join: Join, release: OfferedRelease) -> None:
        timeouts, limit_s = self.route.timeouts, self.route.timeouts.slack_s
        for tag, bucket in enumerate(join.buckets):
            data = release.buckets[bucket]
            limit_s = max(limit_s, bucket_limit_s(timeouts, data.nbytes))
            if link.in_flight == BUCKETS_IN_FLIGHT:
                link.wait(limit_s)
            link.send(data, tag)
        # Sent is not received, so keep the connection until the engine confirms all buckets.
        link.finish(limit_s)
