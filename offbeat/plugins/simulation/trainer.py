"""Fake of the trainer: all ranks as one process, one call at a time, with a separate log.

Its weights are a digest of the trained groups, independent of chunks and arrival order.
"""

import hashlib
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from offbeat.config.limits import shares_weights
from offbeat.config.loss_spec import LossSpec
from offbeat.fakes.refusals import check_held, check_next_step
from offbeat.fakes.step_keys import StepKeys
from offbeat.messages.failures import (
    CheckpointFailed,
    OffbeatError,
    PayloadLost,
    StaleFence,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
)
from offbeat.messages.fences import StepKey
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import Canary, FullReason, WeightDelta, WeightRelease
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.disk import INITIAL_DIGEST, UNTRAINED, SavedModel, SimulatedPayload
from offbeat.plugins.simulation.faults import Effect, FaultMoment, effect_of
from offbeat.plugins.simulation.network import SimulatedCall
from offbeat.plugins.simulation.records import (
    ReleasePublished,
    TrainerApplied,
    TrainerRestored,
    TrainerStarted,
    WeightsChanging,
    WeightsUnchanged,
)
from offbeat.plugins.simulation.shared_weights import SharedWeights
from offbeat.plugins.simulation.source_ranks import SourceRanks
from offbeat.weight_sync.canary import invent_canary, tolerance

_NBYTES: Final = 1000
_ONE_TOO_LARGE: Final = 6  # releases, of which one has too many changes for a delta
_MOMENTS: Final = {
    "begin_train_step": FaultMoment.BEGIN,
    "train_microbatch": FaultMoment.MICROBATCH,
    "finish_train_step": FaultMoment.FINISH,
    "save_checkpoint": FaultMoment.CHECKPOINT,
}


_CHANGING: Final = ("finish_train_step", "restore")
"""Calls that change weights. If one raises, the weights are of no version."""

_DURING: Final = {
    "begin_train_step": TrainerCall.BEGIN,
    "train_microbatch": TrainerCall.MICROBATCH,
    "finish_train_step": TrainerCall.FINISH,
}


