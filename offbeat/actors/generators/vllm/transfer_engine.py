"""vLLM's weight transfer from memory that the actor shares with this worker.

    actor                                  worker
    fills its StagingArea
    ws_stage(digests)         ---------->  hashes the area in a thread; decoding goes on
    start_weight_update       ---------->  waits for the thread; opens the model's layers
    update_weights(chunk)...  ---------->  loads the tensors of one chunk
    finish_weight_update      ---------->  closes the layers

Whatever raises up to and in ``start_weight_update`` has touched nothing.
"""

# pyright: reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import layerwise

from offbeat.weight_sync.chunks import digest_of
from offbeat.weight_sync.errors import TransferRefused


@dataclass
class StagingInfo(WeightTransferInitInfo):
    """Where the shared memory is."""

    path: str
    nbytes: int


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    """One chunk: its place in the shared memory, and its tensors' places in it."""

    epoch: int
    index: int
    offset: int
    tensors: list[tuple[str, list[int], str, int, int]]
    """Name, shape, dtype, offset in the chunk, bytes."""


class ShmTransferEngine(WeightTransferEngine[StagingInfo, ChunkInfo]):
    """Takes chunks out of shared memory, after their digests were verified here."""

    init_info_cls = StagingInfo
    update_info_cls = ChunkInfo

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - vLLM's to define
        super().__init__(*args)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="weight-digests")
        self._verified: Future[None] | None = None
        self._epoch, self._chunks, self._next = -1, 0, 0
        self._loading = ""  # the tensor handed to the model last
        self._rank = self.parallel_config.rank

    def init_transfer_engine(self, init_info: StagingInfo) -> None:
        """Map the actor's shared memory; again whenever it has grown."""
        with Path(init_info.path).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), init_info.nbytes)
        self._memory = torch.frombuffer(mapped, dtype=torch.uint8)

    def stage(self, epoch: int, chunks: list[tuple[int, int, str]]) -> None:
        """Start hashing."""
        self._epoch, self._chunks, self._next = epoch, len(chunks), 0
        self._verified = self._hashing.submit(self._verify, epoch, chunks)

    def _verify(self, epoch: int, chunks: list[tuple[int, int, str]]) -> None:
        for index, (offset, nbytes, want) in enumerate(chunks):
            if (got := digest_of(self._memory[offset : offset + nbytes].numpy())) != want:
                raise TransferRefused(epoch, f"digest of chunk {index} in the worker", got, want)

    def start_weight_update(self) -> None:
        if self._verified is None:
            raise TransferRefused(-1, "staged transfer", "none", "one")
        self._verified.result()
        self._verified = None
        layerwise.initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ChunkInfo) -> None:
        got, want = (update_info.epoch, update_info.index), (self._epoch, self._next)
        if got != want:
            raise TransferRefused(self._epoch, "epoch and chunk", str(got), str(want))
        try:
            self.model.load_weights(self._tensors(update_info))
        except Exception as error:  # named: vLLM passes on the text of an error, which may be empty
            where = f"chunk {update_info.index}, tensor {self._loading}, in worker {self._rank}"
            said = f"{type(error).__name__} {error}".strip()
            raise TransferRefused(update_info.epoch, where, said, "loaded") from error
        self._next += 1

    def _tensors(self, info: ChunkInfo) -> Iterator[tuple[str, Tensor]]:
        chunk = self._memory[info.offset :]
        for name, shape, dtype, offset, nbytes in info.tensors:
            self._loading = name
            data = chunk[offset : offset + nbytes]
            yield name, data.view(getattr(torch, dtype)).view(shape).to(self.device)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.device.type == "cpu":  # work-around: no_accelerator_to_synchronize
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        if self._next != self._chunks:
            raise TransferRefused(self._epoch, "chunks", str(self._next), str(self._chunks))
        layerwise.finalize_layerwise_reload(self.model, self.model_config)

    def forget(self) -> None:
        """No transfer is open."""
        self._epoch, self._chunks, self._next, self._verified = -1, 0, 0, None

    def shutdown(self) -> None:
        self._hashing.shutdown(cancel_futures=True)


def place_back(model: nn.Module) -> int:
    """Close every layer that an update left open, on the tensors it had before.

    Layers the update had completed keep the new values: the model is a mixture that can run, and
    that a whole update makes exact. How many layers were open.
    """
    opened = 0
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)  # noqa: SLF001 - work-around: abort_update
            opened += 1
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload  # noqa: SLF001
    layerwise.LOADING_LAYERS.clear()
    return opened
