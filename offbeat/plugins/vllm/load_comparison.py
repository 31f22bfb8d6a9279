"""The load leg of ``offbeat verify-weights`` for a vLLM engine: each worker compares its weights.

The release is still in the memory from which it was loaded: shared by actor and workers, or the
buckets that a worker fetched itself. The comparison goes chunk by chunk, so decoding continues in
between.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat.messages.failures import OffbeatError
from offbeat.plugins.vllm.calls import Calls
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.served import TensorDifference

if TYPE_CHECKING:  # it imports torch, which a process that only has a handle need not load
    from offbeat.weight_sync.chunks import WeightChunk

Placed = tuple[str, list[int], str, int, int]
"""Name, shape, dtype, offset and bytes of a tensor in the shared memory."""

Extent = tuple[int, int, str]
"""Offset, bytes and digest of a chunk in the shared memory."""

Comparison = list[str]
"""Answer of a worker: empty, or tensor, region and detail of a difference, or the problem."""


class NotCompared(OffbeatError):
    """The weights of an engine cannot be compared with its release.

    Fix: follow the message.
    """

    problem: str

    def __str__(self) -> str:
        return self.problem


class LoadedRelease(NamedTuple):
    """A release that an engine has loaded, and where its values are."""

    epoch: int
    manifest: Manifest
    chunks: "Sequence[WeightChunk]"  # one per load call of the workers
    offsets: (
        Sequence[int] | None
    )  # of the chunks in the shared memory; None: each worker fetched them


async def first_difference(llm: Any, call: Calls, loaded: LoadedRelease) -> TensorDifference | None:  # noqa: ANN401 -- vLLM's AsyncLLM
    """Return the first region, in the order of the release, that differs in a worker.

    Raises:
        NotCompared: A worker cannot read its weights back, or the release is not in memory any more.
        CallRefused: vLLM raised.
        DeadlineExceeded: A call took longer than ``call_deadline_s``.
        EngineUnavailable: The engine's processes have ended.
    """
    for chunk in loaded.chunks:
        if loaded.offsets is None:
            asked = llm.collective_rpc("ws_compare_fetched", args=(loaded.epoch, chunk.index))
        else:
            start = loaded.offsets[chunk.index]
            extent = start, chunk.nbytes, loaded.manifest.chunk_digests[chunk.index]
            asked = llm.collective_rpc("ws_compare", args=(place_tensors(chunk, start), extent))
        answers: list[Comparison] = await call(f"comparison of {chunk.tensors}", asked)
        for answer in answers:
            if len(answer) == 1:
                raise NotCompared(answer[0])
        order = {name: place for place, name in enumerate(chunk.names)}
        if found := sorted(filter(None, answers), key=lambda each: order[each[0]]):
            return TensorDifference(*found[0])
    return None


def place_tensors(chunk: "WeightChunk", start: int) -> list[Placed]:
    """Return the places of the tensors of a chunk that begins at ``start``."""
    return [
        (spec.name, list(spec.shape), spec.dtype, start + spec.offset, spec.nbytes)
        for spec in chunk.specs
    ]
