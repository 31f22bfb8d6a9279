"""A trainer of two processes that send what they hold, and can be struck at a bucket.

Run as a script, this file is one rank in the environment of another interpreter: megatron-core is not in
vLLM's. ``python sharded_trainer.py HOST PORT``, with the key of the connection on standard input.
"""

import multiprocessing as mp
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from offbeat.config.run import RunConfig
from offbeat.plugins.reshard.sender import ReshardSender
from offbeat.plugins.reshard.server import ReshardServer
from offbeat.trainers.ranks.process_group import join
from offbeat.trainers.senders import make_sender
from offbeat.trainers.spec import TrainerSpec, WorldRendezvous
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store_server import StoreServer
from offbeat.weight_sync.transport import PublishedRelease

HOST = "127.0.0.1"
RANKS = 2
COLLECTIVE_S = 60.0
BUCKET_MIB = 0.05
Strike = Literal["none", "killed", "stopped"]


def factor(version: int, name: str = "", *, delta: bool = False) -> float:
    """What a weight of the model is multiplied with: one rounding, the same on any shard.

    With ``delta``, norms alone change.
    """
    return 1.0 if delta and "norm" not in name else 1 + version / 8


FSDP2: dict[str, Any] = {"data_parallel": RANKS}
MEGATRON: dict[str, Any] = {"backend": "megatron", "tensor_parallel": RANKS}
PIPELINE: dict[str, Any] = {"backend": "megatron", "pipeline_parallel": RANKS}
EXPERTS: dict[str, Any] = {
    "backend": "megatron",
    "data_parallel": RANKS,
    "expert_parallel": RANKS,
}


def recipe(
    model: Path,
    wire_dtype: str | None = None,
    trainer: Mapping[str, Any] = FSDP2,
    *,
    delta: bool = False,
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": str(model)},
            "generator": {"backend": "vllm"},
            "trainer": dict(trainer),
            "sync": {
                "transport": "reshard",
                "chunk_mib": BUCKET_MIB,
                "wire_dtype": wire_dtype,
                "slowest_mib_s": 1.0,
                "slack_s": 10.0,
                "delta": delta,
            },
        }
    )


class ShardedTrainer:
    """The ranks' processes. With a ``python`` they are that interpreter's."""

    def __init__(
        self,
        model: Path,
        run_dir: Path,
        wire_dtype: str | None = None,
        *,
        trainer: Mapping[str, Any] = FSDP2,
        python: Path | None = None,
        delta: bool = False,
    ) -> None:
        key = SharedKey.random()
        self._server = StoreServer(HOST, key)
        store = StoreAddress(HOST, self._server.port, key)
        at = WorldRendezvous(f"world-{os.getpid()}", store, RANKS, COLLECTIVE_S)
        config = recipe(model, wire_dtype, trainer, delta=delta)
        self._ends, self.processes = list[Connection](), list[Any]()
        for rank in range(RANKS):
            spec = TrainerSpec(config, str(run_dir), rank, RANKS)
            end, process = started(spec, at) if python is None else started_by(python, spec, at)
            self._ends.append(end)
            self.processes.append(process)
        for each in self._ends:
            each.recv()

    def publish(
        self,
        version: int,
        layout: EngineLayout | None = None,
        strike: Strike = "none",
        at: int = 0,
    ) -> PublishedRelease:
        """The release of all ranks; rank 1 is struck before it sends its bucket number ``at``."""
        for rank, each in enumerate(self._ends):
            each.send((version, layout, strike if rank else "none", at))
        first, *_ = [each.recv() for each in self._ends]
        return first

    def sent(self) -> list[int]:
        """Bytes that each rank has sent of the release."""
        for each in self._ends:
            each.send(None)
        return [each.recv() for each in self._ends]

    def close(self) -> None:
        for each in self.processes:
            each.kill()
            each.wait() if isinstance(each, subprocess.Popen) else each.join()
        self._server.close()


