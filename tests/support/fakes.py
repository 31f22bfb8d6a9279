"""Fakes of the controller's ports, with faults that can be switched on."""

import asyncio
import contextlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.config.loss_spec import LossSpec
from offbeat.controller.events import Event
from offbeat.controller.ledger import StepsAfter, steps_after
from offbeat.controller.run_stats import RunStats
from offbeat.fakes.receipts import make_receipt
from offbeat.fakes.refusals import check_held, check_newest_transfer, check_next_step
from offbeat.fakes.step_keys import StepKeys
from offbeat.messages.evaluations import EvaluatedVersion
from offbeat.messages.failures import (
    ActorLost,
    CanaryFailed,
    CheckpointFailed,
    EngineUnavailable,
    FailureKind,
    RolloutFailed,
    StaleFence,
    TrainerCall,
    TrainStepFailed,
    WeightsUnmoved,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import Canary, EngineState, WeightRelease, WeightsAck
from offbeat.telemetry.step_samples import StepSamples


class HighestFence:
    """Refuses whoever is not of the newest incarnation that it has seen of its run."""

    def __init__(self, actor: str) -> None:
        self._actor, self._seen = actor, list[Fence]()

    def check(self, fence: Fence) -> None:
        for seen in self._seen:  # none, or one
            if seen.run_id != fence.run_id or seen.incarnation > fence.incarnation:
                raise StaleFence(self._actor, str(fence), str(seen))
        self._seen = [fence]


@dataclass
class FakeEvaluationLog:
    """Keeps the newest evaluation of each version; give it to the next controller of the run."""

    done: dict[int, EvaluatedVersion] = field(default_factory=dict[int, EvaluatedVersion])

    def has(self, due: int) -> bool:
        return due in self.done

    def take(self, evaluated: EvaluatedVersion) -> None:
        self.done[evaluated.due] = evaluated


@dataclass
class FakeGenerator:
    """One engine. Set ``dead`` to lose it; ``restart`` brings it back with a new incarnation."""

    name: str
    load_s: float = 0.5
    version: int | None = None
    digest: str | None = None
    incarnation_number: int = 1
    dead: bool = False
    silent: bool = False  # answers nothing, ever
    broken: bool = False  # the process lives, the engine in it does not
    refuse_loads: int = 0
    lie_about_digest: bool = False
    other_weights: int = 0  # loads of which it computes other weights than it took
    skips_canaries: bool = False
    loads: list[int] = field(default_factory=list[int])
    epoch: int = 0  # of the newest transfer begun in this incarnation
    restarts: int = 0
    retired: bool = False  # its process ended for good
    closed: bool = False
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.guard = HighestFence(self.name)

    @property
    def incarnation(self) -> str:
        return f"{self.name}-incarnation-{self.incarnation_number}"

    def die(self) -> None:
        """Lose the process; its owner starts a new one a second later."""
        self.dead, self.version, self.digest = True, None, None
        asyncio.get_running_loop().call_later(1.0, self._reborn)

    def _reborn(self) -> None:
        if self.retired:
            return
        self.dead = self.silent = self.broken = False
        self.incarnation_number += 1
        self.guard, self.epoch = HighestFence(self.name), 0

    async def _answer(self, incarnation_number: int | None = None) -> None:
        """Return if it can be spoken to, and still is the incarnation that was called."""
        if incarnation_number not in (None, self.incarnation_number):
            raise ActorLost(self.name, "call", "the process was replaced")
        if self.dead:
            raise ActorLost(self.name, "call", "the process is gone")
        if self.broken:
            raise EngineUnavailable(self.name, "answer", "a step raised", "Start another engine")
        if self.silent:
            await self.killed.wait()
            raise ActorLost(self.name, "call", "the process was killed")

    async def state(self, fence: Fence) -> EngineState:
        await self._answer()
        self.guard.check(fence)
        return EngineState(self.name, self.incarnation, self.version, self.digest, 0, 0, 0.0, 0)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        await self._answer()
        self.guard.check(fence)
        check_newest_transfer(self.name, epoch, release.version, self.epoch)
        self.epoch, incarnation_number = epoch, self.incarnation_number
        await asyncio.sleep(self.load_s)
        await self._answer(incarnation_number)
        if self.refuse_loads:
            self.refuse_loads -= 1
            raise WeightSyncFailed(self.name, epoch, release.version, "a tensor is missing")
        self.loads.append(release.version)
        gap = None
        if release.canary is not None:
            gap = 0.0
            if self.other_weights:
                self.other_weights -= 1
                self.version, self.digest = None, None
                raise CanaryFailed(self.name, epoch, release.version, 42, -3.5, -0.25, 3.25, 0.02)
        self.version, self.digest = release.version, release.digest
        digest = "another" if self.lie_about_digest else release.digest
        return WeightsAck(
            self.name,
            self.incarnation,
            epoch,
            release.version,
            digest,
            0.4,
            0.1,
            canary_gap=None if self.skips_canaries else gap,
        )

    async def restart(self) -> None:
        self.restarts += 1
        self.killed.set()
        self.killed = asyncio.Event()
        self.die()

    async def retire(self) -> None:
        self.retired = True
        self.killed.set()
        self.dead, self.version, self.digest = True, None, None

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeRollouts:
    """Environment workers on fake engines. ``faults[prompt_index]`` are raised in turn, one per attempt."""

    engines: Mapping[str, FakeGenerator]
    rollout_s: float = 1.0
    slow: dict[int, float] = field(default_factory=dict[int, float])
    faults: dict[int, list[Exception]] = field(default_factory=dict[int, list[Exception]])
    forged: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    running: int = 0
    peak: int = 0
    closed: bool = False
    guard: HighestFence = field(default_factory=lambda: HighestFence("environment-0"))
    replaced: dict[int, asyncio.Event] = field(default_factory=dict[int, asyncio.Event])

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        self.guard.check(fence)
        replaced = self.replaced.setdefault(fence.incarnation, asyncio.Event())
        for incarnation, event in self.replaced.items():
            if incarnation < fence.incarnation:
                event.set()
        engine = self.engines[task.engine]
        if engine.dead:
            raise infrastructure(task, "engine_lost")
        if engine.version is None:
            assert engine.incarnation_number > 1, "dispatched to an engine that never had weights"
            raise infrastructure(task, "engine_unavailable")
        self.started.append((task.prompt_index, task.attempt))
        first, incarnation_number = engine.version, engine.incarnation_number
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            took = self.slow.get(task.prompt_index, self.rollout_s * (1 + task.prompt_index % 3))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(took):
                    await replaced.wait()
                raise ActorLost("environment-0", "rollout", "a newer controller took over")
        finally:
            self.running -= 1
        if engine.dead or engine.incarnation_number != incarnation_number:
            raise infrastructure(task, "engine_lost")
        if engine.broken:
            raise infrastructure(task, "engine_unavailable")
        if faults := self.faults.get(task.prompt_index):
            raise faults.pop(0)
        receipt = make_receipt(
            task.prompt_index,
            task.attempt,
            (((first, 2),),) * task.samples,
            engine=engine.name,
            engine_incarnation=engine.incarnation,
            sampling=task.sampling,
            environment=task.prompt.environment,
        )
        return msgspec.structs.replace(receipt, **self.forged.get(task.prompt_index, {})), object()

    async def close(self) -> None:
        self.closed = True


def infrastructure(task: RolloutTask, reason: str) -> RolloutFailed:
    """The engine of this task cannot go on with it; another one may."""
    return RolloutFailed(
        FailureKind.INFRASTRUCTURE, task.prompt_index, task.attempt, reason, task.engine
    )


@dataclass
class FakeTrainer:
    """Keeps its own log of what it trained: ``steps[i]`` are the prompt indices of step i + 1.

    Its weights are that log: their digest follows from it.
    """

    step_s: float = 2.0
    steps: list[list[int]] = field(default_factory=list[list[int]])
    open: list[int] = field(default_factory=list[int])  # prompt indices of the open step
    fail_at: dict[int, list[str]] = field(default_factory=dict[int, list[str]])  # step -> where
    lose_at_step: int | None = None  # its process dies in finish, before the optimizer steps
    dead: bool = False
    incarnation_number: int = 1
    initial: str = "initial weights"  # digest of what model.path holds
    change_initial_at_restart: bool = False
    last: tuple[int, int] = (0, 0)  # (step, attempt) of the newest applied step
    checkpoints: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])
    last_of: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    broken_disk: bool = False
    dies_after_saving: set[int] = field(default_factory=set[int])  # versions
    refuse_steps: set[int] = field(default_factory=set[int])
    unmoved_step: int | None = None  # the optimizer updates nothing in this step
    canaries: bool = False  # releases have one
    same_release_from: int | None = None  # version: 16 bits hide every later change
    metrics: dict[int, dict[str, float]] = field(default_factory=dict[int, dict[str, float]])
    aborted: list[int] = field(default_factory=list[int])
    chunks: list[int] = field(default_factory=list[int])  # tokens of each
    prepared: int = 0
    saved: list[int] = field(default_factory=list[int])
    hang: bool = False
    closed: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time, in order
    keys: StepKeys = field(default_factory=StepKeys)
    guard: HighestFence = field(default_factory=lambda: HighestFence("trainer rank 0"))

    def _maybe_fail(self, key: StepKey, where: str) -> None:
        if where in self.fail_at.get(key.step, []):
            self.fail_at[key.step].remove(where)
            raise TrainStepFailed(0, key.step, TrainerCall(where), "out of memory")
        if self.lose_at_step == key.step and where == "finish":
            self.lose_at_step = None
            self.die()
        self._alive(where)

    def _alive(self, where: str) -> None:
        if self.dead:
            raise ActorLost("trainer rank 0", where, "the process is gone")

    def _admit(self, fence: Fence, where: str) -> None:
        self._alive(where)
        self.guard.check(fence)

    async def _work(self, where: str, seconds: float) -> None:
        """Take this long; a call of one incarnation is not answered by the next."""
        incarnation_number = self.incarnation_number
        await asyncio.sleep(seconds)
        self._alive(where)
        if self.incarnation_number != incarnation_number:
            raise ActorLost("trainer rank 0", where, "the process was replaced")

    def die(self) -> None:
        """Lose the process; ``restart`` starts a new one, with the initial model."""
        self.dead = True
        self._forget()

    def _forget(self) -> None:
        self.steps, self.open, self.last = [], [], (0, 0)
        self.keys, self.guard = StepKeys(), HighestFence("trainer rank 0")

    async def state(self, fence: Fence) -> TrainerState:
        self._admit(fence, "state")
        incarnation = f"trainer-{self.incarnation_number}"
        digest = self._digest()
        return TrainerState(1, len(self.steps), *self.last, 10, digest, incarnation, self.initial)

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        self._admit(fence, "prepare_logprobs")
        self.prepared += 1
        n = len(chunk.prompt_indices)
        return PreparedColumns(("policy_logprobs",), (8,) * n, (object(),) * n)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        async with self.turn:
            self._admit(fence, "begin")
            check_next_step(key, len(self.steps))
            self.keys.once(key, "begin_train_step", lambda: self._begin(key))

    def _begin(self, key: StepKey) -> None:
        self._maybe_fail(key, "begin")
        self.open = []

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        async with self.turn:
            self._admit(fence, "microbatch")
            if self.hang:
                await asyncio.Event().wait()
            await self._work("microbatch", self.step_s / 2)
            return self.keys.once(key, "train_microbatch", lambda: self._accumulate(key, chunk))

    def _accumulate(self, key: StepKey, chunk: Chunk) -> ChunkResult:
        self._maybe_fail(key, "microbatch")
        self.open += chunk.prompt_indices
        self.chunks.append(chunk.tokens)
        return ChunkResult(4, 2, 1, self.step_s / 2)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        async with self.turn:
            self._admit(fence, "finish")
            await self._work("finish", self.step_s / 2)
            return self.keys.once(key, "finish_train_step", lambda: self._finish(key))

    def _finish(self, key: StepKey) -> StepResult:
        self._maybe_fail(key, "finish")
        if key.step == self.unmoved_step:
            raise WeightsUnmoved(0, key.step, 1e-3, 1.0, 500)
        applied = key.step not in self.refuse_steps
        if applied:
            self.steps.append(self.open)
            self.last = (key.step, key.attempt)
        else:
            self.refuse_steps.remove(key.step)
        self.open = []
        reason = "" if applied else "gradient norm is nan"
        metrics = self.metrics.get(key.step, {})
        return StepResult(applied, 0.5, 1.0, 1e-3, 8, 4, 1, metrics, reason, self.step_s)

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        async with self.turn:
            self._admit(fence, "abort")
            self.aborted.append(key.step)
            if self.keys.abort(key):
                self.open = []

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        self._admit(fence, "publish")
        check_held(version, len(self.steps), TrainerCall.PUBLISH)
        same = self.same_release_from is not None and version >= self.same_release_from
        digest = "same" if same else self._digest()
        canary = Canary((), (), (), 0.02)
        return WeightRelease(version, digest, None, (), 10, canary if self.canaries else None)

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        self._admit(fence, "checkpoint")
        if self.broken_disk:
            raise CheckpointFailed(0, version, "no space left on device")
        check_held(version, len(self.steps), TrainerCall.CHECKPOINT)
        self.checkpoints[version], self.last_of[version] = list(self.steps), self.last
        if version in self.dies_after_saving:
            self.dies_after_saving.remove(version)
            self.die()
            self._alive("checkpoint")
        return Checkpoint(version, self._digest(), 10)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        self._admit(fence, "restore")
        version = max((each for each in self.checkpoints if each <= at_most), default=0)
        # Newer ones are of a history that is abandoned here: their numbers come again.
        self.checkpoints = {at: kept for at, kept in self.checkpoints.items() if at <= version}
        self.steps = list(self.checkpoints.get(version, []))
        self.last = self.last_of.get(version, (version, 0)) if version else (0, 0)
        self.open = []
        self.keys.close()
        return await self.state(fence)

    async def restart(self) -> None:
        self.dead = self.hang = False
        self.incarnation_number += 1
        if self.change_initial_at_restart:
            self.initial = "others"
        self._forget()
        self.turn = asyncio.Lock()

    async def save(self, fence: Fence, step: int) -> None:
        self._admit(fence, "save")
        assert step == len(self.steps)
        self.saved.append(step)

    async def close(self) -> None:
        self.closed = True

    def _digest(self) -> str:
        content = repr([sorted(step) for step in self.steps])
        return f"digest-{len(self.steps)}-{zlib.crc32(content.encode()):08x}"


@dataclass
class MemoryJournal:
    """Keeps the events; remembers how many were durable at each barrier."""

    events: list[msgspec.Struct] = field(default_factory=list[msgspec.Struct])
    barriers: list[int] = field(default_factory=list[int])
    stats: RunStats = field(default_factory=RunStats)

    def append(self, event: Event) -> None:
        self.stats.add(event)
        self.events.append(event)

    async def barrier(self) -> None:
        self.barriers.append(len(self.events))

    async def steps_after(self, version: int) -> StepsAfter:
        return steps_after(version, reversed(self.events))  # type: ignore[arg-type]


@dataclass
class MemoryTelemetry:
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    samples: list[StepSamples] = field(default_factory=list[StepSamples])  # of each step

    def emit(
        self,
        step: int,
        version: int,
        metrics: Mapping[str, float],
        samples: Callable[[], StepSamples] | None = None,
    ) -> None:
        self.records.append({"step": step, "version": version, **metrics})
        if samples is not None:
            self.samples.append(samples())
