"""Trainer without a model: the same calls and keys, synthetic numbers, a cost model.

Its replies depend only on the groups that it received, not on their order or chunks. If two runs
train the same groups in the same steps, their digests are equal.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Unpack, cast

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.generator import StubConfig
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.messages.media import get_media
from offbeat.messages.training import ChunkResult, StepResult
from offbeat.trainers.backend import (
    Advantages,
    LogprobColumns,
    LogprobRequest,
    TopLogprobs,
    TrainerBackend,
    list_requested_columns,
)
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.held_columns import NumpyChunk, read_groups
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.transfer_queue.schema import (
    BRANCH_SAMPLES,
    GENERATION_LOGPROBS,
    LOSS_MASK,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_OFFSETS,
    Columns,
)
from offbeat.weight_sync.canary import invent_canary
from offbeat.weight_sync.manifest import plan

if TYPE_CHECKING:
    from tensordict import TensorDictBase

FINISH_SHARE: Final = 0.1
"""Share of a step's time spent in finish. The rest is spread evenly over its groups."""

_UNTRAINED: Final = xxhash.xxh3_128_hexdigest(b"untrained")
_STATE_FILE: Final = "stub.json"


class _State(msgspec.Struct, frozen=True):
    """Saved state in addition to the counters. The digest represents weights and moments."""

    digest: str


@dataclass(slots=True)
class _OpenStep:
    # Digest of each group with its advantages
    digests: list[str] = field(default_factory=list[str])
    epochs: int = 1
    trains_in_finish: bool = False  # several optimizer steps need the groups of all chunks
    held_s: float = 0.0  # time of the groups that finish trains
    tokens: int = 0
    sequences: int = 0
    chunks: int = 0
    compute_s: float = 0.0


