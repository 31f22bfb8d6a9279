"""Fake of an inference engine: decodes over time and loads new weights meanwhile."""

from collections.abc import Callable
from typing import Final

import msgspec

from offbeat.fakes.refusals import check_newest_transfer
from offbeat.messages.failures import (
    CanaryFailed,
    EngineUnavailable,
    OffbeatError,
    ReleaseLost,
    WeightSyncFailed,
)
from offbeat.messages.groups import VersionSpans
from offbeat.messages.weights import EngineState, WeightDelta, WeightRelease, WeightsAck
from offbeat.plugins.delta.kept_release import check_base
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.faults import FaultMoment
from offbeat.plugins.simulation.fetch import SimulatedFetch
from offbeat.plugins.simulation.loop import Entry
from offbeat.plugins.simulation.machines import MachineMemory
from offbeat.plugins.simulation.network import SimulatedCall
from offbeat.plugins.simulation.records import (
    Decoded,
    EngineComputesOther,
    EngineDied,
    EngineServes,
)
from offbeat.plugins.simulation.shared_weights import SharedWeights
from offbeat.plugins.simulation.source_ranks import SourceRanks, ranks_of
from offbeat.weight_sync.canary import check, invent_answers

SLOW: Final = 10.0
SLOW_FOR_S: Final = 60.0
FLAPS_AFTER_S: Final = 0.3
"""Seconds from an ack to the death of an engine that cannot stay up."""


class Decoding(msgspec.Struct, eq=False):
    """One group in an engine. ``on_end`` gets True if all tokens are done, False if it died."""

    lengths: tuple[int, ...]
    seconds: float
    started_at: float
    on_end: "Callable[[Decoding, bool], None]"
    entry: Entry | None = None  # None: it is not being decoded
    running_since: float = 0.0  # start of decoding without a pause


