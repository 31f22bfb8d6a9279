"""A trainer rank in a process of its own, whose weights lie on a device, and an engine beside it."""

import multiprocessing as mp
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

from offbeat.plugins.reshard.messages import TransferTimeouts
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.plugins.reshard.server import ReshardServer
from offbeat.plugins.reshard.wire import BucketWire
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.chunks import dtype_name, iterate_weights
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.transport import PublishedRelease

HOST = "127.0.0.1"
TIMEOUTS = TransferTimeouts(slowest_bytes_per_s=1e7, slack_s=60.0)
BUCKET_BYTES = 64 * 2**20
MakeWire = Callable[[str, str], BucketWire]


class Layers(nn.Module):
    """Four gated layers in bfloat16, with names of a decoder."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        for _ in range(4):
            layer = nn.Module()
            for name in ("gate_proj", "up_proj", "down_proj"):
                layer.add_module(name, nn.Linear(width, width))
            self.layers.append(layer)
        self.norm = nn.LayerNorm(width)
        self.to(torch.bfloat16)


def send(make_wire: MakeWire, wire: str, device: str, width: int, asked: Connection) -> None:
    """Publish the weights of a seed, each time one is asked for."""
    module = Layers(width, 0).to(device)
    named = list(iterate_weights(module))
    held = [TensorRegion(name, Region.whole(tuple(w.shape)), w) for name, w in named]
    metas = [TensorMeta(name, tuple(w.shape), dtype_name(w)) for name, w in named]
    plan = plan_buckets(metas, [[(each.name, each.region) for each in held]], BUCKET_BYTES)
    end = make_wire(wire, device)
    server = ReshardServer(host=HOST, incarnation="rank-0", timeouts=TIMEOUTS, wire=end)
    sender = ReshardSender(HeldShards(plan, 0, lambda: held), server, SingleRank())
    version = 0
    while (seed := asked.recv()) is not None:
        version += 1
        module.load_state_dict(Layers(width, seed).state_dict())
        asked.send(sender.publish(version))
    sender.close()


@contextmanager
def sending(
    make_wire: MakeWire, wire: str, device: str, width: int
) -> Generator[Callable[[int], PublishedRelease]]:
    """Start the rank; yield a function that has it publish the weights of a seed."""
    context = mp.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(
        target=send, args=(make_wire, wire, device, width, theirs), daemon=True
    )
    process.start()

    def publish(seed: int) -> Any:
        ours.send(seed)
        return ours.recv()

    try:
        yield publish
        ours.send(None)
        process.join(60.0)
    finally:
        process.kill()
        process.join()
