"""How the matrices of a vision tower are divided, by family; what cannot be divided is refused by name."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from offbeat.plugins.encoder_ranks.tower_plan import tower_plan
from offbeat.plugins.tensor_ranks.tensor_parallel import VOCABULARY, cut_axis, tensor_plan
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.sides import tower_modules
from tests.support.image_text_models import MODELS

FAMILIES = sorted(MODELS)


def shell(family: str) -> PreTrainedModel:
    with torch.device("meta"):
        return MODELS[family]()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_the_layers_of_a_tower_is_divided_and_nothing_else(family: str) -> None:
    model = shell(family)
    towers = tuple(f"{name}." for name in tower_modules(model))
    layers = {
        name
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
        and name.startswith(towers)
        and (".layers." in name or ".blocks." in name)
    }
    assert layers
    assert tower_plan(model, 2).keys() == layers
    assert tower_plan(model, 1) == {}


@pytest.mark.parametrize("family", ["idefics3", "qwen2_vl", "qwen2_5_vl", "gemma3"])
def test_language_ranks_beside_an_encoder_have_the_vocabulary_whole(family: str) -> None:
    plan = tensor_plan(shell(family), 2, holds_tower=False)
    assert plan
    assert VOCABULARY not in plan.values()


@pytest.mark.parametrize(
    ("family", "weight", "axis"),
    [
        ("idefics3", "model.vision_model.encoder.layers.1.self_attn.k_proj.weight", 0),
        ("idefics3", "model.vision_model.encoder.layers.1.self_attn.out_proj.weight", 1),
        ("idefics3", "model.vision_model.encoder.layers.1.layer_norm1.weight", None),
        ("qwen2_5_vl", "model.visual.blocks.0.attn.qkv.weight", 0),
        ("qwen2_5_vl", "model.visual.blocks.0.attn.proj.weight", 1),
        ("qwen3_vl", "model.visual.merger.linear_fc1.weight", None),
    ],
)
def test_a_matrix_is_cut_along_its_outputs_or_its_inputs(
    family: str, weight: str, axis: int | None
) -> None:
    model = shell(family)
    assert model.get_parameter(weight).ndim in (1, 2)
    assert cut_axis(tower_plan(model, 2), weight, model.get_parameter(weight).ndim) == axis


def bilinear_fc1(model: Any) -> None:
    model.model.visual.blocks[1].mlp.linear_fc1 = nn.Identity()


def further_norm(model: Any) -> None:
    model.model.visual.blocks[0].attn.q_norm = nn.LayerNorm(32, device="meta")


def other_family(model: Any) -> None:
    model.config.model_type = "llava"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (bilinear_fc1, r"model\.visual\.blocks\.1\.mlp\.linear_fc1 is not a linear layer"),
        (further_norm, r"model\.visual\.blocks\.0\.attn\.q_norm\.weight reads what is divided"),
        (other_family, "no rule divides: llava is not idefics3, smolvlm"),
    ],
)
def test_a_tower_of_other_modules_than_are_known_is_refused(change: Any, problem: str) -> None:
    model = shell("qwen3_vl")
    change(model)
    with pytest.raises(UntrainableModel, match=f"{problem}.*encoder.tensor_parallel to 1"):
        tower_plan(model, 2)


@pytest.mark.parametrize(
    ("family", "ranks", "problem"),
    [
        ("gemma3", 3, "has 4 attention heads in its vision tower, which .*=3 does not divide"),
        ("qwen2_vl", 64, r"has 96 columns in model\.visual\.blocks\.0\.attn\.qkv, which .*=64"),
    ],
)
def test_a_number_of_ranks_that_does_not_divide_the_tower_is_refused(
    family: str, ranks: int, problem: str
) -> None:
    with pytest.raises(UntrainableModel, match=rf"{problem}.*tensor_parallel to one of 1, 2, 4"):
        tower_plan(shell(family), ranks)