class FakeTrainer(Actor):
    """Fake of all trainer ranks. They are one process, which dies and is replaced as a whole."""

    in_order = True
    ranks_class = SourceRanks

    def __init__(self, context: SimulationContext, groups_per_step: int) -> None:
        self._groups_per_step = groups_per_step
        self.step_s = context.config.stub.step_s
        super().__init__("trainer", context)

    def born(self) -> None:
        """Start new ranks with the initial model."""
        self._steps = StepKeys()
        self._queue: deque[SimulatedCall] = deque()
        self._busy = False
        self._model = UNTRAINED
        self._base: str | None = None  # digest of the last release, which the next delta applies to
        self._ranks: SourceRanks | None = None  # set once this process has published a release
        self._shared: SharedWeights | None = None
        self._was_changing = False  # before the current call
        if shares_weights(self.context.config):
            self._shared = SharedWeights(self.incarnation_number)
            self.context.shared_weights = self._shared
        self._open: list[tuple[SimulatedPayload, tuple[float, ...]]] = []
        self._minibatches, self._loss = list[int](), LossSpec()
        self._chunks = 0
        self.context.record(TrainerStarted, self.incarnation_number)

    # --- one call at a time ----------------------------------------------------------------------

    def serve(self, call: SimulatedCall) -> None:
        self._queue.append(call)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        """Start the call that has waited longest. It lasts as long as its work."""
        queue = self._queue
        while queue:
            call = queue.popleft()
            if call.cancelled:
                continue
            moment = _MOMENTS.get(call.method)
            kind = self.context.faults.at(moment, self.name) if moment else ""
            self._busy = True
            if self._shared is not None and call.method in _CHANGING:
                self.context.record(WeightsChanging, self.incarnation_number)
                self._was_changing = self._shared.is_changing
                self._shared.close()
            takes_s = self._duration(call) * self.context.rng.uniform(0.7, 1.5)
            takes_s += self._waits_for_columns(call)
            self.later(takes_s, self._done, call, kind)
            return

    def _duration(self, call: SimulatedCall) -> float:
        """Return the duration of a call in seconds."""
        match call.method:
            case "train_microbatch":
                chunk: Chunk = call.args[1]
                trains = 0.01 if chunk.minibatches else 0.85  # else the work is in finish
                return trains * self.step_s * len(chunk.prompt_indices) / self._groups_per_step
            case "finish_train_step":
                is_one = self._loss.optimizer_steps == 1
                return (0.15 if is_one else self._loss.epochs) * self.step_s
            case "save_checkpoint" | "restore" | "save":
                return self.step_s
            case "publish_weights" | "prepare_logprobs":
                return 0.1 * self.step_s
            case _:
                return 0.001

    def _waits_for_columns(self, call: SimulatedCall) -> float:
        """Return the seconds until the loss of columns with their machine is known."""
        if call.method not in ("train_microbatch", "prepare_logprobs"):
            return 0.0
        machines = self.context.machines
        payloads = _columns_of(call.args[call.method == "train_microbatch"])
        return max((machines.noticed_in_s(each.memory) for each in payloads), default=0.0)

    def _done(self, call: SimulatedCall, kind: str) -> None:
        self._busy = False
        if effect_of(kind) is Effect.KILLS:
            self.die()
            return
        before = self._model.version
        try:
            self.check_fence(call)
            answer = self._work(call, kind)
        except OffbeatError as failure:
            was_refused = isinstance(failure, (StaleFence, StepOutOfOrder))
            if was_refused and not self._was_changing:
                self._changed(call, is_new=False)
            call.fail(failure)
        else:
            is_new = self._model.version != before or call.method == "restore"
            self._changed(call, is_new=is_new)
            if kind == "finish_kills_after":
                self.die()
                return
            if self.process.alive:
                call.answer(answer)
        self._next()

    def _changed(self, call: SimulatedCall, *, is_new: bool) -> None:
        """Let engines decode again, after a call that may have changed weights that they share."""
        if self._shared is None or call.method not in _CHANGING:
            return
        if not is_new:
            self.context.record(WeightsUnchanged, self.incarnation_number)
        self._shared.open(changed=is_new)

    def _work(self, call: SimulatedCall, kind: str) -> object:
        method, args = call.method, call.args
        if method in _DURING:
            return self._step_call(call, kind)
        if method == "save_checkpoint":
            return self._checkpoint(args[0], kind)
        if method == "save":
            check_held(args[0], self._model.version, TrainerCall.SAVE)
        work: Mapping[str, Callable[..., object]] = {
            "state": self._state,
            "abort_train_step": self._steps.abort,
            "prepare_logprobs": self._prepare_logprobs,
            "publish_weights": self._publish,
            "restore": self._restore,
        }
        # A final save or a close leaves no record
        return work[method](*args) if method in work else None

    def _prepare_logprobs(self, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        self._check_columns(chunk, "prepare_logprobs")
        groups = len(chunk.prompt_indices)
        taught = ("teacher_logprobs",) if loss.config.teacher_path else ()
        return PreparedColumns(("policy_logprobs", *taught), (64,) * groups, (None,) * groups)

    def _state(self) -> TrainerState:
        return TrainerState(
            ranks=1,
            version=self._model.version,
            last_step=self._model.step,
            last_attempt=self._model.attempt,
            parameters=10,
            digest=self._model.digest,
            incarnation=f"trainer-{self.incarnation_number}",
            initial_digest=INITIAL_DIGEST,
        )

    # --- a step ----------------------------------------------------------------------------------

    def _step_call(self, call: SimulatedCall, kind: str) -> object:
        key: StepKey = call.args[0]
        during = _DURING[call.method]
        if during is TrainerCall.BEGIN:
            check_next_step(key, self._model.version)

        def work() -> object:
            if effect_of(kind) is Effect.RAISES:
                raise TrainStepFailed(0, key.step, during, "out of memory")
            if during is TrainerCall.BEGIN:
                return self._begin(call.args[1])
            if during is TrainerCall.MICROBATCH:
                return self._accumulate(call)
            return self._finish(call, kind)

        return self._steps.once(key, call.method, work)

    def _begin(self, loss: LossSpec) -> None:
        self._open, self._chunks, self._loss = [], 0, loss
        self._minibatches = list[int]()

    def _accumulate(self, call: SimulatedCall) -> ChunkResult:
        chunk: Chunk = call.args[1]
        self._check_columns(chunk, "microbatch")
        payloads = _columns_of(chunk)
        self._open += zip(payloads, chunk.advantages, strict=True)
        self._minibatches += chunk.minibatches
        self._chunks += 1
        groups = len(payloads)
        return ChunkResult(chunk.tokens, groups * 2, 1, self.step_s * groups / 10)

    def _check_columns(self, chunk: Chunk, during: str) -> None:
        """Raise for the first group with lost columns.

        The object store names one group at a time.
        """
        for payload in _columns_of(chunk):
            if self.context.is_gone(payload):
                raise PayloadLost((payload.prompt_index,), during, "the machine that held it died")

    def _finish(self, call: SimulatedCall, kind: str) -> StepResult:
        key: StepKey = call.args[0]
        groups, chunks = [payload for payload, _ in self._open], self._chunks
        advantages = tuple(each for _, each in self._open)
        if kind == "gradient_nan":
            nan = "gradient norm is nan"
            return StepResult(False, 0.5, 0.0, 1e-3, 100, 10, chunks, {}, nan, self.step_s)  # noqa: FBT003
        content = sorted((payload.prompt_index, payload.seed) for payload in groups)
        text = f"{self._model.digest}{content}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._model = SavedModel(self._model.version + 1, digest, *key.attempt_id)
        self.context.record(
            TrainerApplied,
            incarnation=self.incarnation_number,
            step=key.step,
            attempt=key.attempt,
            version=self._model.version,
            prompt_indices=tuple(payload.prompt_index for payload in groups),
            attempts=tuple(payload.attempt for payload in groups),
            oldest=tuple(payload.oldest for payload in groups),
            newest=tuple(payload.newest for payload in groups),
            poison=tuple(payload.poison for payload in groups),
            digest=digest,
            masked=tuple(payload.masked for payload in groups),
            advantages=advantages,
            branches=tuple(payload.branches for payload in groups),
            media_bytes=tuple(payload.media_bytes for payload in groups),
            minibatches=tuple(self._minibatches),
            epochs=self._loss.epochs,
        )
        self.context.faults.step(self._model.version)
        return StepResult(True, 0.5, 1.0, 1e-3, 100, 10, chunks, {}, "", self.step_s)  # noqa: FBT003

    # --- weights ---------------------------------------------------------------------------------

    def _publish(self, version: int) -> WeightRelease:
        check_held(version, self._model.version, TrainerCall.PUBLISH)
        self.context.record(ReleasePublished, self.incarnation_number, version, self._model.digest)
        if self._shared is not None:
            self._shared.published = version, self._model.digest
        canary = self._canary(version)
        if self.context.config.sync.ranks_send:
            release = self._offered(version, canary)
        else:
            memory = (self.context.machines.memory_of(self.name),)
            release = WeightRelease(version, self._model.digest, None, memory, _NBYTES, canary)
        if not self.context.config.sync.delta:
            return release
        base, self._base = self._base, self._model.digest
        if base is None:
            return msgspec.structs.replace(release, full_reason=FullReason.NO_BASE)
        if zlib.crc32(self._model.digest.encode()) % _ONE_TOO_LARGE == 0:
            return msgspec.structs.replace(release, full_reason=FullReason.TOO_LARGE)
        changes = f"{base} to {self._model.digest}"
        delta = WeightDelta(base, changes, None, release.chunks, _NBYTES // 20, 0.01)
        return msgspec.structs.replace(release, delta=delta)

    def _offered(self, version: int, canary: Canary | None) -> WeightRelease:
        """Return a release that engines fetch from the ranks of this process."""
        if self._ranks is None:
            self._ranks = self.ranks_class(self, self.context)
        kind = self.context.faults.at(FaultMoment.PUBLISH, self.name)
        manifest = self._ranks.publish(self._model.digest, diverges=kind == "copies_diverge")
        return WeightRelease(version, self._model.digest, manifest, (self._ranks,), _NBYTES, canary)

    def _canary(self, version: int) -> Canary | None:
        interval = self.context.config.sync.canary_interval
        if not interval or version % interval:
            return None
        return Canary((), *invent_canary(self._model.digest), tolerance("float32"))

    def _checkpoint(self, version: int, kind: str) -> Checkpoint:
        check_held(version, self._model.version, TrainerCall.CHECKPOINT)
        if self._steps.is_open:
            raise CheckpointFailed(0, version, "a step is open")
        if kind == "checkpoint_fails":
            raise CheckpointFailed(0, version, "no space left on device")
        self.context.disk.write(self._model)
        if kind == "checkpoint_untold":
            self.die()
        else:
            self.context.disk.move_latest(version)
        return Checkpoint(version, self._model.digest, _NBYTES)

    def _restore(self, at_most: int) -> TrainerState:
        disk = self.context.disk
        self._model = model = disk.newest(at_most) or UNTRAINED
        self._base = None
        disk.abandon_after(model.version)
        self._steps.close()
        self.context.record(TrainerRestored, self.incarnation_number, model.version, model.digest)
        return self._state()


def _columns_of(chunk: Chunk) -> list[SimulatedPayload]:
    return [handles[0] for handles in chunk.payloads]