class FakeEngine(Actor):
    """Fake of one engine. It loads weights completely and verified, or not at all."""

    fetch_class = SimulatedFetch

    def __init__(self, name: str, context: SimulationContext) -> None:
        self.sync_s = context.config.stub.sync_s
        self.flaps = self.hangs_in_loads = False  # permanent, also over restarts
        super().__init__(name, context)

    def born(self) -> None:
        self.version: int | None = None
        self.digest: str | None = None  # of the release that it reports
        self.content: str | None = None  # of its actual weights
        self.since: list[tuple[float, int]] = []  # start of decoding by each version
        self.wedged, self.refuses, self.slow_until = False, False, 0.0
        self._epoch = 0
        self._open: dict[Decoding, None] = {}
        self._busy_s, self._tokens = 0.0, 0
        self._shared: SharedWeights | None = None  # weights of the trainer that it decodes with
        self._stopped_at: float | None = None  # while the weights change

    @property
    def incarnation(self) -> str:
        return f"{self.name}-incarnation-{self.incarnation_number}"

    def ended(self) -> None:
        self.context.record(EngineDied, self.name, self.incarnation)
        if self._shared is not None:
            self._shared.leave(self)
        for decoding in self._open:
            decoding.on_end(decoding, False)  # noqa: FBT003
        self._open.clear()

    # --- decoding --------------------------------------------------------------------------------

    def decode(
        self,
        lengths: tuple[int, ...],
        seconds: float,
        on_end: Callable[[Decoding, bool], None],
    ) -> Decoding:
        """Start a group. ``on_end`` is called in this engine's process, or when that dies."""
        now = self.context.loop.time()
        if now < self.slow_until:
            seconds *= SLOW
        decoding = Decoding(lengths, seconds, now, on_end)
        self._open[decoding] = None
        if not self.wedged and self._stopped_at is None:
            self._run(decoding, seconds)
        return decoding

    def _run(self, decoding: Decoding, left_s: float) -> None:
        """Decode the rest of a group."""
        decoding.running_since = self.context.loop.time()
        decoding.entry = self.later(left_s, self._decoded, decoding)

    def _pause(self, decoding: Decoding) -> None:
        """Stop a group and record that it was decoded until now."""
        if decoding.entry is not None:
            decoding.entry.cancel()
            decoding.entry = None
            self._record_decoded(decoding)

    def _record_decoded(self, decoding: Decoding) -> None:
        if self._shared is not None:
            self.context.record(Decoded, self.name, self.incarnation, decoding.running_since)

    def stop_decoding(self) -> None:
        """Stop while the shared weights change."""
        if self._stopped_at is None:
            self._stopped_at = self.context.loop.time()
            for decoding in self._open:
                self._pause(decoding)

    def continue_decoding(self) -> None:
        """Continue after a stop, which counts for no group's time."""
        if self._stopped_at is None:
            return
        stopped_at, self._stopped_at = self._stopped_at, None
        now = self.context.loop.time()
        for decoding in self._open if not self.wedged else ():
            decoding.started_at += now - max(stopped_at, decoding.started_at)
            self._run(decoding, max(0.0, decoding.started_at + decoding.seconds - now))

    def wedge(self) -> None:
        """Make requests hang, but answer probes."""
        self.wedged = True
        for decoding in self._open:
            self._pause(decoding)

    def drop(self, decoding: Decoding) -> None:
        """Drop a decoding after its caller has cancelled it."""
        if self._open.pop(decoding, self) is None:
            self._pause(decoding)

    def _decoded(self, decoding: Decoding) -> None:
        del self._open[decoding]
        self._record_decoded(decoding)
        self._busy_s += decoding.seconds
        self._tokens += sum(decoding.lengths)
        decoding.on_end(decoding, True)  # noqa: FBT003

    def spans(self, decoding: Decoding) -> tuple[VersionSpans, ...]:
        """Return the weight versions of each sample's tokens.

        Samples decode in parallel, at the same speed.
        """
        start = decoding.started_at
        first = len(self.since) - 1
        while self.since[first][0] > start:
            first -= 1
        if first == len(self.since) - 1:
            version = self.since[first][1]
            return tuple([((version, length),) for length in decoding.lengths])
        pace = decoding.seconds / max(decoding.lengths)
        changes = [((at - start) / pace, version) for at, version in self.since[first + 1 :]]
        return tuple([self._cut(length, changes, first) for length in decoding.lengths])

    def _cut(self, length: int, changes: list[tuple[float, int]], first: int) -> VersionSpans:
        spans, done, version = list[tuple[int, int]](), 0, self.since[first][1]
        for at, newer in changes:
            tokens = min(length, int(at)) - done
            if tokens > 0:
                spans.append((version, tokens))
                done += tokens
            version = newer
        if done < length:
            spans.append((version, length - done))
        return tuple(spans)

    # --- calls of the controller -----------------------------------------------------------------

    def serve(self, call: SimulatedCall) -> None:
        try:
            self.check_fence(call)
            self._check_trainer()
            if call.method == "load_weights":
                self._load(call, *call.args)
                return
        except OffbeatError as failure:
            call.fail(failure)
            return
        call.answer(self._state() if call.method == "state" else None)

    def _check_trainer(self) -> None:
        """Raise if the trainer that shares its weights with this engine was replaced."""
        if self._shared not in (None, self.context.shared_weights):
            problem = "it computes with the weights of a trainer that was replaced"
            raise EngineUnavailable(self.name, "a call", problem, "Start another engine")

    def _check_shared(self, release: WeightRelease) -> None:
        """Raise unless a release names the weights that the trainer has now."""
        self._check_trainer()
        shared = self.context.shared_weights
        is_named = shared is None or shared.published == (release.version, release.digest)
        if not is_named or (shared is not None and shared.is_changing):
            problem = "the trainer has changed the weights that it names"
            raise ReleaseLost(self.name, release.version, problem)

    def _adopt(self, shared: SharedWeights | None) -> None:
        """Decode with the trainer's present weights from now on, if engines share them."""
        self._shared = shared
        if shared is not None:
            shared.adopt(self)

    def _state(self) -> EngineState:
        return EngineState(
            self.name,
            self.incarnation,
            self.version,
            self.digest,
            len(self._open),
            0,
            self._busy_s,
            self._tokens,
        )

    def _load(self, call: SimulatedCall, epoch: int, release: WeightRelease) -> None:
        """Begin a transfer, which supersedes an older one."""
        if self.context.machines.is_gone(_memory_of(release)):
            self._lack(call, release)
            return
        if release.delta is not None:
            self._check_base(release, release.delta)
        check_newest_transfer(self.name, epoch, release.version, self._epoch)
        self._epoch = epoch
        kind = self.context.faults.at(FaultMoment.LOAD, self.name)
        takes_s = self.sync_s * (0.6 + self.context.rng.expovariate(1.6))
        if kind == "load_kills":
            self.later(0.5 * takes_s, self.die)
        elif kind == "load_hangs" or self.hangs_in_loads:
            return
        if ranks := ranks_of(release):
            self._fetch(call, epoch, release, ranks, takes_s, kind)
        elif kind != "load_kills":
            self.later(takes_s, self._commit, call, epoch, release, takes_s, kind)

    def _fetch(
        self,
        call: SimulatedCall,
        epoch: int,
        release: WeightRelease,
        ranks: SourceRanks,
        takes_s: float,
        kind: str,
    ) -> None:
        """Fetch a release from the ranks that hold its buckets, then verify and serve it."""
        began_at = self.context.loop.time()

        def ended(failure: Exception | None, content: str) -> None:
            took_s = self.context.loop.time() - began_at
            if failure is not None:
                call.fail(failure)
            else:
                self._commit(call, epoch, release, took_s, kind, content)

        fetch = self.fetch_class(self, self.incarnation, epoch, release, ranks, takes_s, ended)
        call.on_cancel = fetch.stop
        fetch.start()

    def _check_base(self, release: WeightRelease, delta: WeightDelta) -> None:
        check_base(self.name, release.version, delta.base, self.digest)

    def _content(self, release: WeightRelease, arrived: str) -> str:
        """Return the digest of the engine's weights after loading ``arrived``."""
        delta = release.delta
        if delta is None or delta.base == self.content:
            return arrived
        return f"{delta.digest} applied to {self.content}"

    def _lack(self, call: SimulatedCall, release: WeightRelease) -> None:
        """Fail the call once the loss of the release's machine is known."""
        lost = ReleaseLost(self.name, release.version, "the machine that held it died")
        self.later(self.context.machines.noticed_in_s(_memory_of(release)), call.fail, lost)

    def _canary_gap(
        self, epoch: int, release: WeightRelease, effective_digest: str
    ) -> float | None:
        """Return the gap between the release's canary and the engine's result for it."""
        if release.canary is None:
            return None
        answers = invent_answers(effective_digest)
        return check(
            release.canary, answers, engine=self.name, epoch=epoch, version=release.version
        )

    def _lose(self) -> None:
        """Lose the weights and all open requests. No version remains."""
        self.version = self.digest = self.content = None
        for decoding in list(self._open):
            self.drop(decoding)
            decoding.on_end(decoding, False)  # noqa: FBT003

    def _commit(
        self,
        call: SimulatedCall,
        epoch: int,
        release: WeightRelease,
        took_s: float,
        kind: str,
        fetched: str = "",
    ) -> None:
        """Verify a received release and serve it from now on.

        ``fetched``: content of the buckets that ranks sent. Empty: the release came as a whole.
        """
        if self.context.machines.is_gone(_memory_of(release)):
            self._lack(call, release)
            return
        if epoch != self._epoch or kind not in ("", "load_computes_other"):
            problem = {
                "load_torn": "chunk 2 of 3 never came",
                "load_wrong_digest": f"what came has another digest than {release.digest}",
            }.get(kind, f"superseded by epoch {self._epoch}")
            call.fail(WeightSyncFailed(self.name, epoch, release.version, problem))
            return
        now = self.context.loop.time()
        effective_digest = content = self._content(release, fetched or release.digest)
        if kind:
            effective_digest = f"not {effective_digest}"
            self.context.record(
                EngineComputesOther, self.name, self.incarnation, epoch, release.version
            )
        try:
            self._check_shared(release)
            gap = self._canary_gap(epoch, release, effective_digest)
        except (CanaryFailed, EngineUnavailable, ReleaseLost) as failure:
            if isinstance(failure, CanaryFailed):
                self._lose()
            call.fail(failure)
            return
        self.version, self.digest, self.content = release.version, release.digest, content
        self.since.append((now, release.version))
        self.context.record(
            EngineServes, self.name, self.incarnation, epoch, release.version, content
        )
        self._adopt(self.context.shared_weights)
        if self.flaps:
            self.later(FLAPS_AFTER_S, self.die)
        said = self.context.faults.at(FaultMoment.ACK, self.name)
        digest = "of-something-else" if said == "ack_lies" else release.digest
        ack = WeightsAck(
            self.name,
            self.incarnation,
            epoch,
            release.version,
            digest,
            took_s,
            0.1 * took_s,
            self._busy_s,
            self._tokens,
            gap,
        )
        if said == "ack_lost":
            call.answered = True
        elif said == "ack_doubled":
            for after_s in (1.0, 0.0):
                self.context.network.answer(call, ack, None, after_s)
        else:
            call.answer(ack)


def _memory_of(release: WeightRelease) -> MachineMemory | None:
    """Return the memory that stores a release, or None if none stores it as a whole."""
    handle = next(iter(release.chunks), None)
    return handle if isinstance(handle, MachineMemory) else None
