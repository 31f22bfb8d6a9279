"""A release between two modules on a device: every byte, packed there as on the CPU."""

import time
from typing import Final, Literal

import pytest
import torch
from device_sender import Layers
from torch import Tensor

from offbeat.plugins.float8.precision import is_quantized
from offbeat.plugins.float8.quantize import quantize
from offbeat.weight_sync.chunks import iterate_weights
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.object_store import ObjectStoreSender
from tests.gpu.conftest import Measured
from tests.support.plain_modules import ModuleReceiver, ModuleSource

WIDTH: Final = {"cuda": 2048, "cpu": 256}
CHUNK_BYTES: Final = 64 * 2**20
MIB: Final = 2**20


def synchronise(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(torch.uint8)


@pytest.mark.parametrize("scheme", [None, "fp8_block"])
def test_a_release_is_packed_on_the_device_as_on_the_cpu(
    device: str, scheme: Literal["fp8_block"] | None
) -> None:
    module = Layers(WIDTH[device], 1)
    policy = WirePolicy(quantize=scheme)
    on_cpu = ObjectStoreSender(ModuleSource(module, CHUNK_BYTES, policy)).publish(1)
    there = ObjectStoreSender(ModuleSource(module.to(device), CHUNK_BYTES, policy)).publish(1)
    assert there.digest == on_cpu.digest


def test_a_sync_between_two_modules_on_the_device_changes_no_byte(
    device: str, measured: Measured
) -> None:
    sent, served = (Layers(WIDTH[device], seed).to(device) for seed in (1, 2))
    sender, receiver = ObjectStoreSender(ModuleSource(sent, CHUNK_BYTES)), ModuleReceiver(served)
    seconds = dict[str, float]()
    for epoch in (1, 2):  # the second one has its memory
        started_s = synchronise(device)
        release = sender.publish(epoch)
        packed_s = synchronise(device)
        receiver.begin(epoch, release.manifest)
        for index, chunk in enumerate(release.handles):
            receiver.apply(epoch, index, chunk)
        receiver.verify(release.digest)
        receiver.commit(epoch)
        seconds = {"pack": packed_s - started_s, "load": synchronise(device) - packed_s}
    held = dict(iterate_weights(served))
    for name, tensor in iterate_weights(sent):
        assert bits(tensor).equal(bits(held[name])), name
    size = release.manifest.nbytes
    for what, spent_s in seconds.items():
        how = f"{size / MIB:.0f} MiB of bfloat16, second release, digests included"
        measured(f"weight sync: {what}", size / MIB / spent_s, "MiB/s", how)


def test_blocks_are_quantized_on_the_device_as_on_the_cpu(device: str, measured: Measured) -> None:
    weights = dict(iterate_weights(Layers(WIDTH[device], 3)))
    matrices = {n: w for n, w in weights.items() if is_quantized(n, tuple(w.shape))}
    assert len(matrices) == 12
    there = {name: weight.to(device) for name, weight in matrices.items()}
    quantize("warm-up", next(iter(there.values())))
    started_s = synchronise(device)
    made = {name: quantize(name, weight) for name, weight in there.items()}
    spent_s = synchronise(device) - started_s
    for name, weight in matrices.items():
        want = quantize(name, weight)
        assert bits(made[name].values).equal(bits(want.values)), name
        assert bits(made[name].scales).equal(bits(want.scales)), name
    nbytes = sum(each.nbytes for each in matrices.values())
    how = f"{nbytes / MIB:.0f} MiB of bfloat16"
    measured("float8 blocks", nbytes / MIB / spent_s, "MiB/s", how)
