"""Measures PyPI TransferQueue: its low-level client over its default storage units.

``polling_mode`` is on: without it a consumer short of data makes the peer's controller sleep for
seconds and then raise, and blocks every other caller meanwhile. So a take asks again until it is given.

Its libraries live in an environment of their own (transfer_queue_peer/README.md) and are imported by
name: only there do they exist, and beside this file ``transfer_queue`` is another one.
"""

import asyncio
import importlib
import os
import time
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

import torch
from tensordict import TensorDict

from benchmarks.queue_payloads import SAMPLES, Columns, joined
from benchmarks.queue_sides import Prepared, Taken

T = TypeVar("T")
transfer_queue = importlib.import_module("transfer_queue")
omegaconf = importlib.import_module("omegaconf")
ASK_AGAIN_S: Final = 0.0005
STORAGE_UNITS: Final = 2  # the package's default
TASK: Final = "train"


class PeerSide:
    """Client of TransferQueue; a put may be one group or many, it knows rows only."""

    def __init__(self) -> None:
        transfer_queue.init()
        self._client = transfer_queue.get_client()

    def prepare(self, groups: Sequence[Columns]) -> Prepared:
        columns = joined(groups)
        rows = len(next(iter(columns.values())))
        return TensorDict(
            {name: torch.from_numpy(column) for name, column in columns.items()}, batch_size=[rows]
        )

    def declare(self, partition: str, columns: Columns) -> None:
        pass

    def put(self, partition: str, payload: Prepared) -> None:
        self._client.put(data=payload, partition_id=partition)

    def take(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        while True:
            meta = self._client.get_meta(
                data_fields=list(names),
                batch_size=groups * SAMPLES,
                partition_id=partition,
                task_name=TASK,
            )
            if meta is not None and meta.size:
                return Taken([self._client.get_data(meta)], meta)
            time.sleep(ASK_AGAIN_S)

    def done(self, partition: str, taken: Taken) -> None:
        del partition
        self._client.clear_samples(taken.token)

    def clear(self, partition: str) -> None:
        self._client.clear_partition(partition)

    def bytes_in_use(self) -> int | None:
        return None

    def run(self, work: Awaitable[T]) -> T:
        return self._client._run_coroutine(work)  # noqa: SLF001 - its async methods belong to that loop

    async def aput(self, partition: str, payload: Prepared) -> None:
        await self._client.async_put(data=payload, partition_id=partition)

    async def atake(self, partition: str, groups: int, names: Sequence[str]) -> Taken:
        while True:
            meta = await self._client.async_get_meta(
                data_fields=list(names),
                batch_size=groups * SAMPLES,
                partition_id=partition,
                task_name=TASK,
            )
            if meta is not None and meta.size:
                return Taken([await self._client.async_get_data(meta)], meta)
            await asyncio.sleep(ASK_AGAIN_S)

    async def adone(self, partition: str, taken: Taken) -> None:
        del partition
        await self._client.async_clear_samples(taken.token)


def start() -> None:
    """Start its controller and storage units; clients find them by name."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    transfer_queue.init(
        omegaconf.OmegaConf.create(
            {
                "controller": {"polling_mode": True},
                "backend": {"SimpleStorage": {"num_data_storage_units": STORAGE_UNITS}},
            }
        )
    )


def connect(handle: None) -> PeerSide:
    """A client, in the process that calls."""
    del handle
    return PeerSide()


def stop(handle: None) -> None:
    """Stop its actors."""
    del handle
    transfer_queue.close()
