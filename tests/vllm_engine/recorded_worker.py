"""One tensor-parallel worker of vLLM without an engine: it records loaders, and replays them.

python recorded_worker.py RANKS RANK PORT MODEL... prints a line of JSON.
"""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

import json
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from offbeat.plugins.vllm.worker_fetch import record_worker
from offbeat.trainers.ranks.assembly import HeldShards
from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.engine_layout import EngineLayout, find_needed_buckets
from offbeat.weight_sync.manifest import Bytes, TensorMeta
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region, chunk_cuts, cut_part
from offbeat.weight_sync.region_tensors import RegionTensors


def recorded(model: Path, ranks: int) -> dict[str, Any]:
    """Compare the recorded boxes of a model with what the loader itself makes of the same files."""
    config = EngineArgs(
        model=str(model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
    ).create_engine_config()
    given = load_file(model / "model.safetensors")
    specs = {name: (tuple(each.shape), each.dtype) for name, each in given.items()}
    with set_current_vllm_config(config):
        initialize_model_parallel(ranks)  # the expert group exists only for models of experts
        loaded = emptied(initialize_model(config))
        loaded.load_weights(iter(given.items()))
        want = {name: each.clone() for name, each in loaded.named_parameters()}
        recording = record_worker(config, specs)
        into = dict(loaded.named_parameters())
        changed = differing(want, into)
        on_meta = [name for name, each in tensors_of(loaded) if each.is_meta]
        emptied(loaded)
        for name, region in recording.regions():
            recording.write(name, region, given[name][region.slices], into)
        replayed = differing(want, into)
        emptied(loaded).load_weights(fetched(given, list(recording.regions())))
    destroy_model_parallel()
    return {
        "changed": changed,
        "on_meta": on_meta,
        "differing": replayed,
        "fetched_differing": differing(want, into),
        "parameters": len(want),
        "misc": dict(recording.misc),
        "unused": list(recording.unused),
        "regions": [(name, region.start, region.stop) for name, region in recording.regions()],
    }


def fetched(
    given: dict[str, Tensor], regions: list[tuple[str, Region]]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of whole shape as they come from two senders, each with half of the rows of all."""
    metas = [TensorMeta(name, tuple(t.shape), "bfloat16") for name, t in given.items()]
    held = [
        [
            TensorRegion(name, part, t[part.slices])
            for name, t in given.items()
            if (part := cut_part(tuple(t.shape), 0, chunk_cuts(t.shape[0], 2), rank)).elements
        ]
        for rank in range(2)
    ]
    layout = EngineLayout(tuple(given), (tuple(regions),))
    regions_held = [[(each.name, each.region) for each in own] for own in held]
    plan = plan_buckets(metas, regions_held, 5_000, layout.placement(metas))
    packed = dict[int, Bytes]()
    for rank, own in enumerate(held):
        source = HeldShards(plan, rank, lambda own=own: own)
        packed |= {
            bucket: data
            for bucket, data, _ in source.pack_buckets(lambda _, nbytes: np.empty(nbytes, np.uint8))
        }
    buckets = find_needed_buckets(1, plan.manifest, layout.needs(0))
    made = RegionTensors(plan.manifest, buckets).tensors([packed[at] for at in buckets])
    yield from chain.from_iterable(made)


def differing(want: dict[str, Tensor], got: dict[str, Tensor]) -> list[str]:
    return [name for name, each in want.items() if not torch.equal(each, got[name])]


def tensors_of(model: Any) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def emptied(model: Any) -> Any:
    """Set every parameter to 0, so that what nobody writes is equal."""
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    return model


def main(ranks: int, rank: int, port: int, *models: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    config = EngineArgs(model=models[0], skip_tokenizer_init=True).create_engine_config()
    with set_current_vllm_config(config):
        where = f"tcp://127.0.0.1:{port}"
        init_distributed_environment(ranks, rank, where, rank, "gloo")
    found = {Path(model).name: recorded(Path(model), ranks) for model in models}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
