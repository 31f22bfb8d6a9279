"""Decides which engines get a delta of a release, and which get the full release. Pure.

An engine is offered a delta if its living process last acked the base, compared by digest. The
engine compares the base with its own weights again. The choice here only saves bytes.
"""

from collections import Counter

import msgspec
import structlog

from offbeat.messages.weights import FullReason, WeightRelease, WeightsAck

log = structlog.stdlib.get_logger()


class DeltaOffers:
    """Records the release that each engine serves, and metrics of the bytes sent."""

    def __init__(self, *, enabled: bool) -> None:
        """Create the record. ``enabled``: whether the trainer publishes deltas."""
        self._enabled = enabled
        self._acked = dict[str, tuple[str, str]]()  # incarnation and digest by engine
        self._refused = set[str]()  # engines that refused a base, until they are offered a release
        self._said = dict[str, FullReason]()  # last logged reason by engine
        self._nbytes, self._full = 0, Counter[FullReason]()  # since the last ``take_figures``
        self._changed: float | None = None  # share of words changed by the last release

    def offer(self, name: str, incarnation: str, release: WeightRelease) -> WeightRelease:
        """Return the release that an engine should load, with or without its delta."""
        delta = release.delta
        if delta is not None and self._acked.get(name) == (incarnation, delta.base):
            self._nbytes += delta.nbytes
            self._said.pop(name, None)
            return release
        self._nbytes += release.nbytes
        if self._enabled:
            self._count(name, release)
        return msgspec.structs.replace(release, delta=None)

    def released(self, release: WeightRelease) -> None:
        """Record a release that the trainer has published."""
        self._changed = None if release.delta is None else release.delta.changed

    def took(self, ack: WeightsAck) -> None:
        """Record the release that an engine serves, according to its ack."""
        self._acked[ack.engine] = ack.incarnation, ack.digest

    def lost(self, name: str) -> None:
        """Record that an engine's weights are unknown, so its next release is a full one."""
        self._acked.pop(name, None)

    def refused(self, name: str) -> None:
        """Record that an engine does not serve the base that it acked."""
        self.lost(name)
        self._refused.add(name)

    def forget(self) -> None:
        """Forget every base, before a rewind to another line of versions."""
        self._acked.clear()

    def take_figures(self) -> dict[str, float]:
        """Return the transfer metrics since the last call."""
        figures: dict[str, float] = {"sync/sent_bytes": self._nbytes}
        if self._enabled:
            figures |= {f"sync/full_{reason}": self._full[reason] for reason in FullReason}
            figures["sync/full_releases"] = self._full.total()
        if self._changed is not None:
            figures["sync/changed_fraction"] = self._changed
        self._nbytes, self._full, self._changed = 0, Counter[FullReason](), None
        return figures

    def _count(self, name: str, release: WeightRelease) -> None:
        reason = release.full_reason or FullReason.UNKNOWN_BASE
        if name in self._refused:
            self._refused.discard(name)
            reason = FullReason.REFUSED
        self._full[reason] += 1
        if self._said.get(name) is not reason:
            self._said[name] = reason
            log.info("sync.full_release", engine=name, version=release.version, reason=reason)