def started(spec: TrainerSpec, at: WorldRendezvous) -> tuple[Connection, Any]:
    """A rank in a process like this one."""
    spawn = mp.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=run_rank, args=(spec, at, theirs), daemon=True)
    process.start()
    return ours, process


def started_by(python: Path, spec: TrainerSpec, at: WorldRendezvous) -> tuple[Connection, Any]:
    """A rank in a process of another interpreter."""
    key = os.urandom(16)
    with Listener((HOST, 0), authkey=key) as listener:
        where = [str(each) for each in listener.address]
        path = {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(
            [str(python), __file__, *where], stdin=subprocess.PIPE, env=os.environ | path
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(key)
        end = listener.accept()
    end.send((spec, at))
    return end, process


@dataclass
class Counted(Mapping[int, BucketMemory]):
    """Buckets of a release; what is sent is counted, and strikes this process at a turn."""

    buckets: Mapping[int, BucketMemory]
    strike: Callable[[int], None]
    nbytes: int = 0
    turns: int = 0

    def __getitem__(self, bucket: int) -> BucketMemory:
        self.strike(self.turns)
        self.turns += 1
        self.nbytes += self.buckets[bucket].nbytes
        return self.buckets[bucket]

    def __contains__(self, bucket: object) -> bool:
        return bucket in self.buckets

    def __iter__(self) -> Iterator[int]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)


def run_rank(spec: TrainerSpec, at: WorldRendezvous, test: Connection) -> None:
    """The main of a rank: releases until the pipe is closed."""
    torch.set_num_threads(1)
    peers = join(at, spec.rank, "cpu", HOST)
    stands_in = ExitStack()  # as long as the process lives
    if spec.config.trainer.backend == "megatron":
        from offbeat.plugins.megatron.cpu_shim import cpu_stands_in  # noqa: PLC0415 -- not here

        stands_in.enter_context(cpu_stands_in("cpu"))
        from offbeat.plugins.megatron.megatron_trainer import make_megatron_rank  # noqa: PLC0415

        trainer, source = make_megatron_rank(spec, peers)
    else:
        from offbeat.trainers.torch.torch_trainer import make_torch_rank  # noqa: PLC0415 -- only in a rank

        trainer, source = make_torch_rank(spec, peers)
    sender = make_sender(spec, source, lambda: HOST, f"trainer.{spec.rank}", peers)
    assert isinstance(sender, ReshardSender)
    first = [each.values.clone() for each in trainer.held_regions()]
    test.send("ready")
    counted = changed = Counted({}, lambda turn: None)
    while True:
        try:
            asked = test.recv()
        except EOFError:
            break
        if asked is None:
            test.send(counted.nbytes + changed.nbytes)
            continue
        version, layout, strike, turn = asked
        with torch.no_grad():
            for each, base in zip(trainer.held_regions(), first, strict=True):
                each.values.copy_(base * factor(version, each.name, delta=spec.config.sync.delta))
        released = sender.publish(version, layout)
        server: ReshardServer = sender._server  # noqa: SLF001
        offered = server.offered
        assert offered is not None
        counted, changes = Counted(offered.buckets, striker(strike, turn)), offered.changes
        changed = Counted({} if changes is None else changes.buckets, striker(strike, turn))
        if changes is not None:
            changes = replace(changes, buckets=changed)
        server.offer(replace(offered, buckets=counted, changes=changes))
        test.send(released)
    stands_in.close()
    dist.destroy_process_group()


def striker(strike: Strike, at: int) -> Callable[[int], None]:
    sign = signal.SIGKILL if strike == "killed" else signal.SIGSTOP

    def struck(turn: int) -> None:
        if strike != "none" and turn == at:
            os.kill(os.getpid(), sign)

    return struck


if __name__ == "__main__":
    connection = Client((sys.argv[1], int(sys.argv[2])), authkey=sys.stdin.buffer.read())
    spec, rendezvous = connection.recv()
    run_rank(spec, rendezvous, connection)
