"""What every backend's trainer is: a split step with its keys, and a state that can be kept.

A backend says how its step is begun, fed, finished and undone, and what its state is on disk. The key
discipline (``step_guard``) and the counters are here.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.messages.fences import StepKey
from offbeat.messages.training import ChunkResult, LossSpec, StepResult
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.step_guard import StepCall, StepGuard
from offbeat.transfer_queue.schema import Columns

Advantages = Sequence[Sequence[float]]
LogprobColumns = dict[str, NDArray[np.float32]]
TopLogprobs = tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]
"""Tokens and their natural logprobs, of each prompt in falling order."""
COUNTERS: Final = "counters.json"


class _Counters(msgspec.Struct, frozen=True):
    """Where a trainer is in its run."""

    steps_applied: int
    last_applied: StepKey | None


class TrainerBackend(ABC):
    """The trainer of one rank. Not safe to call from two threads.

    A call that raises before the optimizer runs leaves weights and moments as they were: after an
    abort the step may be tried again. A finish that raises may have changed some of them already:
    then only ``load_state`` or ``reset`` make the trainer whole.
    """

    def __init__(self) -> None:
        self._guard = StepGuard()
        self.steps_applied = 0
        self.last_applied: StepKey | None = None  # key of the newest applied split step's finish
        self.is_first = True  # rank of its world: the one that writes what all have to say

    # --- the step --------------------------------------------------------------------------------

    def begin_train_step(self, key: StepKey, loss: LossSpec) -> None:
        """Open a step with no gradients. Keys: ``offbeat.trainers.step_guard``."""
        self._guard.once(key, StepCall.BEGIN, lambda: self._begin(loss))

    def train_microbatch(
        self, key: StepKey, groups: Sequence[Columns], advantages: Advantages
    ) -> ChunkResult:
        """Add a chunk's gradient to the open step's sum.

        Args:
            key: The next of the step.
            groups: This rank's share of them: their columns, with those the loss needs.
            advantages: One a sample of each group.
        """
        return self._guard.once(
            key, StepCall.MICROBATCH, lambda: self._accumulate(groups, advantages)
        )

    def finish_train_step(self, key: StepKey) -> StepResult:
        """Normalise, clip, check, step. Not applied: weights, moments and schedule are untouched."""
        result = self._guard.once(key, StepCall.FINISH, self._finish)
        if result.applied:
            self.last_applied = key
        return result

    def abort_train_step(self, key: StepKey) -> None:
        """Drop the open step, if any: the trainer is as it was before its begin."""
        if self._guard.abort(key):
            self._drop()

    def train(
        self, groups: Sequence[Columns], advantages: Advantages, loss: LossSpec
    ) -> StepResult:
        """A whole step in one call, with the same result as any split of it. Not while one is open."""
        if self._guard.is_open:
            raise RuntimeError("train() while a split step is open. Finish or abort it first")
        self._begin(loss)
        try:
            self._accumulate(groups, advantages)
            return self._finish()
        finally:
            self._drop()

    # --- the state -------------------------------------------------------------------------------

    def save_state(self, directory: Path) -> None:
        """Put all that ``load_state`` needs into an empty directory; nothing is synced.

        All ranks call it together, with the same directory.

        Raises:
            OSError: The disk refused.
        """
        self._save(directory)
        if self.is_first:
            counters = _Counters(self.steps_applied, self.last_applied)
            (directory / COUNTERS).write_bytes(msgspec.json.encode(counters))

    def load_state(self, directory: Path) -> None:
        """Be what ``save_state`` saw; the steps from here on are bit for bit those it would take.

        An open step is dropped. When this raises, the trainer holds neither state.
        """
        self._close()
        self._load(directory)
        counters = msgspec.json.decode((directory / COUNTERS).read_bytes(), type=_Counters)
        self.steps_applied, self.last_applied = counters.steps_applied, counters.last_applied

    def reset(self) -> None:
        """Be the initial model again, at version 0 with a fresh optimizer. An open step is dropped."""
        self._close()
        self._initialise()
        self.steps_applied, self.last_applied = 0, None

    def _close(self) -> None:
        self._guard.close()
        self._drop()

    # --- of each backend -------------------------------------------------------------------------

    @property
    @abstractmethod
    def identity(self) -> Identity:
        """Whose state it saves; only a trainer of an equal one can load it."""

    @property
    @abstractmethod
    def state_nbytes(self) -> int:
        """What ``save_state`` will write, about."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of weights, tied ones once."""

    @abstractmethod
    def prepare_logprobs(
        self, groups: Sequence[Columns], *, policy: bool, reference: bool, temperature: float
    ) -> list[LogprobColumns]:
        """Log-probabilities of every response token, under the weights as they are now."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids that a prompt may hold."""

    @abstractmethod
    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        """The most probable next tokens after prompts of equal length, under the weights as they are.

        All ranks call it together; the first one's answer counts. An open step's gradients stay.
        """

    @abstractmethod
    def weights_digest(self) -> str:
        """Names and bytes of all weights in one number."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Write the model for others to load."""

    @abstractmethod
    def _begin(self, loss: LossSpec) -> None: ...

    @abstractmethod
    def _accumulate(self, groups: Sequence[Columns], advantages: Advantages) -> ChunkResult: ...

    @abstractmethod
    def _finish(self) -> StepResult:
        """Count the step if it was applied, and leave none open."""

    @abstractmethod
    def _drop(self) -> None:
        """Undo an open step; without one, nothing."""

    @abstractmethod
    def _save(self, directory: Path) -> None: ...

    @abstractmethod
    def _load(self, directory: Path) -> None: ...

    @abstractmethod
    def _initialise(self) -> None:
        """Weights and optimizer as the constructor left them."""
