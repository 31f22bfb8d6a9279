"""Which weights of a vision tower the megatron trainer leaves out of training, and which it refuses to."""

import pytest
import torch

from offbeat.plugins.encoder_ranks.sides import make_inventory
from offbeat.plugins.megatron.freezing import freeze_weights, frozen_in_tower
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.sides import Side, keep_side
from tests.support.image_text_models import make
from tests.support.model_families import family_model

IDEFICS3, QWEN = ("model.vision_model.*", "model.connector.*"), ("model.visual.*",)
TOWERS = {
    "idefics3": IDEFICS3,
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "qwen3_vl_moe": QWEN,
}


@pytest.mark.parametrize(("family", "tower"), TOWERS.items(), ids=list(TOWERS))
def test_a_whole_tower_is_what_encoder_ranks_hold(family: str, tower: tuple[str, ...]) -> None:
    model = make(family)
    frozen = frozen_in_tower(model, tower)
    held = {
        name for name, side in make_inventory(model, has_experts=True).trained if side is Side.TOWER
    }
    assert frozen.names == held
    assert frozen.is_whole_tower
    keep_side(model, Side.TOWER)
    assert frozen.elements == sum(each.numel() for each in model.parameters())
    freeze_weights(model, frozen.names)
    assert not any(each.requires_grad for each in model.parameters())


def test_a_part_of_a_tower_leaves_the_rest_to_be_trained() -> None:
    with torch.device("meta"):
        model = make("idefics3")
    projector = frozen_in_tower(model, ["model.connector.*"])
    assert not projector.is_whole_tower
    freeze_weights(model, projector.names)
    still = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert (
        still == projector.names == {n for n, _ in model.named_parameters() if ".connector." in n}
    )


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("model.text_model.norm.weight", "has model.text_model.norm.weight in its language model"),
        (
            "lm_head.*",
            "has lm_head.weight in its language model, which 'lm_head.*' of trainer.freeze",
        ),
        ("model.*", "has model.text_model.embed_tokens.weight and "),
        ("*", "has model.text_model.embed_tokens.weight and "),
        (
            "*.layers.0.*",
            "more in its language model, which '*.layers.0.*' of trainer.freeze matches",
        ),
    ],
)
def test_a_pattern_that_matches_the_language_model_is_refused_by_name_with_two_ways_out(
    pattern: str, problem: str
) -> None:
    with pytest.raises(UntrainableModel) as refused:
        frozen_in_tower(make("idefics3"), [*IDEFICS3, pattern])
    assert problem in refused.value.problem
    assert "which begin with model.vision_model. or model.connector." in refused.value.fix
    assert refused.value.fix.endswith("or set trainer.backend to torch")


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UntrainableModel) as refused:
        frozen_in_tower(make("idefics3"), ["model.conector.modality_projection.*"])
    assert "no parameter whose name matches 'model.conector." in refused.value.problem
    assert refused.value.fix.startswith("The nearest name is model.connector.")


def test_a_model_without_pictures_has_nothing_to_freeze_here() -> None:
    with pytest.raises(UntrainableModel) as refused:
        frozen_in_tower(family_model("Llama"), ["model.embed_tokens.*"])
    assert "has model.embed_tokens.weight in its language model" in refused.value.problem
    assert refused.value.fix == "Leave the pattern out, or set trainer.backend to torch"
