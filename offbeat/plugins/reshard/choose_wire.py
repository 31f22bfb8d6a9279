"""Creates one process's end of ``sync.wire``. Imports only the chosen wire."""

from offbeat.plugins.reshard.group_wire import GroupWire, tcp_wire
from offbeat.plugins.reshard.wire import BucketWire


def make_wire(name: str, device: str) -> BucketWire:
    """Create one end of a wire.

    Args:
        name: tcp, cuda_ipc or nccl.
        device: Device of this process, as torch names it. It holds the packed or received buckets.
    """
    if name == "tcp":
        return tcp_wire()
    from offbeat.plugins.reshard.handle_wire import CudaMemory  # noqa: PLC0415

    memory = CudaMemory(device)
    if name == "cuda_ipc":
        from offbeat.plugins.reshard.handle_wire import HandleWire  # noqa: PLC0415

        return HandleWire(name, memory)
    from offbeat.plugins.reshard.eager_groups import EagerGroups, NcclGroups  # noqa: PLC0415

    def groups(address: str, connect_s: float) -> EagerGroups:
        del address  # NCCL reads the interface from the environment
        return EagerGroups(NcclGroups(memory.allocate, connect_s), connect_s)

    return GroupWire(name, memory.allocate, groups, memory.place)
