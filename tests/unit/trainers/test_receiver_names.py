"""Under which names the engines of a run hold the weights of models of several families."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    OlmoeConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.expert_names import APART, AS_THEY_ARE, TOGETHER, Meta
from offbeat.trainers.ranks.assembly import build_source
from offbeat.trainers.receiver_names import (
    file_shapes,
    module_shapes,
    names_for_files,
    names_for_module,
)
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.chunks import dtype_name, iterate_weights
from tests.support.recipes import make_config

BODY: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 12}
HEAD: dict[str, Any] = {"head_dim": 8}  # the class takes it without declaring it
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**BODY, head_dim=8, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**BODY, **EXPERTS, **HEAD, num_experts=11),
    "olmoe": OlmoeConfig(**BODY, num_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **BODY,
        **EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
    "gpt_oss": GptOssConfig(**BODY, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2),
    "mixtral": MixtralConfig(**BODY, num_local_experts=4),
    "nemotron_h": NemotronHConfig(
        **{**BODY, "num_hidden_layers": 3},
        **EXPERTS,
        head_dim=8,
        layers_block_type=["moe", "attention", "moe"],
        n_groups=1,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=12,
    ),
}
Make = Callable[[str], tuple[Path, PreTrainedModel]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Save a tiny model of a family and load it again, as a trainer does."""

    def made(family: str) -> tuple[Path, PreTrainedModel]:
        path = tmp_path_factory.mktemp(family)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIGS[family]).save_pretrained(path)
        return path, AutoModelForCausalLM.from_pretrained(path)

    return made


def metas_of(named: Iterator[tuple[str, Tensor]]) -> list[Meta]:
    return [(name, tuple(each.shape), dtype_name(each)) for name, each in named]


def in_files(path: Path) -> dict[str, Tensor]:
    with safe_open(path / "model.safetensors", framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", CONFIGS)
def test_an_embedded_engine_holds_the_weights_of_the_module_as_they_are(
    make: Make, family: str
) -> None:
    path, model = make(family)
    metas = metas_of(iterate_weights(model))
    assert names_for_module(path, metas, remote_code=False) is AS_THEY_ARE
    assert {name: shape for name, shape, _ in metas} == module_shapes(path, remote_code=False)


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "gpt2"]
)
def test_a_vllm_engine_is_sent_the_names_and_the_values_of_the_files(
    make: Make, family: str
) -> None:
    path, model = make(family)
    names = names_for_files(path, metas_of(iterate_weights(model)))
    sent, stored = dict(names.named(iterate_weights(model))), in_files(path)
    assert sent.keys() <= stored.keys()
    assert all(torch.equal(sent[name], stored[name]) for name in sent)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3"])
