"""Interfaces of the parts that a rank's trainer is built from: passes, updates and state.

A backend builds the parts. A plug-in replaces or wraps one of them. Also defines the dtype and the
digest of a model's weights, for every backend.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from offbeat.config.loss_spec import LossSpec
from offbeat.models.media_rules import MediaRules
from offbeat.trainers.backend import LogprobRequest, TopLogprobs
from offbeat.trainers.batches.packing import Batch, PackedRows
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.expert_load import ExpertLoad
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.ranks.peers import Peers
from offbeat.transfer_queue.schema import Columns
from offbeat.weight_sync.chunks import as_bytes
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.wire_format_plugin import WireFormat

T = TypeVar("T")
M = TypeVar("M")
LossOf = Callable[[PackedRows, Tensor, Tensor], Tensor]
"""(microbatch, log-probabilities [N], entropies [N]) -> a sum to differentiate."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts about a rank and its model that do not change."""

    device: torch.device
    vocabulary: int  # number of token ids that a prompt may contain
    media_rules: MediaRules
    replica: int  # number of the replica; its ranks train the same groups
    leads_replica: bool  # whether the rank adds its replica's sums to the sums of the step
    expert_load: ExpertLoad | None  # only for a model with experts


class Passes(ABC, Generic[M]):
    """Forward and backward passes of a rank over microbatches of type ``M``.

    All ranks must make the same calls together.
    """

    facts: RankFacts

    def begin_step(self) -> None:
        """Prepare for a step. By default, do nothing."""

    def begin_update(self) -> None:
        """Prepare for the first microbatch of an optimizer step. By default, do nothing."""

    def undo(self) -> None:
        """Undo changes by passes since ``begin_update``, except gradients. Nothing by default."""

    def measure(self) -> dict[str, float]:
        """Return metrics of the passes of a step, at its end. Empty by default."""
        return {}

    @abstractmethod
    def cut(self, groups: Sequence[Columns], *, only_trained: bool) -> tuple[Batch | None, list[M]]:
        """Return this rank's groups as a batch, or None without tokens, and the microbatches."""

    @abstractmethod
    def agree(self, during: str, read: Callable[[], tuple[T, list[M]]]) -> tuple[T, list[M]]:
        """Return the result of ``read``, with padding after its microbatches.

        Ranks that compute together then have equally many microbatches.

        Raises:
            Exception: The error of ``read``, on this rank. Other ranks raise ``PeerFailed``.
        """

    @abstractmethod
    def load(self, column: str, teacher: str | None) -> object:
        """Return the model that computes a column of logprobs. The first call loads it.

        ``teacher`` is the directory of the teacher, for the teacher's column.
        """

    @abstractmethod
    def logprobs(
        self, column: str, count: int, microbatches: Sequence[M], request: LogprobRequest
    ) -> NDArray[np.float32]:
        """Return [count]: log-probabilities under the model of a column, without gradients."""

    @abstractmethod
    def top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        """Return the most probable next tokens after prompts, under the current weights."""

    @abstractmethod
    def add_gradients(self, microbatches: Sequence[M], loss_of: LossOf, loss: LossSpec) -> None:
        """Run forward and backward passes. ``loss_of`` is not called for padding."""

    def count_work(self, microbatches: Sequence[M]) -> tuple[int, float] | None:
        """Return tokens and FLOPs of microbatches, or None if this rank's time does not count."""
        del microbatches
        return None

    def router_biases(self) -> list[tuple[int, Tensor]]:
        """Return layer index and bias [E] of this rank's routers that choose experts by a bias."""
        return []


class Updates(Protocol):
    """Gradients of an optimizer step, and the update that uses them."""

    def begin(self) -> None:
        """Prepare for the first microbatch of an optimizer step, without gradients."""
        ...

    def step(self, denominator: float, learning_rate: float, /) -> UpdateResult:
        """Normalise and clip the gradients and update the weights, if the norm is finite."""
        ...

    def drop_gradients(self) -> None:
        """Discard all gradients of the step. Idempotent."""
        ...


class ModelState(ABC):
    """Weights of a model and state of its optimizer. Each rank holds a part.

    All ranks must make the same calls together.
    """

    identity: Identity
    """Equal under every layout of ranks, because a state may be loaded under a different layout."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Estimate the bytes that ``save`` writes on all ranks together."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Return the number of weights. Tied weights count once."""

    @abstractmethod
    def iterate_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, in a fixed order. Tied weights occur once."""

    @abstractmethod
    def metas(self) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Return name, whole shape and dtype of each weight, in the order of ``iterate_weights``."""

    @abstractmethod
    def held_regions(self) -> list[TensorRegion]:
        """Return this rank's regions of the weights, in the memory that training updates."""

    @abstractmethod
    def quantize_weights(self, wire_format: WireFormat) -> AbstractContextManager[None]:
        """Return a context in which a format's matrices have the values that engines use."""

    @abstractmethod
    def export(self, directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
        """Write a Hugging Face directory, atomically, with the tokenizer of the model path.

        Rank 0 writes. It holds in memory the tensors of one file of ``file_bytes``, and the tensors
        gathered with them. An existing directory is replaced.

        Raises:
            OSError: The disk of rank 0 failed. ``directory`` is unchanged.
            PeerFailed: Rank 0 failed.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write this rank's part of the state."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Load this rank's part of a state that any layout of ranks saved."""

    @abstractmethod
    def reset(self) -> None:
        """Restore the weights and optimizer from the trainer's creation."""


_TEXT: Final = msgspec.msgpack.Decoder(str)


class TrainedWeights(Protocol):
    """Some weights of a model, in a fixed order. They may be sharded over several ranks."""

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name. All ranks must iterate together."""
        ...

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each weight, by the name of its parameter."""
        ...

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, whole shape and dtype of each weight."""
        ...


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for a dtype name of a recipe."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]


def shared_digest(weights: Iterable[tuple[str, Tensor]], peers: Peers, base: str = "") -> str:
    """Return ``weights_digest`` on all ranks. They must call it together; only rank 0 hashes.

    Gathering the weights may need all ranks. So the other ranks iterate too, without copying.
    """
    if peers.rank:
        deque(weights, maxlen=0)
        return peers.broadcast("", _TEXT)
    return peers.broadcast(weights_digest(weights, base), _TEXT)


def weights_digest(weights: Iterable[tuple[str, Tensor]], base: str = "") -> str:
    """Return the xxh3-128 digest over names and bytes of all weights, in order.

    ``base`` is the digest of the base model if the weights are adapters.
    """
    digest = xxhash.xxh3_128(base.encode())
    for name, tensor in weights:
        digest.update(name.encode())
        digest.update(as_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()
