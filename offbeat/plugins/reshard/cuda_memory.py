"""Device memory that processes share by CUDA-IPC, and devices by UUID.

Not run yet: ``make test-gpu`` runs it on a GPU. The stand-in of the CPU tests passes the same
contract (tests/unit/weight_sync/test_wire_contract.py).
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch has no types for its memory shared between processes.

from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing import reductions

from offbeat.plugins.reshard.handle_wire import HandleUnusable
from offbeat.plugins.reshard.messages import DevicePlace
from offbeat.plugins.reshard.wire import machine_name


class CudaHandle(msgspec.Struct, frozen=True, array_like=True):
    """Handle with which another process opens memory of this process."""

    device: str  # UUID, because device numbers differ between processes
    storage_handle: bytes
    storage_size_bytes: int
    storage_offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


_decode: Final = msgspec.msgpack.Decoder(CudaHandle).decode


def device_numbers() -> dict[str, int]:
    """Return the numbers of all devices that this process sees, by UUID."""
    count = torch.cuda.device_count()
    return {f"GPU-{torch.cuda.get_device_properties(each).uuid}": each for each in range(count)}


class CudaMemory:
    """Memory of one CUDA device."""

    def __init__(self, device: str) -> None:
        """``device``: as torch names it. Without a number, the first device of this process."""
        number = torch.device(device).index or 0
        self._device = torch.device("cuda", number)
        uuid = next(uuid for uuid, each in device_numbers().items() if each == number)
        self.place = DevicePlace(machine_name(), uuid)

    def sees(self, device: str) -> bool:
        return device in device_numbers()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def handle(self, tensor: Tensor) -> bytes:
        args: Any = reductions.reduce_tensor(tensor)[1]
        *_, handle, size, offset, _, counter, counter_offset, event, waits = args
        shared = CudaHandle(
            self.place.device, handle, size, offset, counter, counter_offset, event, waits
        )
        return msgspec.msgpack.encode(shared)

    def copy(self, handle: bytes, into: Tensor) -> None:
        shared = _decode(handle)
        fields = {
            name: getattr(shared, name) for name in shared.__struct_fields__ if name != "device"
        }
        try:
            opened = reductions.rebuild_cuda_tensor(
                tensor_cls=Tensor,
                tensor_size=into.shape,
                tensor_stride=into.stride(),
                tensor_offset=0,
                storage_cls=torch.UntypedStorage,
                dtype=torch.uint8,
                storage_device=device_numbers()[shared.device],
                requires_grad=False,
                **fields,
            )
            into.copy_(opened)
            torch.cuda.current_stream(into.device).synchronize()
        except RuntimeError as error:
            raise HandleUnusable(f"memory of {shared.device} cannot be opened: {error}") from error
