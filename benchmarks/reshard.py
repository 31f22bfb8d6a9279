"""Measures a reshard beside bare gloo point to point among the same processes, in one run.

    python benchmarks/reshard.py                       # 2 ranks to 2 receivers, 1 to 256 MiB per pair
    python benchmarks/reshard.py --sizes 256 --rounds 9

Each rank holds half of the rows of every tensor, each receiver needs half of the columns, so every
pair moves as many bytes. *Bare*: the same pairs at the same time send messages of the same size, as
many in flight, without a digest, into memory that is used again. *Reshard*: requests, groups,
transfer and the digest of every bucket, in the slowest receiver; medians of rounds that alternate.
*Peak*: growth of a rank's resident memory over what it has before it publishes, buckets in flight
and all, over the bytes of its shard. *CPU*: seconds of all processes for a round of either kind,
which other work on the machine changes less than it changes the throughput.
"""

import argparse
import json
import multiprocessing as mp
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offbeat.plugins.reshard.group import Device, PairGroup, meet, open_connection
from offbeat.plugins.reshard.messages import Route, TransferTimeouts
from offbeat.plugins.reshard.receiver import ReshardReceiver
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.plugins.reshard.server import ReshardServer
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.trainers.ranks.process_group import join
from offbeat.trainers.spec import WorldRendezvous
from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Placement, chunk_cuts, cut_part
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store_server import StoreServer

HOST, MIB, RANKS, RECEIVERS, TENSORS = "127.0.0.1", 1 << 20, 2, 2, 8
TIMEOUTS = TransferTimeouts(slowest_bytes_per_s=2e6, slack_s=60.0)
IN_FLIGHT = 2


