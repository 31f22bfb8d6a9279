"""What stands in for CUDA keeps the contract that `make test-gpu` holds CUDA to."""

from multiprocessing.context import ForkServerContext

import torch

from offbeat.plugins.reshard.handle_wire import HandleWire
from offbeat.plugins.reshard.messages import DevicePlace, Route, TransferTimeouts
from offbeat.weight_sync.manifest import digest_bytes, on_host
from offbeat.weight_sync.rendezvous.frames import SharedKey
from tests.support.wire_contract import check_memory
from tests.support.wire_doubles import SharedMemory, doubled

ROUTE = Route("127.0.0.1", 1, 2, SharedKey(b"x" * 32), "rank-0", 0, "", TransferTimeouts(1.0, 1.0))


def sent_from(wire: str, place: DevicePlace | None) -> Route:
    return Route(
        ROUTE.host, 1, 2, ROUTE.key, "rank-0", 0, "", ROUTE.timeouts, wire=wire, place=place
    )


def test_shared_memory_is_opened_from_another_process_as_device_memory_is(
    processes: ForkServerContext,
) -> None:
    check_memory(SharedMemory, processes)


class Counting(SharedMemory):
    """Shared memory that counts the handles that it makes."""

    handles = 0

    def handle(self, tensor: torch.Tensor) -> bytes:
        self.handles += 1
        return super().handle(tensor)


def test_memory_is_lent_again_when_nothing_refers_to_it_and_has_one_handle() -> None:
    memory = Counting()
    wire = HandleWire("cuda_ipc", memory)
    first = wire.memory_to_send(64)
    address, handle = first.data_ptr(), wire._pool.handle(first)  # noqa: SLF001
    assert wire.memory_to_send(64).data_ptr() != address, "still referenced"
    del first
    again = [wire.memory_to_send(64), wire.memory_to_send(64)]
    (reused,) = [each for each in again if each.data_ptr() == address]
    assert wire._pool.handle(reused) == handle  # noqa: SLF001
    assert memory.handles == 1, "CUDA opens each handle of the same memory anew"


def test_handles_of_another_machine_or_of_a_hidden_device_are_refused_with_both_names() -> None:
    wire = HandleWire("cuda_ipc", SharedMemory("GPU-a", "here"))
    assert wire.refusal(sent_from("cuda_ipc", DevicePlace("here", "GPU-a"))) == ""
    text = wire.refusal(sent_from("cuda_ipc", DevicePlace("there", "GPU-a")))
    assert "the sender is on machine there, this process on here. Set sync.wire to nccl" in text
    text = wire.refusal(sent_from("cuda_ipc", DevicePlace("here", "GPU-b")))
    assert "opens memory of GPU-b, which this process on GPU-a does not see" in text
    assert "the sender is on main memory" in wire.refusal(sent_from("cuda_ipc", None))


def test_ranks_on_one_device_form_no_nccl_group() -> None:
    wire = doubled("nccl", "GPU-a")
    assert wire.place is not None
    assert "both are on GPU-a" in wire.refusal(sent_from("nccl", wire.place))
    other = DevicePlace(wire.place.machine, "GPU-b")
    assert wire.refusal(sent_from("nccl", other)) == ""


def test_a_bucket_has_one_digest_in_memory_of_any_kind() -> None:
    tensor = torch.arange(200, dtype=torch.uint8)
    array = on_host(tensor)
    assert digest_bytes(array) == digest_bytes(tensor)
    assert array.ctypes.data == tensor.data_ptr(), "main memory is not copied"
