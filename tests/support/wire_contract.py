"""Contract of memory that processes share by handles, for CUDA's and for what stands in for it."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

import pytest
import torch

from offbeat.plugins.reshard.handle_wire import HandleUnusable, SharableMemory
from offbeat.plugins.reshard.messages import DevicePlace

Make = Callable[[], SharableMemory]
Processes = ForkServerContext | SpawnContext
NBYTES = 1000


def holder(make: Make, asked: Connection) -> None:
    """A process that hands out memory, and fills it with the number that it is sent."""
    memory = make()
    lent = memory.allocate(NBYTES)
    lent.fill_(1)
    other = memory.allocate(NBYTES)  # a second one, so that a wrong offset would show
    other.fill_(2)
    asked.send((memory.place, memory.handle(lent.view(-1)), memory.handle(other.view(-1))))
    while (number := asked.recv()) is not None:
        lent.fill_(number)
        if lent.is_cuda:
            torch.cuda.synchronize()
        asked.send("filled")


@contextmanager
def handed_out(
    make: Make, context: Processes
) -> Generator[tuple[Connection, BaseProcess, DevicePlace, bytes, bytes]]:
    """Start a holder in a process of its own; it is killed at the end."""
    ours, theirs = context.Pipe()
    process = context.Process(target=holder, args=(make, theirs), daemon=True)
    process.start()
    try:
        yield ours, process, *ours.recv()
    finally:
        process.kill()
        process.join()


def check_memory(make: Make, context: Processes) -> None:
    """Hold the memory of this process against that of another one."""
    memory = make()
    with handed_out(make, context) as (asks, process, place, first, second):
        assert place == memory.place, "devices have the same name in every process"
        assert memory.sees(place.device)
        assert not memory.sees("GPU-of-nobody")
        into = memory.allocate(NBYTES)
        for handle, value in ((first, 1), (second, 2), (first, 1)):
            memory.copy(handle, into)
            assert into.eq(value).all()
        asks.send(3)
        assert asks.recv() == "filled"
        assert into.eq(1).all(), "what was copied is a copy"
        memory.copy(first, into)
        assert into.eq(3).all(), "a handle is one of memory, not of its content"
        process.kill()
        process.join()
        with pytest.raises(HandleUnusable, match="cannot be opened"):
            memory.copy(first, into)