def test_files_are_joined_to_the_weights_of_the_module(make: Make, family: str) -> None:
    """What a trainer does that goes by the names of the files, as megatron's."""
    path, model = make(family)
    stored = sorted(in_files(path).items())
    names = names_for_module(path, metas_of(iter(stored)), remote_code=False)
    assert names is TOGETHER
    joined, want = dict(names.named(stored)), dict(iterate_weights(model))
    assert joined.keys() == want.keys()
    assert all(torch.equal(joined[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("family", "names", "more"),
    [("mixtral", "experts.gate_up_proj", 3), ("nemotron_h", "model.layers.0.norm.weight", 18)],
)
def test_a_model_whose_names_cannot_be_mapped_is_refused_by_name(
    make: Make, family: str, names: str, more: int
) -> None:
    path, model = make(family)
    with pytest.raises(UntrainableModel, match="holds under different names") as refused:
        names_for_files(path, metas_of(iterate_weights(model)))
    assert names in str(refused.value)
    assert f"and {more} more" in str(refused.value)


def test_experts_that_are_half_there_are_refused_by_name(make: Make) -> None:
    path, _ = make("qwen3_moe")
    stored = sorted(in_files(path).items())
    lacks_a_gate = [each for each in stored if "experts.0.gate_proj" not in each[0]]
    with pytest.raises(UntrainableModel, match=r"experts\.0\.down_proj"):
        names_for_module(path, metas_of(iter(lacks_a_gate)), remote_code=False)


def test_experts_without_a_gate_are_parted_and_joined(make: Make) -> None:
    _, model = make("nemotron_h")
    stored = dict(iterate_weights(model))
    parted = dict(APART.named(iter(stored.items())))
    assert "model.layers.0.mixer.experts.3.up_proj.weight" in parted
    assert not any(name.endswith(("experts.up_proj", "experts.down_proj")) for name in parted)
    joined = dict(TOGETHER.named(iter(sorted(parted.items()))))
    assert joined.keys() == stored.keys()
    assert all(torch.equal(joined[name], stored[name]) for name in stored)
    metas = metas_of(iter(sorted(parted.items())))
    assert dict(name_and_shape(TOGETHER.metas(metas))) == dict(
        name_and_shape(metas_of(iter(stored.items())))
    )


def name_and_shape(metas: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, shape) for name, shape, _ in metas)


def test_without_safetensors_files_names_stay_as_they_are(tmp_path: Path) -> None:
    assert file_shapes(tmp_path) == {}
    assert names_for_files(tmp_path, [("a", (1,), "float32")]) is AS_THEY_ARE


def manifest_metas(model: PreTrainedModel) -> list[Meta]:
    return [(name, tuple(each.shape), dtype_name(each)) for name, each in iterate_weights(model)]


@pytest.mark.plugins
@pytest.mark.parametrize(("backend", "is_apart"), [("vllm", True), ("embedded", False)])
def test_a_rank_sends_what_the_engines_of_its_run_load(
    make: Make, backend: str, *, is_apart: bool
) -> None:
    path, model = make("qwen3_moe")
    overrides = {"generator": {"backend": backend}, "sync": {"chunk_mib": 0.01}}
    config = make_config(model=path, **overrides)
    spec = TrainerSpec(config, "run")
    source = build_source(spec, manifest_metas(model), lambda: iterate_weights(model))
    sent = {each.name for each in source.manifest.tensors}
    assert any(".experts.3." in name for name in sent) == is_apart
    own = {name for name, _ in iterate_weights(model)}
    assert sent == (in_files(path).keys() if is_apart else own)
    assert len(source.manifest.chunk_nbytes) > 1, "of 10 KiB each, where a tensor fits into one"


def test_a_rank_sends_in_the_wire_dtype_but_what_is_to_be_kept(make: Make) -> None:
    path, model = make("qwen3")
    sync = {"wire_dtype": "bfloat16", "keep_float32": ["norm.weight"]}
    config = make_config(path, sync=sync)
    spec = TrainerSpec(config, "run")
    source = build_source(spec, manifest_metas(model), lambda: iterate_weights(model))
    dtypes = {each.name: each.dtype for each in source.manifest.tensors}
    assert dtypes == {
        name: "float32" if name.endswith("norm.weight") else "bfloat16" for name in dtypes
    }
    assert set(dtypes.values()) == {"float32", "bfloat16"}


def test_a_router_s_bias_that_is_not_sent_is_named(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"n_routed_experts": 4, "first_k_dense_replace": 1}
    model = AutoModelForCausalLM.from_config(Glm4MoeConfig(**BODY, **EXPERTS, **HEAD, **sizes))
    model.save_pretrained(tmp_path)
    metas = [(name, tuple(each.shape), dtype_name(each)) for name, each in iterate_weights(model)]
    names_for_module(tmp_path, metas, remote_code=False)
    parameters = [meta for meta in metas if not meta[0].endswith("e_score_correction_bias")]
    with pytest.raises(UntrainableModel, match=r"layers\.1\.mlp\.gate\.e_score_correction_bias"):
        names_for_module(tmp_path, parameters, remote_code=False)
