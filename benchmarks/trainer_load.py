"""The most memory of its own that each trainer rank holds while a model is loaded and exported.

    python -m benchmarks.trainer_load --million 500 --ranks 2 --dtype bfloat16

Makes a random Qwen 3 of about so many parameters in a temporary directory, cuts it over ranks on this
machine's CPU, and exports it again, in files of ``--file-mib``. *Own* memory is the anonymous part of the resident memory (Linux,
``RssAnon``), looked at every 5 ms: pages of files that are mapped can be dropped, and do not count.
Prints MiB by rank and phase, less what the process held before it loaded; *held* is after the phase.
The C library gives large blocks back at once (``MALLOC_MMAP_THRESHOLD_``), so that they count once.
A rank's share of the model in float32, the masters, is what it cannot do without.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.spec import WorldRendezvous
from offbeat.trainers.torch import TorchTrainer
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store_server import StoreServer

HOST: Final = "127.0.0.1"
_MIB: Final = 2**20
_LOOK_S: Final = 0.005
_STATUS: Final = Path("/proc/self/status")


def own_mib() -> float:
    """Anonymous memory of this process, MiB."""
    line = next(each for each in _STATUS.read_text().splitlines() if each.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024 / _MIB


@contextmanager
def watched(phase: str, before_mib: float, found: dict[str, dict[str, float]]) -> Iterator[None]:
    """Record the peak of this process's own memory in the block, and what is held after it."""
    over, peak = threading.Event(), own_mib()

    def look() -> None:
        nonlocal peak
        while not over.wait(_LOOK_S):
            peak = max(peak, own_mib())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()
    found[phase] = {"peak": round(peak - before_mib), "held": round(own_mib() - before_mib)}


def make_model(path: Path, million: float) -> int:
    """Write a random model of about so many parameters in bfloat16; returns how many it has."""
    hidden, layers = 1024, 16
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    each = sum(p.numel() for p in _on_meta(config).model.layers[0].parameters())
    config.num_hidden_layers = max(1, round((million * 1e6 - 32_000 * hidden) / each))
    config.layer_types = None
    model = _on_meta(Qwen3Config(**{**config.to_dict(), "layer_types": None})).to_empty(
        device="cpu"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.tie_weights()
    model.save_pretrained(path)
    return sum(p.numel() for p in model.parameters())


def _on_meta(config: Qwen3Config) -> Any:  # noqa: ANN401 -- its class is made by transformers
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def rank_main(
    rank: int, at: WorldRendezvous, path: Path, dtype: str, file_bytes: int, replies: Connection
) -> None:
    """Run one rank: load, export, and report the cost."""
    torch.set_num_threads(1)
    found = dict[str, dict[str, float]]()
    if at.size == 1:
        peers = SingleRank()
    else:
        from offbeat.trainers.ranks.process_group import join  # noqa: PLC0415 -- ranks only

        peers = join(at, rank, "cpu", HOST)
    before = own_mib()
    with watched("load", before, found):
        trainer = TorchTrainer(
            path,
            trainer=TorchTrainerConfig(data_parallel=at.size),
            model=ModelConfig.model_validate({"path": str(path), "dtype": dtype}),
            total_steps=1,
            max_model_len=256,
            peers=peers,
        )
    with watched("export", before, found):
        trainer.save(path.parent / "exported", file_bytes=file_bytes)
    replies.send(found)


def main() -> None:
    """Run all ranks and print what they took."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--million", type=float, default=500.0, help="parameters of the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument(
        "--file-mib", type=int, default=FILE_BYTES // _MIB, help="of an exported file"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model"
        parameters = make_model(path, given.million)
        key = SharedKey.random()
        server = StoreServer(HOST, key)
        at = WorldRendezvous("load", StoreAddress(HOST, server.port, key), given.ranks, 300.0)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read by the processes that start now
        spawn = multiprocessing.get_context("spawn")
        ends = [spawn.Pipe() for _ in range(given.ranks)]
        ranks = [
            spawn.Process(
                target=rank_main, args=(rank, at, path, given.dtype, given.file_mib * _MIB, there)
            )
            for rank, (_, there) in enumerate(ends)
        ]
        for each in ranks:
            each.start()
        by_rank = [here.recv() for here, _ in ends]
        for each in ranks:
            each.join()
        server.close()
    share = parameters * 4 / given.ranks / _MIB
    about = {"parameters": parameters, "dtype": given.dtype, "share_float32_mib": round(share)}
    print(json.dumps({**about, "mib": by_rank}, indent=1))


if __name__ == "__main__":
    main()
