"""How an engine gets the buckets of a release from the trainer ranks that hold them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offbeat.generators.incoming import IncomingRelease, WeightFetcher
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.transport import ReleaseHandle


class OnDevices(ReleaseHandle, frozen=True):
    """Ranks that send from their devices."""

    transport = "unused"


class DeviceReceiver:
    """Receives one bucket from a device, which main memory cannot."""

    def check_on_host(self, ranks: object, epoch: int) -> None:
        del ranks
        raise TransferRefused(epoch, "sync.wire", "cuda_ipc", "tcp")

    def receive(self, *_: object, **__: object) -> Any:
        return SimpleNamespace(buckets=(np.zeros(4, np.uint8),))


async def bring(*, keeps_base: bool, to_host: bool = False) -> int:
    fetcher = WeightFetcher("g0", keeps_base=keeps_base)
    fetcher._receiver = DeviceReceiver()  # noqa: SLF001 - no GPU here  # type: ignore[assignment]
    release = WeightRelease(1, "digest", Manifest((), (4,), "layout"), (), 4)
    incoming = IncomingRelease(1, release, (OnDevices(1, "digest", ()),), fetcher)
    return len(await incoming.bring(to_host=to_host))


def test_an_engine_on_a_device_receives_what_ranks_send_from_theirs() -> None:
    assert asyncio.run(bring(keeps_base=False)) == 1


@pytest.mark.parametrize("case", [{"keeps_base": True}, {"keeps_base": False, "to_host": True}])
def test_main_memory_does_not_receive_what_ranks_send_from_devices(case: dict[str, bool]) -> None:
    with pytest.raises(TransferRefused, match=r"sync\.wire"):
        asyncio.run(bring(**case))
