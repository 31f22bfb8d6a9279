"""Base class of the trainers of all backends: a split train step, and a state that can be saved.

A backend implements how a step is begun, accumulated, finished and undone, and how its state is
stored. This module implements the counters and the order of the calls of a split train step
(``StepGuard``), which are the same for every backend.

    state            begin                microbatch, finish           abort
    CLOSED           opens a newer        only repeats                 nothing to do
    OPEN             only repeats         the next one, or repeats     closes
    BROKEN           refused              only repeats                 closes

A repeat is a call whose key already has a reply. The stored reply is returned and nothing runs.
Replies are kept until the next attempt begins. A call that raises may have left half a microbatch
in the gradients. So the attempt is then BROKEN, and only an abort is accepted.

Attempts increase over the whole run. Step numbers may repeat, because a restored trainer repeats
older steps. So the attempt alone decides which of two keys is newer.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Required, TypedDict, TypeVar, Unpack, cast

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.failures import (
    InitialWeightsChanged,
    StepAlreadyOpen,
    StepBroken,
    StepOutOfOrder,
)
from offbeat.messages.fences import StepKey
from offbeat.messages.training import ChunkResult, StepResult
from offbeat.models.media_rules import TEXT_ONLY, MediaRules
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.transfer_queue.schema import (
    POLICY_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    Columns,
)

if TYPE_CHECKING:
    from tensordict import TensorDictBase


T = TypeVar("T")


class StepCall(enum.StrEnum):
    """The calls of a train step that have a key and a stored reply."""

    BEGIN = "begin_train_step"
    MICROBATCH = "train_microbatch"
    FINISH = "finish_train_step"


class _State(enum.Enum):
    CLOSED = enum.auto()
    OPEN = enum.auto()
    BROKEN = enum.auto()


class StepGuard:
    """Runs each call of a step once, in order, and stores its reply."""

    def __init__(self) -> None:
        self._state = _State.CLOSED
        self._last = (0, 0)  # (step, attempt) of the newest attempt that was begun or aborted
        # Replies of that attempt, in order of seq
        self._replies: dict[StepKey, tuple[StepCall, object]] = {}

    @property
    def is_open(self) -> bool:
        """Return whether an attempt has begun and is neither finished nor aborted."""
        return self._state is not _State.CLOSED

    def once(self, key: StepKey, call: StepCall, work: Callable[[], T]) -> T:
        """Return the stored reply of a repeated key, else run ``work`` if this call is next.

        Raises:
            StepAlreadyOpen: The call begins an attempt while another attempt is open.
            StepOutOfOrder: This is not the next call, or the key's reply belongs to a different
                call.
            Exception: Any error of ``work``. After it, only an abort is accepted.
        """
        if key in self._replies:
            answered, reply = self._replies[key]
            if answered is not call:
                raise StepOutOfOrder(_text(key, call), f"{answered}, which had this key")
            return cast("T", reply)
        if call is StepCall.BEGIN:
            self._open(key)
        elif self._state is not _State.OPEN or key != self._next_key():
            is_broken = self._state is _State.BROKEN and key.attempt_id == self._last
            refusal = StepBroken if is_broken else StepOutOfOrder
            raise refusal(_text(key, call), self._describe_expected())
        self._state = _State.BROKEN
        reply = work()
        self._state = _State.CLOSED if call is StepCall.FINISH else _State.OPEN
        self._replies[key] = (call, reply)
        return reply

    def abort(self, key: StepKey) -> bool:
        """Close the open attempt. Return True if one was open: the caller then undoes its work.

        The key's attempt and all earlier ones can never begin again. If a newer attempt is open,
        the abort is late and does nothing.
        """
        if key.attempt < self._last[1]:
            return False
        was_open = self.is_open
        if was_open or key.attempt > self._last[1]:
            self._state, self._last, self._replies = _State.CLOSED, key.attempt_id, {}
        return was_open

    def close(self) -> None:
        """Discard the open attempt, if any, and all replies, which belong to discarded weights.

        Attempts older than the newest one are still refused.
        """
        self._state, self._replies = _State.CLOSED, {}

    def _open(self, key: StepKey) -> None:
        if self.is_open and key.attempt_id != self._last:
            raise StepAlreadyOpen(*self._last, key.step)
        if key.seq != 0 or key.attempt <= self._last[1]:
            raise StepOutOfOrder(_text(key, StepCall.BEGIN), self._describe_expected())
        self._last, self._replies = key.attempt_id, {}

    def _next_key(self) -> StepKey:
        return StepKey(*self._last, len(self._replies))

    def _describe_expected(self) -> str:
        step, attempt = self._last
        if self._state is _State.CLOSED:
            return f"{StepCall.BEGIN} of an attempt after {attempt}, of step {step}, with seq 0"
        if self._state is _State.BROKEN:
            return f"abort_train_step of (step {step}, attempt {attempt}): a call of it failed"
        return f"(step {step}, attempt {attempt}, seq {len(self._replies)})"


def _text(key: StepKey, call: StepCall) -> str:
    return f"{call} (step {key.step}, attempt {key.attempt}, seq {key.seq})"


log = structlog.stdlib.get_logger()
Advantages = Sequence[Sequence[float]]
LogprobColumns = dict[str, NDArray[np.float32]]
TopLogprobs = tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]
"""Token ids and their logprobs (natural log): one tuple per prompt, most probable token first."""
COUNTERS: Final = "counters.json"


class LogprobRequest(TypedDict, total=False):
    """Models under which log-probabilities are computed."""

    policy: Required[bool]
    """The trained weights."""

    reference: Required[bool]
    """The initial weights."""

    temperature: Required[float]
    """Logprobs are of softmax(logits / temperature)."""

    teacher: str | None
    """Directory of the teacher model, which never changes, or None (the default) for no teacher."""


def list_requested_columns(request: LogprobRequest) -> list[str]:
    """Return the names of the columns that a request fills."""
    by_name = {
        POLICY_LOGPROBS: request["policy"],
        REFERENCE_LOGPROBS: request["reference"],
        TEACHER_LOGPROBS: request.get("teacher") is not None,
    }
    return [name for name, is_wanted in by_name.items() if is_wanted]


class _Counters(msgspec.Struct, frozen=True):
    """Number of applied steps, and key of the newest one, as stored in ``counters.json``."""

    steps_applied: int
    last_applied: StepKey | None


class TrainerBackend(ABC):
    """The trainer of one rank. Not safe to call from two threads.

    A call that raises before the optimizer runs leaves weights and moments unchanged. So the step
    may be retried after an abort. A finish that raises may have changed some weights or moments.
    Then only ``load_state`` or ``reset`` makes the trainer consistent again.
    """

    def __init__(self) -> None:
        self._guard = StepGuard()
        self.steps_applied: int = 0
        self.last_applied: StepKey | None = None  # key of the newest applied step's finish
        self.is_first = True  # whether this is rank 0, which writes the files that all ranks share
        self.initial_digest = ""  # digest of the initial weights; every backend sets it
        self._current_digest: str | None = None  # None: the weights may have changed since

    # --- the step --------------------------------------------------------------------------------

    def make_chunk(self, groups: Sequence[Columns]) -> "TensorDictBase":
        """Return groups as a chunk that this backend reads, without copying their columns."""
        from offbeat.transfer_queue.tensordict_codec import build_chunk  # noqa: PLC0415 -- torch

        return build_chunk(groups)

    def begin_train_step(self, key: StepKey, loss: LossSpec) -> None:
        """Open a step with no gradients. The module's docstring describes the keys."""
        self._guard.once(key, StepCall.BEGIN, lambda: self._begin(loss))

    def train_microbatch(
        self,
        key: StepKey,
        chunk: "TensorDictBase",
        advantages: Advantages,
        minibatches: Sequence[int] = (),
    ) -> ChunkResult:
        """Add the gradients of a chunk to the sums of the open step.

        With several optimizer steps per step, this call only checks and keeps the groups.
        ``finish`` trains them, because a minibatch may have groups of all chunks.

        Args:
            key: The next key of the step.
            chunk: This rank's groups (``make_chunk``), with the columns that the loss needs.
            advantages: One value per sample of each group.
            minibatches: Minibatch of each group, from 0. If empty, all groups belong to the first.
        """
        parts = minibatches or (0,) * len(chunk)
        return self._guard.once(
            key, StepCall.MICROBATCH, lambda: self._accumulate(chunk, advantages, parts)
        )

    def finish_train_step(self, key: StepKey) -> StepResult:
        """Normalise and clip the gradients, check them, and update the weights.

        If the result is not ``applied``, weights, moments and schedule are unchanged. With several
        optimizer steps, the result is ``applied`` if at least one of them was. Minibatches that
        cannot be applied are skipped.
        """
        self._current_digest = None
        result = self._guard.once(key, StepCall.FINISH, self._finish)
        if result.applied:
            self.last_applied = key
        return result

    def abort_train_step(self, key: StepKey) -> None:
        """Discard the open step, if any, and restore the trainer's state before that step."""
        if self._guard.abort(key):
            self._drop()

    def train(
        self,
        chunk: "TensorDictBase",
        advantages: Advantages,
        loss: LossSpec,
        minibatches: Sequence[int] = (),
    ) -> StepResult:
        """Run a whole step in one call.

        The result is the same however a step is split into calls. No step may be open when this is
        called.
        """
        if self._guard.is_open:
            raise RuntimeError("train() while a split step is open. Finish or abort it first")
        self._current_digest = None
        with self._undone_if_raised():
            self._begin(loss)
            self._accumulate(chunk, advantages, minibatches or (0,) * len(chunk))
            return self._finish()

    # --- the state -------------------------------------------------------------------------------

    def save_state(self, directory: Path) -> None:
        """Write everything that ``load_state`` needs into an empty directory, without syncing it.

        All ranks must call it together, with the same directory.

        Raises:
            OSError: The disk is full or failed.
        """
        self._save(directory)
        if self.is_first:
            counters = _Counters(self.steps_applied, self.last_applied)
            (directory / COUNTERS).write_bytes(msgspec.json.encode(counters))

    def load_state(self, directory: Path) -> None:
        """Load the state that ``save_state`` wrote.

        The next steps equal the saved trainer's next steps, bit for bit. An open step is discarded.
        If this raises, the trainer holds neither the old nor the new state.
        """
        self._close()
        self._current_digest = None
        self._load(directory)
        counters = msgspec.json.decode((directory / COUNTERS).read_bytes(), type=_Counters)
        self.steps_applied, self.last_applied = counters.steps_applied, counters.last_applied

    def reset(self) -> None:
        """Return to the initial model: version 0, a new optimizer, no open step.

        Raises:
            InitialWeightsChanged: ``model.path`` no longer holds the weights it had at creation.
        """
        self._close()
        self._current_digest = None
        self._initialise()
        self._check_initial(self.current_digest())
        self.steps_applied, self.last_applied = 0, None

    def current_digest(self) -> str:
        """Return ``weights_digest()``. Compute it only at the first call after the weights changed.

        All ranks must call it together.
        """
        if self._current_digest is None:
            self._current_digest = self.weights_digest()
        return self._current_digest

    def _check_initial(self, digest: str) -> None:
        """Raise if ``model.path`` no longer holds the weights that this trainer began with."""
        if digest != self.initial_digest:
            raise InitialWeightsChanged(self.initial_digest, digest)

    @contextmanager
    def _undone_if_raised(self) -> Generator[None]:
        """Roll back the open step if the block raises. Re-raise even if the rollback fails."""
        try:
            yield
        except BaseException:
            log_failure(self._drop)
            raise

    def _close(self) -> None:
        self._guard.close()
        self._drop()

    # --- implemented by each backend -------------------------------------------------------------

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """Return the identity of this trainer's state.

        Only a trainer with the same identity can load the state.
        """

    @property
    @abstractmethod
    def state_nbytes(self) -> int:
        """Estimate the bytes that ``save_state`` writes."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Return the number of weights. Tied weights count once."""

    @abstractmethod
    def prepare_logprobs(
        self, chunk: "TensorDictBase", **request: Unpack[LogprobRequest]
    ) -> list[LogprobColumns]:
        """Compute the log-probability of every response token under the current weights.

        Args:
            chunk: This rank's groups (``make_chunk``).
            request: The models to compute them under.

        Returns:
            For each group, the requested columns of ``policy_logprobs``, ``reference_logprobs`` and
            ``teacher_logprobs``: [N] float32 each, one value per response token of the group.
        """

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Return the number of token ids that a prompt may contain."""

    @property
    def media_rules(self) -> MediaRules:
        """Return the rules of the media that the model reads."""
        return TEXT_ONLY

    @abstractmethod
    def top_logprobs(
        self, prompts: Sequence[Sequence[int]], count: int, *, quantize: str | None = None
    ) -> TopLogprobs:
        """Return the most probable next tokens after prompts of equal length.

        The current weights are used. With ``quantize``, a format of ``sync.quantize``, each matrix
        that this format quantizes has the values that engines compute with. All ranks must call it
        together, and the result of rank 0 counts. Weights are unchanged, and so are gradients of an
        open step.
        """

    @abstractmethod
    def weights_digest(self) -> str:
        """Compute one digest over names and bytes of all weights, equal on all ranks."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Export the model as a directory that other programs can load."""

    @abstractmethod
    def _begin(self, loss: LossSpec) -> None: ...

    @abstractmethod
    def _accumulate(
        self, chunk: "TensorDictBase", advantages: Advantages, minibatches: Sequence[int]
    ) -> ChunkResult: ...

    @abstractmethod
    def _finish(self) -> StepResult:
        """Finish the open step, count it if it was applied, and leave no step open."""

    @abstractmethod
    def _drop(self) -> None:
        """Undo an open step. Without one, do nothing."""

    @abstractmethod
    def _save(self, directory: Path) -> None: ...

    @abstractmethod
    def _load(self, directory: Path) -> None: ...

    @abstractmethod
    def _initialise(self) -> None:
        """Restore the weights and optimizer that the constructor created."""


def log_failure(undo: Callable[[], None]) -> None:
    """Call ``undo`` at the end of a step whose outcome is known, and only log its errors.

    If the error were raised, it would mask an error of the step, or make an applied update look
    failed, so that it would be retried. The next step begins by discarding gradients. It raises
    there if that fails again.
    """
    try:
        undo()
    except Exception as error:  # noqa: BLE001 -- a library's, of its collectives or its device
        log.error("trainer.undo_failed", error=repr(error))  # noqa: TRY400
