"""``offbeat check`` names a model whose pictures are not supported, before anything starts."""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from offbeat.launch.checks.model_proof import check_model_proof
from offbeat.messages.finding import Finding, Level
from offbeat.plugins.megatron.checks import check_layout
from tests.support.image_text_models import make
from tests.support.recipes import make_config

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llava() -> PreTrainedModel:
    text = LlamaConfig(vocab_size=64, num_key_value_heads=2, **SIZES)
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **SIZES)
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=60)
    )


def finding_about_the_tower(model: PreTrainedModel, path: Path) -> Finding:
    model.save_pretrained(path)
    config = make_config(
        path,
        environment={"name": "digits", "images": {"max_mib": 0.02}},
        trainer={"backend": "stub"},
    )
    found = check_model_proof(config)
    return next(each for each in found if "vision tower" in str(each))


def test_a_family_whose_pictures_are_not_supported_is_an_error_that_names_those_that_are(
    tmp_path: Path,
) -> None:
    told = str(finding_about_the_tower(llava(), tmp_path))
    assert "(llava): its pictures are not supported" in told
    assert "Take a model of idefics3, qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, gemma3" in told


def test_one_of_several_environments_with_pictures_needs_a_tower_too(tmp_path: Path) -> None:
    llava().save_pretrained(tmp_path)
    pictured = {"environment": {"name": "digits", "images": {"max_mib": 0.02}}}
    plain = {"environment": {"name": "arithmetic"}}
    config = make_config(
        tmp_path, environments={"text": plain, "digits": pictured}, trainer={"backend": "stub"}
    )
    told = [str(each) for each in check_model_proof(config)]
    assert any("(llava): its pictures are not supported" in each for each in told)


@pytest.mark.parametrize(("family", "kind"), [("idefics3", "pixels"), ("qwen3_vl", "patches")])
def test_a_supported_family_is_said_to_be_proved_at_the_start(
    family: str, kind: str, tmp_path: Path
) -> None:
    told = str(finding_about_the_tower(make(family), tmp_path))
    assert f"reads {kind}; proved at the start" in told


def of_megatron(model: PreTrainedModel, path: Path, **trainer: Any) -> list[Finding]:
    model.save_pretrained(path)
    config = make_config(
        path,
        environment={"name": "digits", "images": {"max_mib": 0.02}},
        trainer={"backend": "megatron", **trainer},
    )
    return [*check_layout(config), *check_model_proof(config)]


def test_megatron_refuses_a_family_whose_pictures_it_does_not_compute_in_one_error(
    tmp_path: Path,
) -> None:
    found = of_megatron(make("gemma3"), tmp_path)
    (error,) = [
        each for each in found if "reads media" in each.message and each.level is Level.ERROR
    ]
    assert "is of family gemma3 (it reads media" in error.message
    assert error.fix == "Train it with trainer.backend: torch."


def test_megatron_does_not_repeat_layers_to_whose_outputs_features_are_added(
    tmp_path: Path,
) -> None:
    found = of_megatron(make("qwen3_vl"), tmp_path, activation_checkpointing=True)
    (error,) = [each for each in found if each.level is Level.ERROR]
    assert "trainer.activation_checkpointing repeats the layers without them" in error.message
    assert error.fix == "Set trainer.activation_checkpointing to false."


def test_megatron_keeps_the_layers_to_whose_outputs_features_are_added_on_the_first_stage(
    tmp_path: Path,
) -> None:
    model = make("qwen3_vl")
    model.config.vision_config.deepstack_visual_indexes = [0, 1]
    found = of_megatron(type(model)(model.config), tmp_path, pipeline_parallel=2)
    (error,) = [each for each in found if each.level is Level.ERROR]
    assert "trainer.pipeline_parallel=2 is not fewer stages" in error.message
    assert error.fix == "Set trainer.pipeline_parallel to 1: together they fit."


def test_megatron_takes_a_vision_tower_that_canaries_compare_with_the_engines(
    tmp_path: Path,
) -> None:
    found = of_megatron(make("idefics3"), tmp_path)
    assert all(each.level is not Level.ERROR for each in found)
    assert any(
        "reads pixels; compared with the engine's by canaries" in str(each) for each in found
    )
