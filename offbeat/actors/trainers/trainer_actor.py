"""What every trainer rank does: fence, classified failures, its own log of what it trained.

A sync actor with one call at a time (``max_concurrency=1``, Ray's default for it): calls are served
in the order the controller makes them, which the split step relies on.
"""

import time
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
from offbeat.actors.process import incarnation, prepare
from offbeat.actors.trainers.checkpoint_store import CheckpointStore, Stored
from offbeat.actors.trainers.spec import TrainerSpec
from offbeat.actors.trainers.split_step import Advantages, SplitStep
from offbeat.messages.failures import (
    CheckpointFailed,
    OffbeatError,
    StepOutOfOrder,
    TrainStepFailed,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import Checkpoint, ChunkResult, LossSpec, StepResult, TrainerState
from offbeat.transfer_queue.schema import Columns, payload_bytes
from offbeat.weight_sync.manifest import Manifest, release_digest

T = TypeVar("T")
Places = Sequence[Sequence[tuple[int, int]]]


class WeightSource(Protocol):
    """The sending end of weight sync."""

    manifest: Manifest

    def chunks(self) -> Iterator[tuple[NDArray[np.uint8], str]]: ...


class TrainerActor:
    """One trainer rank around a split step and a weight source.

    It starts with the initial model, version 0; ``restore`` brings it to where a run is. A finish that
    raises (``TrainStepFailed`` during finish) may leave weights that are of no version: no retry helps,
    only a restore.
    """

    def __init__(self, spec: TrainerSpec, step: SplitStep, source: WeightSource) -> None:
        prepare(f"trainer-rank{spec.rank}", spec.run_dir)
        self._rank, self._split, self._source = spec.rank, step, source
        self._checkpoints = Path(spec.run_dir) / "checkpoints"
        self._guard = FenceGuard(f"trainer rank {spec.rank}")
        self._log = TrainedLog(Path(spec.run_dir) / "logs" / f"trained-rank{spec.rank}.jsonl")
        self._ordinals: dict[StepKey, Sequence[int]] = {}  # by call: a repeated one counts once
        self._life = incarnation(f"trainer-rank{spec.rank}")
        keep = spec.config.checkpoint.keep
        self._store = CheckpointStore(self._checkpoints, step.identity, keep=keep, rank=spec.rank)

    def state(self, fence: Fence) -> TrainerState:
        self._guard.check(fence)
        last = self._split.last_applied or StepKey(0, 0, 0)
        return TrainerState(
            ranks=1,
            version=self._split.steps_applied,
            last_step=last.step,
            last_attempt=last.attempt,
            parameters=self._split.parameters,
            digest=self._split.weights_digest(),
        )

    def about(self, fence: Fence) -> tuple[str, int]:
        """A name for this process life, and the chunks that ``publish_weights`` returns at its end."""
        self._guard.check(fence)
        return self._life, len(self._source.manifest.chunk_nbytes)

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
            self._split.steps_applied + 1,
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
        """Open a step: the one after the version these ranks hold, and no other.

        A rank that was started anew without its controller's knowledge holds the initial model.
        """
        self._guard.check(fence)
        if key.step != self._split.steps_applied + 1:
            held = f"the step after version {self._split.steps_applied}, which this rank holds"
            raise StepOutOfOrder(f"begin of step {key.step}", held)
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
        before = self._split.last_applied
        result = self._classified("finish", key.step, lambda: self._split.finish_train_step(key))
        if result.applied and key != before:
            ordinals = list(chain.from_iterable(self._ordinals.values()))
            self._log.trained(key, self._split.steps_applied, ordinals)
        return result

    def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        self._guard.check(fence)
        self._split.abort_train_step(key)

    def save(self, fence: Fence, step: int) -> None:
        """A Hugging Face directory that transformers and vLLM load, in the run's checkpoints.

        Raises:
            TrainStepFailed: These are not the weights of ``step``: a rank was started anew.
        """
        self._guard.check(fence)
        if step != self._split.steps_applied:
            held = f"it holds version {self._split.steps_applied}"
            raise TrainStepFailed(self._rank, step, "save", held)
        self._split.save(self._checkpoints / f"step_{step}")

    def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        """All that ``restore`` needs, complete and durable. Training waits meanwhile.

        Raises:
            CheckpointFailed: The disk refused, or this is not the version it holds.
        """
        self._guard.check(fence)
        started = time.perf_counter()
        if version != self._split.steps_applied:
            held = f"it holds version {self._split.steps_applied}"
            raise CheckpointFailed(self._rank, version, held)
        digest = self._split.weights_digest()
        nbytes = self._store.save(version, digest, self._split.state_nbytes, self._split.save_state)
        return Checkpoint(version, digest, nbytes, time.perf_counter() - started)

    def restore(self, fence: Fence, at_most: int) -> TrainerState:
        """Take up the newest checkpoint that verifies, or the initial model; newer ones are set aside.

        An open step is dropped. The next begin may be of any step, its attempt a new one.

        Raises:
            CheckpointMismatch: That checkpoint is of another model, backend or schema.
            CheckpointFailed: It could not be read, or holds other weights than it says.
        """
        self._guard.check(fence)
        found = self._store.rewind(at_most)
        self._ordinals = {}
        if found is None:
            self._split.reset()
        else:
            self._load(found)
        self._log.restored(self._split.steps_applied)
        return self.state(fence)

    def close(self) -> None:
        self._log.close()

    def _load(self, stored: Stored) -> None:
        try:
            self._split.load_state(stored.directory)
        except OSError as error:
            raise CheckpointFailed(self._rank, stored.version, str(error)) from error
        got = (self._split.steps_applied, self._split.weights_digest())
        want = (stored.version, stored.manifest.weights_digest)
        if got != want:
            problem = f"version and weights are {got}, its manifest says {want}"
            raise CheckpointFailed(self._rank, stored.version, problem)

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
    """The trainer's own account of which groups it trained, apart from the controller's ledger.

    ``{"step", "attempt", "version", "ordinals"}`` for each applied step, and ``{"restored": version}``
    where it went back: what was trained for later versions before such a line is gone.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def trained(self, key: StepKey, version: int, ordinals: Sequence[int]) -> None:
        """An applied step, written before the controller hears of it."""
        step = {"step": key.step, "attempt": key.attempt, "version": version}
        self._write(step | {"ordinals": list(ordinals)})

    def restored(self, version: int) -> None:
        """The trainer holds this version again."""
        self._write({"restored": version})

    def _write(self, record: dict[str, Any]) -> None:
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
