"""Rates of copies between host and device, and of hashes of weights on either."""

import statistics
import time
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from offbeat.trainers.parts import weights_digest
from tests.gpu.conftest import Measured

NBYTES: Final = {"cuda": 2**30, "cpu": 2**24}
ROUNDS: Final = 5
GIB: Final = 2**30


def seconds_of(device: str, work: Callable[[], object]) -> float:
    """Return the median seconds of some rounds, after one that nobody counts."""
    spent = list[float]()
    for _ in range(ROUNDS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - began_s)
    return statistics.median(spent[1:])


@pytest.mark.parametrize("pinned", [False, True], ids=["unpinned", "pinned"])
def test_copies_between_host_and_device(device: str, pinned: bool, measured: Measured) -> None:
    nbytes = NBYTES[device]
    host = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    if pinned and device == "cuda":
        host = host.pin_memory()
    there, back = torch.empty_like(host, device=device), torch.empty_like(host)
    if pinned and device == "cuda":
        back = back.pin_memory()
    up_s = seconds_of(device, lambda: there.copy_(host, non_blocking=pinned))
    down_s = seconds_of(device, lambda: back.copy_(there, non_blocking=pinned))
    assert back.equal(host)
    how = f"{nbytes >> 20} MiB, {'pinned' if pinned else 'unpinned'}"
    measured("copy to the device", nbytes / GIB / up_s, "GiB/s", how)
    measured("copy to the host", nbytes / GIB / down_s, "GiB/s", how)


def checksum(weights: Tensor, odd: Tensor) -> Tensor:
    """Return a sum of 64-bit words, each times an odd number: what a device could hash with."""
    return (weights.view(torch.int64) * odd).sum()


def test_hashes_on_host_and_device(device: str, measured: Measured) -> None:
    nbytes = NBYTES[device]
    host = torch.randint(-(2**62), 2**62, (nbytes // 8,), dtype=torch.int64).view(torch.bfloat16)
    there = host.to(device)
    assert weights_digest([("w", there)]) == weights_digest([("w", host)])
    how = f"{nbytes >> 20} MiB of bfloat16"
    for where, weights in (("host", host), ("device", there)):
        spent_s = seconds_of(device, lambda weights=weights: weights_digest([("w", weights)]))
        rate = nbytes / GIB / spent_s
        measured(f"xxh3 digest of weights on the {where}", rate, "GiB/s", f"{how}, one thread")
    odd = torch.arange(1, nbytes // 4, 2, dtype=torch.int64, device=device)
    assert int(checksum(there, odd)) == int(checksum(host, odd.cpu()))
    spent_s = seconds_of(device, lambda: checksum(there, odd))
    measured("checksum computed on the device", nbytes / GIB / spent_s, "GiB/s", how)