def resident(field: str) -> int:
    """Bytes of resident memory of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise ValueError(field)


def shape_of(pair_bytes: int) -> tuple[int, int]:
    """Return the shape of a tensor, float32, so that every pair moves ``pair_bytes``."""
    columns = 1024
    return pair_bytes * RANKS * RECEIVERS // TENSORS // 4 // columns, columns


def rank_main(
    rank: int, at: WorldRendezvous, pair_bytes: int, chunk: int, told: Connection
) -> None:
    """A source rank: publishes when it is told to, and sends bare messages when it is told to."""
    torch.set_num_threads(1)
    peers = join(at, rank, "cpu", HOST)
    shape = shape_of(pair_bytes)
    metas = [TensorMeta(f"w{index}", shape, "float32") for index in range(TENSORS)]
    own = cut_part(shape, 0, chunk_cuts(shape[0], RANKS), rank)
    held = [TensorRegion(each.name, own, torch.rand(own.shape)) for each in metas]
    columns = chunk_cuts(shape[1], RECEIVERS)
    parts = [(cut_part(shape, 1, columns, index), (index,)) for index in range(RECEIVERS)]
    rows = chunk_cuts(shape[0], RANKS)
    world = [
        [(each.name, cut_part(shape, 0, rows, other)) for each in metas] for other in range(RANKS)
    ]
    needed = dict.fromkeys((each.name for each in metas), Placement(tuple(parts)))
    plan = plan_buckets(metas, world, chunk, needed)
    server = ReshardServer(host=HOST, incarnation=f"rank-{rank}", timeouts=TIMEOUTS)
    sender = ReshardSender(HeldShards(plan, rank, lambda: held), server, peers)
    bare = torch.rand(chunk // 4).numpy().view(np.uint8)
    device, before = Device(HOST, 60.0), resident("VmRSS")
    shard = sum(each.values.nbytes for each in held)
    while (order := told.recv()) is not None:
        if order[0] == "publish":
            started = time.perf_counter()
            published = sender.publish(order[1])
            told.send((published, time.perf_counter() - started))
        elif order[0] == "peak":
            told.send((resident("VmHWM") - before, shard, server.route))
        elif order[0] == "cpu":
            told.send(time.process_time())
        else:  # bare messages, to both receivers at once
            serve_bare(server, order[1], bare, pair_bytes // chunk, device)
            told.send("sent")
    sender.close()


def serve_bare(
    server: ReshardServer, name: str, data: np.ndarray, count: int, device: Device
) -> None:
    """Send ``data`` so many times to every receiver, to all of them at once."""

    def serve(receiver: int) -> None:
        place = meet(server.route, f"{name}.{receiver}", 0)
        with open_connection(lambda: PairGroup(place, device)) as pair:
            for tag in range(count):
                if pair.in_flight == IN_FLIGHT:
                    pair.wait(60.0)
                pair.send(data, tag)
            pair.receive(np.zeros(1, np.uint8), count)
            while pair.in_flight:
                pair.wait(60.0)

    threads = [threading.Thread(target=serve, args=(each,)) for each in range(RECEIVERS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()


def receiver_main(rank: int, pair_bytes: int, chunk: int, told: Connection) -> None:
    """A receiver: fetches, or takes bare messages from all ranks at once; answers with seconds."""
    torch.set_num_threads(1)
    receiver, device = ReshardReceiver(f"engine-{rank}", rank), Device(HOST, 60.0)
    rooms = [
        [np.zeros(chunk, np.uint8) for _ in range(max(1, pair_bytes // chunk))]
        for _ in range(RANKS)
    ]
    while (order := told.recv()) is not None:
        if order[0] == "cpu":
            told.send(time.process_time())
            continue
        started = time.perf_counter()
        if order[0] == "fetch":
            _, epoch, published = order
            (route,) = published.handles
            got = receiver.receive(route, epoch, published.manifest)
            took = time.perf_counter() - started
            nbytes = sum(each.nbytes for each in got.buckets)
            del got
            told.send((took, nbytes))
            continue
        _, name, routes = order

        def take(source: int, name: str = name, routes: tuple[Route, ...] = routes) -> None:
            place = meet(routes[source], f"{name}.{rank}", 1)
            with open_connection(lambda: PairGroup(place, device)) as pair:
                for tag, room in enumerate(rooms[source]):
                    if pair.in_flight == IN_FLIGHT:
                        pair.wait(60.0)
                    pair.receive(room, tag)
                while pair.in_flight:
                    pair.wait(60.0)
                pair.send(np.ones(1, np.uint8), len(rooms[source]))
                pair.wait(60.0)

        threads = [threading.Thread(target=take, args=(each,)) for each in range(RANKS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        told.send((time.perf_counter() - started, pair_bytes * RANKS))


def measured(pair_mib: float, chunk_mib: float, rounds: int) -> dict[str, float]:
    """Both ways, alternating, among processes of their own."""
    pair_bytes = int(pair_mib * MIB)
    chunk = min(int(chunk_mib * MIB), pair_bytes)
    spawn, key = mp.get_context("spawn"), SharedKey.random()
    store = StoreServer(HOST, key)
    at = WorldRendezvous("bench", StoreAddress(HOST, store.port, key), RANKS, 100.0)
    ends = list[tuple[Any, Connection]]()
    for index in range(RANKS + RECEIVERS):
        here, there = spawn.Pipe()
        main = rank_main if index < RANKS else receiver_main
        first = (index, at) if index < RANKS else (index - RANKS,)
        process = spawn.Process(target=main, args=(*first, pair_bytes, chunk, there), daemon=True)
        process.start()
        ends.append((process, here))
    ranks, receivers = [c for _, c in ends[:RANKS]], [c for _, c in ends[RANKS:]]

    def asked(connections: list[Connection], *order: object) -> list[Any]:
        for each in connections:
            each.send(order)
        return [each.recv() for each in connections]

    def cpu_s() -> float:
        return sum(asked([*ranks, *receivers], "cpu"))

    routes = [route for *_, route in asked(ranks, "peak")]
    fetched, bare, publish = list[float](), list[float](), list[float]()
    fetched_cpu, bare_cpu = list[float](), list[float]()
    for number in range(1, rounds + 2):  # the first is on memory that was never touched
        answers = asked(ranks, "publish", number)
        publish.append(max(took for _, took in answers))
        before = cpu_s()
        fetched.append(max(took for took, _ in asked(receivers, "fetch", number, answers[0][0])))
        between = cpu_s()
        for each in ranks:
            each.send(("bare", f"bare-{number}"))
        bare.append(max(took for took, _ in asked(receivers, "bare", f"bare-{number}", routes)))
        for each in ranks:
            each.recv()
        fetched_cpu.append(between - before)
        bare_cpu.append(cpu_s() - between)
    peaks = asked(ranks, "peak")
    for process, connection in ends:
        connection.send(None)
        process.join(10)
        process.kill()
    store.close()
    whole = pair_mib * RANKS * RECEIVERS
    ratio = statistics.median(b / f for b, f in zip(bare[1:], fetched[1:], strict=True))
    return {
        "pair_mib": pair_mib,
        "bare_mib_s": whole / statistics.median(bare[1:]),
        "reshard_mib_s": whole / statistics.median(fetched[1:]),
        "ratio": ratio,
        "bare_cpu_s": statistics.median(bare_cpu[1:]),
        "reshard_cpu_s": statistics.median(fetched_cpu[1:]),
        "publish_s": statistics.median(publish[1:]),
        "peak_over_shard": max(grown / shard for grown, shard, _ in peaks),
        "shard_mib": peaks[0][1] / MIB,
    }


def main() -> None:
    """Print the figures of each size, one line of JSON each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[1, 16, 64, 256], help="MiB per pair"
    )
    parser.add_argument("--chunk-mib", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    for size in chosen.sizes:
        figures = measured(size, chosen.chunk_mib, chosen.rounds)
        print(json.dumps({name: round(value, 3) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
