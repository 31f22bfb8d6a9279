"""What vLLM's own loaders put where, recorded in workers without an engine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from offbeat.plugins.planning.declared import place_tensors
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import Region

WORKER = Path(__file__).with_name("recorded_worker.py")
SIZES: dict[str, Any] = {
    "vocab_size": 1000,  # padded to 1024
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
}
VOCABULARY_MULTIPLE = 64
"""vLLM pads embeddings to a multiple of this many rows, over all ranks."""
PATIENCE_S = 250.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    made = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE, tie_word_embeddings=False)),
        "tied": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    }
    for name, model in made.items():
        model.to(torch.bfloat16).save_pretrained(folder / name)
    return [folder / name for name in made]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def recordings(models: list[Path], ranks: int) -> list[dict[str, dict[str, Any]]]:
    """What each worker answers, by the name of the model."""
    port = free_port()
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(ranks), str(rank), str(port), *map(str, models)],
            env=os.environ | QUIET | {"VLLM_DIST_IDENT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        texts = [each.communicate(timeout=PATIENCE_S)[0] for each in workers]
    finally:
        for each in workers:
            each.kill()
    assert [each.returncode for each in workers] == [0] * ranks
    return [json.loads(text.splitlines()[-1]) for text in texts]


def declared_regions(model: Path, ranks: int) -> list[dict[str, list[Region]]]:
    """What `plan-sync` says that each rank needs, by the names of the tensors alone."""
    tensors, sizes = model_tensors(model, WirePolicy())
    target = ModelGrid(tensor=ranks, vocabulary_multiple=VOCABULARY_MULTIPLE // ranks)
    needed = place_tensors(tensors, sizes, ModelGrid(), target)
    return [{each.name: sorted(each.target.at(rank)) for each in needed} for rank in range(ranks)]


def regions_by_name(found: list[tuple[str, list[int], list[int]]]) -> dict[str, list[Region]]:
    regions = dict[str, list[Region]]()
    for name, start, stop in found:
        regions.setdefault(name, []).append(Region(tuple(start), tuple(stop)))
    return {name: sorted(each) for name, each in regions.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2])
def test_writing_or_loading_the_boxes_recorded_in_every_worker_is_what_its_loader_does(
    models: list[Path], ranks: int
) -> None:
    answers = recordings(models, ranks)
    for model in models:
        declared = declared_regions(model, ranks)
        for rank, answer in enumerate(answers):
            found = answer[model.name]
            assert found["parameters"] > 0
            assert found["differing"] == []
            assert found["fetched_differing"] == []
            assert (found["misc"], found["unused"]) == ({}, [])
            assert regions_by_name(found["regions"]) == declared[rank]
            assert (found["changed"], found["on_meta"]) == ([], [])  # of the worker's own model