class StubTrainer(TrainerBackend):
    """Trainer with weights of only sixteen bytes: its digest."""

    def __init__(
        self,
        config: StubConfig,
        *,
        groups_per_step: int,
        optimizer: OptimizerConfig | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Sleep ``config.step_s`` per step: a share per group, the rest in finish."""
        super().__init__()
        self._config, self._groups_per_step, self._sleep = config, groups_per_step, sleep
        self._learning_rate = (optimizer or OptimizerConfig()).learning_rate
        self._open = _OpenStep()
        self._digest = self.initial_digest = _UNTRAINED

    def make_chunk(self, groups: Sequence[Columns]) -> "TensorDictBase":
        """Return groups as a chunk of numpy columns, so that a dry run loads no torch."""
        return cast("TensorDictBase", NumpyChunk(groups))

    def prepare_logprobs(
        self, chunk: "TensorDictBase", **request: Unpack[LogprobRequest]
    ) -> list[LogprobColumns]:
        """Return the engine's logprobs under the requested names, as if the trainer agreed."""
        names = list_requested_columns(request)
        return [
            {name: group[GENERATION_LOGPROBS].astype(np.float32) for name in names}
            for group in read_groups(chunk)
        ]

    @property
    def parameters(self) -> int:
        return len(bytes.fromhex(self._digest))

    @property
    def vocabulary(self) -> int:
        return 1000

    def top_logprobs(
        self, prompts: Sequence[Sequence[int]], count: int, *, quantize: str | None = None
    ) -> TopLogprobs:
        """Derive next tokens from the digest, as a stub engine with the same digest does."""
        del prompts, count, quantize
        return invent_canary(self._digest)

    def weights_digest(self) -> str:
        return self._digest

    def save(self, directory: str | Path) -> None:
        """Write the weights to where a model would be exported."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._save(Path(directory))

    @property
    def identity(self) -> Identity:
        return Identity("stub", "a stub without a model", xxhash.xxh3_128_hexdigest(b"stub"))

    @property
    def state_nbytes(self) -> int:
        return len(msgspec.json.encode(_State(self._digest)))

    def _save(self, directory: Path) -> None:
        (directory / _STATE_FILE).write_bytes(msgspec.json.encode(_State(self._digest)))

    def _load(self, directory: Path) -> None:
        content = (directory / _STATE_FILE).read_bytes()
        self._digest = msgspec.json.decode(content, type=_State).digest

    def _initialise(self) -> None:
        self._digest = _UNTRAINED

    def _begin(self, loss: LossSpec) -> None:
        self._open = _OpenStep(epochs=loss.epochs, trains_in_finish=loss.optimizer_steps > 1)

    def _drop(self) -> None:
        self._open = _OpenStep()

    def _accumulate(
        self, chunk: "TensorDictBase", advantages: Advantages, minibatches: Sequence[int]
    ) -> ChunkResult:
        groups = read_groups(chunk)
        cost_s = self._config.step_s * (1 - FINISH_SHARE) * len(groups) / self._groups_per_step
        step, counts = self._open, (0, 0)
        if step.trains_in_finish:
            step.held_s, cost_s = step.held_s + cost_s * step.epochs, 0.0
        self._sleep(cost_s)
        for group, group_advantages, minibatch in zip(groups, advantages, minibatches, strict=True):
            digest = _group_digest(group, group_advantages)
            step.digests.append(f"{digest} {minibatch}" if step.trains_in_finish else digest)
            tokens, sequences = _valid(group)
            counts = counts[0] + tokens, counts[1] + sequences
        step.tokens, step.sequences = step.tokens + counts[0], step.sequences + counts[1]
        step.chunks, step.compute_s = step.chunks + 1, step.compute_s + cost_s
        return ChunkResult(*counts, microbatches=1, compute_s=cost_s)

    def _finish(self) -> StepResult:
        step, applied = self._open, self._open.tokens > 0
        cost_s = self._config.step_s * FINISH_SHARE + step.held_s
        self._sleep(cost_s)
        of_step = xxhash.xxh3_128_hexdigest("\n".join(sorted(step.digests)).encode())
        if applied:
            self._digest = xxhash.xxh3_128_hexdigest((self._digest + of_step).encode())
            self.steps_applied += 1
        self._open = _OpenStep()
        return StepResult(
            applied=applied,
            loss=int(of_step[:8], 16) / 2**32 if applied else 0.0,
            grad_norm=math.exp(-self.steps_applied / 100),
            learning_rate=self._learning_rate,
            tokens=step.tokens,
            sequences=step.sequences,
            chunks=step.chunks,
            metrics={},
            reason="" if applied else "no valid tokens",
            compute_s=step.compute_s + cost_s,
        )


class StubSource:
    """Weight source of the stub: the sixteen bytes of its weights."""

    def __init__(self, trainer: StubTrainer) -> None:
        self._trainer = trainer
        self.manifest = plan([("stub.weight", (16,), "uint8")], chunk_bytes=1024)

    def chunks(
        self, room: Callable[[int, int], NDArray[np.uint8]] | None = None
    ) -> Iterator[tuple[NDArray[np.uint8], str]]:
        del room
        packed = np.frombuffer(bytearray.fromhex(self._trainer.weights_digest()), np.uint8)
        yield packed, xxhash.xxh3_128_hexdigest(packed.data)


def make_stub_rank(spec: TrainerSpec, peers: Peers) -> tuple[StubTrainer, StubSource]:
    """Create the stub trainer, which represents all ranks of the recipe, and its weight source."""
    del peers
    config = spec.config
    if isinstance(config.algorithm.loss, CustomLossConfig):
        from offbeat.trainers.losses import load_losses  # noqa: PLC0415 -- torch

        load_losses(spec)  # so that a dry run finds a broken loss
    trainer = StubTrainer(
        config.stub,
        optimizer=config.trainer.optimizer,
        groups_per_step=config.groups_per_step,
    )
    return trainer, StubSource(trainer)


def _group_digest(group: Columns, advantages: Sequence[float]) -> str:
    digest = xxhash.xxh3_128()
    names = [PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, LOSS_MASK]
    names += [name for name in (BRANCH_SAMPLES,) if name in group]
    names += get_media(group) or ()
    for name in names:
        digest.update(np.ascontiguousarray(group[name]).data)
    digest.update(np.asarray(advantages, np.float64).data)
    return digest.hexdigest()


def _valid(group: Columns) -> tuple[int, int]:
    """Count the valid tokens, and the samples with at least one."""
    starts = np.asarray(group[RESPONSE_OFFSETS], np.int64)[:-1]
    valid = np.asarray(group[LOSS_MASK], np.int64)
    by_branch = np.add.reduceat(valid, starts)
    by_sample = np.bincount(group.get(BRANCH_SAMPLES, np.arange(len(starts))), weights=by_branch)
    return int(valid.sum()), int((by_sample > 0).sum())
