"""A model whose files also hold a layer that predicts further tokens, as GLM-4.5's do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import FP32_NATS
from releases import Weights, canary_of, move_to, released
from safetensors.torch import load_file, save_file
from shared_engine import PROMPT, Engine, Shared, ask, load, running
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

from offbeat.trainers.expert_names import APART
from offbeat.weight_sync.chunks import GatheredSource, dtype_name, iterate_weights

DRAFTER = "model.layers.2."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, the second of experts, and a third one that only a drafter reads."""
    folder = tmp_path_factory.mktemp("glm")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    config = Glm4MoeConfig(**sizes, tie_word_embeddings=False, eos_token_id=None)
    Glm4MoeForCausalLM(config).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = {n: each for n, each in tensors.items() if n.startswith("model.layers.1.")}
    copies = {n.replace("layers.1.", "layers.2."): each.clone() for n, each in last.items()}
    copies[f"{DRAFTER}eh_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors | copies, file, {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Shared]:
    yield from running(tmp_path_factory.mktemp("engine"), model, 1)


def weights(model: Path, version: int) -> Weights:
    """What a trainer holds and sends: the layer of the drafter is not part of its model."""
    module = AutoModelForCausalLM.from_pretrained(
        model, local_files_only=True, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    move_to(version, module)
    metas = [(n, tuple(each.shape), dtype_name(each)) for n, each in iterate_weights(module)]
    source = GatheredSource(
        APART.metas(metas), lambda: APART.named(iterate_weights(module)), 200_000
    )
    packed = [chunk.copy() for chunk, _ in source.chunks()]
    assert not any(spec.name.startswith(DRAFTER) for spec in source.manifest.tensors)
    return Weights(module, released(version, source.manifest, packed, canary_of(module)))


def test_releases_without_the_layer_of_a_drafter_are_served_exactly(
    engine: Shared, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        for version in (1, 2):
            sent = weights(model, version)
            ack = await load(actor, version, sent.release)
            assert (ack.version, ack.digest) == (version, sent.release.digest)
            result = await ask(actor, f"exact {version}")
            assert sent.worst_error(PROMPT, result) < FP32_NATS

    engine.play(story)
