"""What every trainer rank does: fence, classified failures, its own log of what it trained.

A sync actor with one call at a time (``max_concurrency=1``, Ray's default for it): calls are served
in the order the controller makes them, which the split step relies on.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray

from offbeat.actors.fence_guard import FenceGuard
from offbeat.actors.process import prepare
from offbeat.actors.trainers.spec import TrainerSpec
from offbeat.messages.failures import OffbeatError, TrainStepFailed
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import ChunkResult, LossSpec, StepResult, TrainerState
from offbeat.transfer_queue.schema import Columns, payload_bytes
from offbeat.weight_sync.manifest import Manifest, release_digest

T = TypeVar("T")
Advantages = Sequence[Sequence[float]]
Places = Sequence[Sequence[tuple[int, int]]]


class SplitStep(Protocol):
    """The split step of one rank, as the actor drives it."""

    steps_applied: int

    @property
    def parameters(self) -> int: ...
    def prepare_logprobs(
        self, groups: Sequence[Columns], *, policy: bool, reference: bool, temperature: float
    ) -> list[dict[str, NDArray[np.float32]]]: ...
    def begin_train_step(self, key: StepKey, loss: LossSpec) -> None: ...
    def train_microbatch(
        self, key: StepKey, groups: Sequence[Columns], advantages: Advantages
    ) -> ChunkResult: ...
    def finish_train_step(self, key: StepKey) -> StepResult: ...
    def abort_train_step(self, key: StepKey) -> None: ...
    def weights_digest(self) -> str: ...
    def save(self, directory: str | Path) -> None: ...


class WeightSource(Protocol):
    """The sending end of weight sync."""

    manifest: Manifest

    def chunks(self) -> Iterator[tuple[NDArray[np.uint8], str]]: ...


class TrainerActor:
    """One trainer rank around a split step and a weight source."""

    def __init__(self, spec: TrainerSpec, step: SplitStep, source: WeightSource) -> None:
        prepare(f"trainer-rank{spec.rank}", spec.run_dir)
        self._rank, self._split, self._source = spec.rank, step, source
        self._checkpoints = Path(spec.run_dir) / "checkpoints"
        self._guard = FenceGuard(f"trainer rank {spec.rank}")
        self._log = TrainedLog(Path(spec.run_dir) / "logs" / f"trained-rank{spec.rank}.jsonl")
        self._ordinals: dict[StepKey, Sequence[int]] = {}  # by call: a repeated one counts once
        self._last = StepKey(0, 0, 0)

    def state(self, fence: Fence) -> TrainerState:
        self._guard.check(fence)
        return TrainerState(
            ranks=1,
            version=self._split.steps_applied,
            last_step=self._last.step,
            last_attempt=self._last.attempt,
            parameters=self._split.parameters,
            digest=self._split.weights_digest(),
        )

    def weight_chunks(self, fence: Fence) -> int:
        """Chunks of every release: what ``publish_weights`` returns behind its first value."""
        self._guard.check(fence)
        return len(self._source.manifest.chunk_nbytes)

    def publish_weights(self, fence: Fence, version: int) -> tuple[Any, ...]:
        """``((manifest, digest), chunk, chunk, ...)``: a snapshot; training may go on at once."""
        self._guard.check(fence)
        if version != self._split.steps_applied:
            raise TrainStepFailed(
                self._rank, version, "publish", f"it holds version {self._split.steps_applied}"
            )
        chunks, digests = zip(*self._source.chunks(), strict=True)
        manifest = self._source.manifest
        return (manifest, release_digest(manifest, digests)), *chunks

    @ray.method(num_returns=2)
    def prepare_logprobs(
        self, fence: Fence, loss: LossSpec, places: Places, *payloads: Sequence[Columns]
    ) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], list[Columns]]:
        """``(column names, bytes of each group)``, and the columns written, a group each."""
        self._guard.check(fence)
        written = self._classified(
            "prepare_logprobs",
            self._last.step + 1,
            lambda: self._split.prepare_logprobs(
                merged(places, payloads),
                policy=loss.needs_policy_logprobs,
                reference=loss.needs_reference_logprobs,
                temperature=loss.temperature,
            ),
        )
        sizes = tuple(payload_bytes(columns) for columns in written)
        return (tuple(written[0]), sizes), list(written)

    def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        self._guard.check(fence)
        self._classified("begin", key.step, lambda: self._split.begin_train_step(key, loss))
        self._ordinals = {k: v for k, v in self._ordinals.items() if k.attempt_id == key.attempt_id}

    def train_microbatch(
        self,
        fence: Fence,
        key: StepKey,
        ordinals: Sequence[int],
        advantages: Advantages,
        places: Places,
        *payloads: Sequence[Columns],
    ) -> ChunkResult:
        """One chunk: ``places[i]`` says where in the payloads the columns of group i are."""
        self._guard.check(fence)
        groups = merged(places, payloads)
        result = self._classified(
            "microbatch", key.step, lambda: self._split.train_microbatch(key, groups, advantages)
        )
        self._ordinals[key] = ordinals
        return result

    def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        self._guard.check(fence)
        result = self._classified("finish", key.step, lambda: self._split.finish_train_step(key))
        if result.applied and key.attempt_id != self._last.attempt_id:
            self._log.write(key, list(chain.from_iterable(self._ordinals.values())))
            self._last = key
        return result

    def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        self._guard.check(fence)
        self._split.abort_train_step(key)

    def save(self, fence: Fence, step: int) -> None:
        """A Hugging Face directory that transformers and vLLM load, in the run's checkpoints."""
        self._guard.check(fence)
        self._split.save(self._checkpoints / f"step_{step}")

    def close(self) -> None:
        self._log.close()

    def _classified(self, during: str, step: int, work: Callable[[], T]) -> T:
        """Run ``work``; what it raises of its own becomes a failure of this rank in this step."""
        try:
            return work()
        except OffbeatError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            detail = f"{type(error).__name__}: {error} ({where})".replace("\n", " ")
            raise TrainStepFailed(self._rank, step, during, detail) from error


class TrainedLog:
    """The trainer's own account of which groups it trained, apart from the controller's ledger."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def write(self, key: StepKey, ordinals: Sequence[int]) -> None:
        """One line an applied step, written before the controller hears of it."""
        record = {"step": key.step, "attempt": key.attempt, "ordinals": list(ordinals)}
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def merged(places: Places, payloads: Sequence[Sequence[Columns]]) -> list[Columns]:
    """The columns of each group, from all the places they are in."""
    groups = list[Columns]()
    for group in places:
        columns: dict[str, NDArray[np.generic]] = {}
        for payload, index in group:
            columns |= payloads[payload][index]
        groups.append(columns)
    return groups
