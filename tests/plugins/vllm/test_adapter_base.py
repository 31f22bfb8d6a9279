"""Releases of adapters as vLLM's engines take them: whole models, made from the files of the base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from offbeat.messages.weights import WeightRelease
from offbeat.plugins.lora.release import merge_matrix
from offbeat.plugins.vllm.adapter_base import FileBase
from offbeat.plugins.vllm.coverage import read_coverage
from offbeat.weight_sync.chunks import GatheredSource, tensor_views, walk
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Adapter, Manifest, release_digest
from offbeat.weight_sync.served import digest_loaded

TARGETS = ("self_attn.q_proj", "mlp.down_proj")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module", params=[True, False], ids=["tied head", "own head"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    tied: bool = request.param
    config = Qwen3Config(vocab_size=64, **sizes, **heads, tie_word_embeddings=tied)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def adapters_of(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    noise, made = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    for name, each in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(TARGETS):
            outputs, inputs = each.shape
            for side, shape in (("A", (4, inputs)), ("B", (outputs, 4))):
                drawn = torch.randn(shape, generator=noise).to(each.dtype)
                made[f"base_model.model.{module}.lora_{side}.weight"] = drawn
    return made


def released(tensors: dict[str, Tensor], base: str, version: int = 1) -> WeightRelease:
    metas = [
        (name, tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in tensors.items()
    ]
    source = GatheredSource(
        metas, lambda: iter(tensors.items()), 2_000, None, Adapter(base, 4, 8, "lora")
    )
    chunks, digests = zip(*source.chunks(), strict=True)
    manifest = source.manifest.seal(digests)
    digest = release_digest(manifest, digests)
    return WeightRelease(version, digest, manifest, chunks, manifest.nbytes)


def opened(manifest: Manifest, chunks: tuple[Any, ...]) -> dict[str, Tensor]:
    pairs = zip(walk(manifest), chunks, strict=True)
    return {name: each for chunk, data in pairs for name, each in tensor_views(chunk, data)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_release_of_adapters_becomes_the_model_with_them_added(model: Path, dtype: str) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    weights: dict[str, Tensor] = dict(loaded.named_parameters())
    base = FileBase(str(model), read_coverage(str(model), dtype))
    for version in (1, 2):
        adapters = adapters_of(weights, seed=version)
        given = released(adapters, digest_loaded(str(model)), version)
        whole = base.whole(version, given, given.chunks)
        read_coverage(str(model), dtype).check(version, whole.manifest)
        assert whole.digest == release_digest(whole.manifest, whole.manifest.chunk_digests)
        got = opened(whole.manifest, whole.chunks)
        assert got.keys() == weights.keys()
        for name, each in weights.items():
            part = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            want = each
            if f"{part}A.weight" in adapters:
                want = merge_matrix(
                    each, adapters[f"{part}A.weight"], adapters[f"{part}B.weight"], 2.0
                )
                assert not torch.equal(want, each)
            assert torch.equal(got[name], want)


def test_adapters_of_another_base_or_with_a_flipped_bit_are_refused(model: Path) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    adapters = adapters_of(dict(loaded.named_parameters()), seed=1)
    base = FileBase(str(model), read_coverage(str(model), "float32"))
    foreign = released(adapters, "another")
    with pytest.raises(TransferRefused, match="base of the adapters"):
        base.whole(1, foreign, foreign.chunks)
    given = released(adapters, base.digest)
    damaged = given.chunks[0].copy()
    damaged[5] ^= 1
    with pytest.raises(TransferRefused, match="digest"):
        base.whole(2, given, (damaged, *given.chunks[1:]))
    whole = base.whole(3, given, given.chunks)
    assert whole.manifest.nbytes > given.manifest.nbytes
