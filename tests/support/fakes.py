"""Fakes of the controller's ports, with faults that can be switched on."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offbeat.messages.failures import (
    ActorLost,
    CheckpointFailed,
    EngineUnavailable,
    FailureKind,
    RolloutFailed,
    StepOutOfOrder,
    TrainStepFailed,
    WeightSyncFailed,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.messages.training import (
    Checkpoint,
    Chunk,
    ChunkResult,
    LossSpec,
    PreparedColumns,
    StepResult,
    TrainerState,
)
from offbeat.messages.weights import EngineState, WeightRelease, WeightsAck


@dataclass
class FakePrompts:
    """Prompts without content; endless unless ``count`` is given."""

    count: int | None = None

    def prompt(self, ordinal: int) -> Prompt | None:
        if self.count is not None and ordinal >= self.count:
            return None
        return Prompt(ordinal, 0, ordinal, {})


@dataclass
class FakeGenerator:
    """One engine. Set ``dead`` to lose it; ``restart`` brings it back with a new incarnation."""

    name: str
    load_s: float = 0.5
    version: int | None = None
    digest: str | None = None
    life: int = 1
    dead: bool = False
    silent: bool = False  # answers nothing, ever
    broken: bool = False  # the process lives, the engine in it does not
    refuse_loads: int = 0
    lie_about_digest: bool = False
    loads: list[int] = field(default_factory=list[int])
    restarts: int = 0
    closed: bool = False
    killed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def incarnation(self) -> str:
        return f"{self.name}-life-{self.life}"

    def die(self) -> None:
        """Lose the process; its owner starts a new one a second later."""
        self.dead, self.version = True, None
        asyncio.get_running_loop().call_later(1.0, self._reborn)

    def _reborn(self) -> None:
        self.dead, self.silent, self.broken, self.life = False, False, False, self.life + 1

    async def _answer(self) -> None:
        if self.dead:
            raise ActorLost(self.name, "call", "the process is gone")
        if self.broken:
            raise EngineUnavailable(self.name, "answer", "a step raised", "Start another engine")
        if self.silent:
            await self.killed.wait()
            raise ActorLost(self.name, "call", "the process was killed")

    async def state(self, fence: Fence) -> EngineState:
        await self._answer()
        return EngineState(self.name, self.incarnation, self.version, self.digest, 0, 0, 0.0, 0)

    async def load_weights(self, fence: Fence, epoch: int, release: WeightRelease) -> WeightsAck:
        await self._answer()
        await asyncio.sleep(self.load_s)
        await self._answer()
        if self.refuse_loads:
            self.refuse_loads -= 1
            raise WeightSyncFailed(self.name, epoch, release.version, "a tensor is missing")
        self.version, self.digest = release.version, release.digest
        self.loads.append(release.version)
        digest = "another" if self.lie_about_digest else release.digest
        return WeightsAck(self.name, self.incarnation, epoch, release.version, digest, 0.4, 0.1)

    async def restart(self) -> None:
        self.restarts += 1
        self.killed.set()
        self.killed = asyncio.Event()
        self.die()

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeRollouts:
    """Environment workers on fake engines. ``faults[ordinal]`` are raised in turn, one an attempt."""

    engines: Mapping[str, FakeGenerator]
    rollout_s: float = 1.0
    slow: dict[int, float] = field(default_factory=dict[int, float])
    faults: dict[int, list[Exception]] = field(default_factory=dict[int, list[Exception]])
    forged: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    started: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    running: int = 0
    peak: int = 0
    closed: bool = False

    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, Any]:
        engine = self.engines[task.engine]
        assert engine.version is not None, "dispatched to an engine without weights"
        self.started.append((task.ordinal, task.attempt))
        first, life = engine.version, engine.life
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            took = self.slow.get(task.ordinal, self.rollout_s * (1 + task.ordinal % 3))
            await asyncio.sleep(took)
        finally:
            self.running -= 1
        if engine.dead or engine.life != life:
            raise RolloutFailed(
                FailureKind.INFRASTRUCTURE, task.ordinal, task.attempt, "engine_lost", engine.name
            )
        if engine.broken:
            raise RolloutFailed(
                FailureKind.INFRASTRUCTURE, task.ordinal, 1, "engine_unavailable", engine.name
            )
        if faults := self.faults.get(task.ordinal):
            raise faults.pop(0)
        receipt = make_receipt(task, first, engine)
        return msgspec.structs.replace(receipt, **self.forged.get(task.ordinal, {})), object()

    async def close(self) -> None:
        self.closed = True


def make_receipt(task: RolloutTask, version: int, engine: FakeGenerator) -> Receipt:
    """An honest receipt: half the samples right, two tokens each, all of one version."""
    n = task.samples
    return Receipt(
        ordinal=task.ordinal,
        attempt=task.attempt,
        engine=engine.name,
        engine_incarnation=engine.incarnation,
        rewards=tuple(float(i % 2) for i in range(n)),
        prompt_tokens=(3,) * n,
        response_tokens=(2,) * n,
        valid_tokens=(2,) * n,
        finish_reasons=("stop",) * n,
        version_spans=(((version, 2),),) * n,
        columns=("response_ids",),
        payload_bytes=100,
    )


@dataclass
class FakeTrainer:
    """Keeps its own log of what it trained: ``steps[i]`` are the ordinals of step i + 1."""

    step_s: float = 2.0
    steps: list[list[int]] = field(default_factory=list[list[int]])
    open: list[int] | None = None
    seq: int = 0
    fail_at: dict[int, list[str]] = field(default_factory=dict[int, list[str]])  # step -> where
    lose_at_step: int | None = None  # its process dies in finish, before the optimizer steps
    dead: bool = False
    lives: int = 1
    last: tuple[int, int] = (0, 0)  # (step, attempt) of the newest applied step
    checkpoints: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])
    broken_disk: bool = False
    refuse_steps: set[int] = field(default_factory=set[int])
    aborted: list[int] = field(default_factory=list[int])
    chunks: list[int] = field(default_factory=list[int])  # tokens of each
    prepared: int = 0
    saved: list[int] = field(default_factory=list[int])
    hang: bool = False
    closed: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one call at a time, in order

    def _maybe_fail(self, key: StepKey, where: str) -> None:
        if where in self.fail_at.get(key.step, []):
            self.fail_at[key.step].remove(where)
            raise TrainStepFailed(0, key.step, where, "out of memory")
        if self.lose_at_step == key.step and where == "finish":
            self.lose_at_step = None
            self.die()
        self._alive(where)

    def _alive(self, where: str) -> None:
        if self.dead:
            raise ActorLost("trainer rank 0", where, "the process is gone")

    def die(self) -> None:
        """Lose the process; ``restart`` starts a new one, with the initial model."""
        self.dead, self.steps, self.open, self.last = True, [], None, (0, 0)

    async def state(self, fence: Fence) -> TrainerState:
        self._alive("state")
        return TrainerState(1, len(self.steps), *self.last, 10, self._digest())

    async def prepare_logprobs(self, fence: Fence, chunk: Chunk, loss: LossSpec) -> PreparedColumns:
        self.prepared += 1
        n = len(chunk.ordinals)
        return PreparedColumns(("policy_logprobs",), (8,) * n, (object(),) * n)

    async def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        async with self.turn:
            self._alive("begin")
            assert self.open is None, "a step is open"
            assert key.step == len(self.steps) + 1
            self._maybe_fail(key, "begin")
            self.open, self.seq = [], 0

    async def train_microbatch(self, fence: Fence, key: StepKey, chunk: Chunk) -> ChunkResult:
        async with self.turn:
            if self.open is None or key.seq != self.seq + 1:
                raise StepOutOfOrder(str(key), str(self.seq + 1))
            if self.hang:
                await asyncio.Event().wait()
            await asyncio.sleep(self.step_s / 2)
            self._maybe_fail(key, "microbatch")
            self.seq = key.seq
            self.open += chunk.ordinals
            self.chunks.append(chunk.tokens)
            return ChunkResult(4, 2, 1, self.step_s / 2)

    async def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        async with self.turn:
            await asyncio.sleep(self.step_s / 2)
            self._maybe_fail(key, "finish")
            if self.open is None or key.seq != self.seq + 1:
                raise StepOutOfOrder(str(key), str(self.seq + 1))
            applied = key.step not in self.refuse_steps
            if applied:
                self.steps.append(self.open)
                self.last = (key.step, key.attempt)
            else:
                self.refuse_steps.remove(key.step)
            self.open = None
            reason = "" if applied else "gradient norm is nan"
            return StepResult(applied, 0.5, 1.0, 1e-3, 8, 4, 1, {}, reason, self.step_s)

    async def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        self.open = None
        self.aborted.append(key.step)

    async def publish_weights(self, fence: Fence, version: int) -> WeightRelease:
        self._alive("publish")
        assert version == len(self.steps)
        return WeightRelease(version, self._digest(), None, (), 10)

    async def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        self._alive("checkpoint")
        if self.broken_disk:
            raise CheckpointFailed(0, version, "no space left on device")
        assert version == len(self.steps)
        self.checkpoints[version] = list(self.steps)
        return Checkpoint(version, self._digest(), 10, 0.1)

    async def restore(self, fence: Fence, at_most: int) -> TrainerState:
        self._alive("restore")
        kept = [version for version in self.checkpoints if version <= at_most]
        self.steps = list(self.checkpoints[max(kept)]) if kept else []
        self.open = None
        return await self.state(fence)

    async def restart(self) -> None:
        self.dead, self.hang, self.lives = False, False, self.lives + 1
        self.steps, self.open, self.last = [], None, (0, 0)
        self.turn = asyncio.Lock()

    async def save(self, fence: Fence, step: int) -> None:
        assert step == len(self.steps)
        self.saved.append(step)

    async def close(self) -> None:
        self.closed = True

    def _digest(self) -> str:
        return f"digest-{len(self.steps)}"


@dataclass
class MemoryJournal:
    """Keeps the events; remembers how many were durable at each barrier."""

    events: list[msgspec.Struct] = field(default_factory=list[msgspec.Struct])
    barriers: list[int] = field(default_factory=list[int])

    def append(self, event: msgspec.Struct) -> None:
        self.events.append(event)

    async def barrier(self) -> None:
        self.barriers.append(len(self.events))


@dataclass
class MemoryTelemetry:
    records: list[dict[str, float]] = field(default_factory=list[dict[str, float]])

    def emit(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self.records.append({"step": step, "version": version, **metrics})
