"""PyPI TransferQueue as the peer of ``benchmarks.transfer_queue``: its client over its storage units.

``polling_mode`` is on: without it, the peer's controller sleeps for seconds and then raises if data is
short, and every other caller waits meanwhile. So a consumer polls.

The peer's libraries live in an environment of their own (transfer_queue_peer/README.md). They are
imported by name, because they exist only there.
"""

import importlib
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

Columns = Mapping[str, NDArray[np.generic]]
PARTITION: Final = "groups"
POLL_S: Final = 0.0005
STORAGE_UNITS: Final = 2  # the package's default


def start() -> None:
    """Start the peer's controller and storage units. Clients find them by name."""
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")
    omegaconf = importlib.import_module("omegaconf")
    config = {
        "controller": {"polling_mode": True},
        "backend": {"SimpleStorage": {"num_data_storage_units": STORAGE_UNITS}},
    }
    importlib.import_module("transfer_queue").init(omegaconf.OmegaConf.create(config))


class PeerClient:
    """Producer or consumer process. No method is async, so Ray starts no event loop."""

    def __init__(self, column: str, samples: int) -> None:
        """Connect. ``column`` holds the number of the group; a group has ``samples`` rows."""
        torch.set_num_threads(1)
        queue = importlib.import_module("transfer_queue")
        queue.init()
        self._client: Any = queue.get_client()
        self._column, self._samples = column, samples
        self._calls = list[TensorDict]()
        self._names = list[str]()

    def prepare(self, groups: "list[Columns]", groups_per_call: int) -> None:
        """Build the TensorDict of each put outside the timed loops."""
        self._names = list(groups[0])
        self._calls = [
            _rows(groups[first : first + groups_per_call])
            for first in range(0, len(groups), groups_per_call)
        ]

    def produce(self) -> float:
        """Put all prepared groups; return the time of the first put."""
        began = time.monotonic()
        for rows in self._calls:
            self._client.put(data=rows, partition_id=PARTITION)
        return began

    def consume(self, calls: int, groups_per_call: int) -> tuple[float, list[int]]:
        """Get and clear; return the end, and the group number of each row."""
        numbers = list[int]()
        for _ in range(calls):
            numbers += self._get(groups_per_call)
        return time.monotonic(), numbers

    def cycle(self) -> list[float]:
        """Put and get each prepared group in turn; return the seconds of each."""
        taken = list[float]()
        for rows in self._calls:
            began = time.monotonic()
            self._client.put(data=rows, partition_id=PARTITION)
            self._get(1)
            taken.append(time.monotonic() - began)
        return taken

    def _get(self, groups: int) -> list[int]:
        while True:
            meta = self._client.get_meta(
                data_fields=self._names,
                batch_size=groups * self._samples,
                partition_id=PARTITION,
                task_name="train",
            )
            if meta is not None and meta.size:
                break
            time.sleep(POLL_S)
        rows = self._client.get_data(meta)
        numbers = [int(float(row[0])) for row in rows[self._column]]
        self._client.clear_samples(meta)
        return numbers


def clients(column: str, samples: int) -> tuple[Any, Any]:
    """Start the queue; return a producer and a consumer."""
    start()
    client = ray.remote(PeerClient).options(num_cpus=0)
    return client.remote(column, samples), client.remote(column, samples)


def stop() -> None:
    """Stop the peer's actors."""
    importlib.import_module("transfer_queue").close()


def _rows(groups: "list[Columns]") -> TensorDict:
    columns = {name: np.concatenate([each[name] for each in groups]) for name in groups[0]}
    rows = len(next(iter(columns.values())))
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    return TensorDict(tensors, batch_size=[rows])
