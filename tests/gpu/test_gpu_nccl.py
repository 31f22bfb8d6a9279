"""NCCL with one rank: collectives of a world, options of a group, and a peer that never connects."""

import multiprocessing as mp
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Final

import msgspec
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from offbeat.plugins.reshard.eager_groups import GRACE_S, EagerGroups
from offbeat.plugins.reshard.group import BrokenLink, Device, GroupAddress, GroupMaker
from offbeat.trainers.ranks.process_group import enter, leave
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store import SharedStore
from offbeat.weight_sync.rendezvous.store_server import StoreServer
from tests.gpu.conftest import Measured

WITHIN_S: Final = 60.0
LIMIT_S: Final = 3.0
HOST: Final = "127.0.0.1"


def in_process(job: Callable[[str], Any], device: str) -> Any:
    """Return the result of a job in a process of its own, which is killed if it hangs."""
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_answer, args=(job, device, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(WITHIN_S):
            pytest.fail(f"{job.__name__} has not ended within {WITHIN_S:g} s")
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _answer(job: Callable[[str], Any], device: str, answers: Connection) -> None:
    answers.send(job(device))


def world_of_one(device: str) -> tuple[list[int], list[int], int]:
    """Call each collective of a world with one rank; return the answers."""
    peers = enter(HashStore(), 0, 1, device, 20.0)
    decoder = msgspec.msgpack.Decoder(int)
    answers = peers.all_reduce_max([3, 1]), peers.all_gather(7, decoder)
    told = peers.broadcast(9, decoder)
    leave()
    return *answers, told


def test_a_world_of_one_rank_has_all_collectives(device: str) -> None:
    assert in_process(world_of_one, device) == ([3, 1], [7], 9)


def make_groups(device: str) -> GroupMaker:
    if device == "cpu":
        return Device(HOST, LIMIT_S)
    from offbeat.plugins.reshard.eager_groups import NcclGroups  # noqa: PLC0415 -- CUDA

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, device=device)

    return NcclGroups(allocate, LIMIT_S)


def absent_peer(device: str) -> tuple[str, float]:
    """Form a group whose other rank announced itself and never connects; return error and seconds."""
    key = SharedKey.random()
    server = StoreServer(HOST, key)
    client = SharedStore(StoreAddress(HOST, server.port, key), 20.0)
    client.set("ready/1", "1")
    groups = EagerGroups(make_groups(device), LIMIT_S)
    began_s = time.perf_counter()
    try:
        groups.group(GroupAddress(client, 0, client))
    except (BrokenLink, RuntimeError) as error:
        return type(error).__name__, time.perf_counter() - began_s
    finally:
        server.close()
    return "", 0.0


def test_a_peer_that_never_connects_is_given_up_in_time(device: str, measured: Measured) -> None:
    failure, spent_s = in_process(absent_peer, device)
    assert failure
    assert spent_s < LIMIT_S + 3 * GRACE_S
    how = f"limit of {LIMIT_S:g} s; {failure}"
    measured("a group whose other rank never connects, until it is given up", spent_s, "s", how)


def options_and_abort(device: str) -> tuple[float, float]:
    """Create a group of one rank with the options of the wire and abort it; return both times."""
    if device == "cpu":
        return 0.0, 0.0
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415 -- CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=LIMIT_S)  # noqa: SLF001 -- as the wire does
    began_s = time.perf_counter()
    group = ProcessGroupNCCL(HashStore(), 0, 1, options)
    data = torch.ones(1024, device=device)
    group.allreduce([data]).wait()  # pyright: ignore[reportAttributeAccessIssue] -- has no type
    torch.cuda.synchronize()
    formed_s = time.perf_counter() - began_s
    group.abort()
    return formed_s, time.perf_counter() - began_s - formed_s


def test_a_group_with_the_options_of_the_wire_forms_and_aborts(
    device: str, measured: Measured
) -> None:
    formed_s, aborted_s = in_process(options_and_abort, device)
    assert aborted_s < LIMIT_S
    if device == "cuda":
        measured("NCCL: group and first all-reduce", formed_s, "s", "one rank")
        measured("NCCL: abort of a group", aborted_s, "s", "one rank")
