"""Wires of a reshard between processes on a device; on a CPU what stands in for CUDA carries them."""

import multiprocessing as mp
import statistics
import time
from functools import partial
from typing import Final

import pytest
import torch
from device_sender import Layers, sending
from torch import Tensor

from offbeat.plugins.reshard.choose_wire import make_wire
from offbeat.plugins.reshard.handle_wire import CudaMemory
from offbeat.plugins.reshard.receiver import ReshardReceiver
from offbeat.weight_sync.chunks import iterate_weights
from tests.gpu.conftest import Measured
from tests.support.plain_modules import ModuleReceiver
from tests.support.wire_contract import check_memory
from tests.support.wire_doubles import SharedMemory, doubled

WIDTH: Final = {"cuda": 2048, "cpu": 256}
MIB: Final = 2**20


def ends_of(wire: str, device: str) -> tuple[str, str]:
    """Devices of sender and receiver; skips by name where there are too few."""
    if device == "cpu":
        return "cpu", "cpu of an engine"
    if wire == "cuda_ipc":
        return "cuda:0", "cuda:0"
    if torch.cuda.device_count() < 2:
        pytest.skip("nccl needs two CUDA devices")
    return "cuda:0", "cuda:1"


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


def test_memory_of_a_device_is_shared_by_handles(device: str) -> None:
    make = partial(CudaMemory, device) if device == "cuda" else SharedMemory
    check_memory(make, mp.get_context("spawn"))


@pytest.mark.parametrize("wire", ["cuda_ipc", "nccl"])
def test_every_byte_of_a_reshard_arrives_from_another_process(
    device: str, wire: str, measured: Measured
) -> None:
    make = make_wire if device == "cuda" else doubled
    of_sender, of_receiver = ends_of(wire, device)
    width = WIDTH[device]
    served = Layers(width, 1).to(of_receiver if device == "cuda" else "cpu")
    transport = ReshardReceiver("engine", 0, of_receiver, make)
    receiver, seconds, nbytes = ModuleReceiver(served), list[float](), 0
    with sending(make, wire, of_sender, width) as publish:
        for epoch in (1, 2, 3):
            manifest, digest, (route,), *_ = publish(10 + epoch)
            started_s = time.perf_counter()
            got = transport.receive(route, epoch, manifest)
            seconds.append(time.perf_counter() - started_s)
            nbytes = manifest.nbytes
            receiver.begin(epoch, manifest)
            for index, data in enumerate(got.buckets):
                receiver.apply(epoch, index, data)
            receiver.verify(digest)
            receiver.commit(epoch)
            held = dict(iterate_weights(served))
            for name, want in iterate_weights(Layers(width, 10 + epoch)):
                assert bits(held[name]).equal(bits(want)), name
    how = f"{nbytes / MIB:.0f} MiB of bfloat16 between two processes, digests included, median of 2"
    measured(f"wire {wire}", nbytes / MIB / statistics.median(seconds[1:]), "MiB/s", how)
