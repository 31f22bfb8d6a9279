"""What ``offbeat check`` says of adapters: what they take, ranks without a use, experts left out."""

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from offbeat.config.run import RunConfig
from offbeat.launch.checks.files import check_run_dir
from offbeat.launch.checks.machine import memory_needed_bytes
from offbeat.launch.checks.model_files import ModelFiles, read_model
from offbeat.launch.checks.model_proof import count_trained_parameters
from offbeat.messages.finding import Finding, Level
from offbeat.plugins.lora.checks import adapter_parameters, check_adapters
from offbeat.plugins.lora.lora import find_adapted_modules, find_target_modules, inject
from offbeat.plugins.lora.section import LoraConfig
from tests.support.model_families import family_model
from tests.support.recipes import make_config

TINY_ADDITION = Path(__file__).resolve().parents[3] / "models" / "tiny-addition"
GIB = 2**30


def recipe(rank: int) -> RunConfig:
    return make_config(
        TINY_ADDITION, steps=10, trainer={"backend": "torch", "lora": {"rank": rank}}
    )


def files() -> ModelFiles:
    model, _ = read_model(TINY_ADDITION)
    assert model is not None
    return model


def needed(rank: int) -> int:
    run = recipe(rank)
    return memory_needed_bytes(run, files(), count_trained_parameters(run))


def warnings(model: PreTrainedModel, **lora: Any) -> list[Finding]:
    found = check_adapters(model, LoraConfig.model_validate({"rank": 2, **lora}))
    return [each for each in found if each.level is Level.WARNING]


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "DeepseekV3", "NemotronH"])
def test_the_counted_adapters_are_those_that_peft_injects(
    family: str, targets: tuple[str, ...]
) -> None:
    model, lora = family_model(family), LoraConfig(rank=3, target_modules=targets)
    if family != "Llama" and targets:
        lora = LoraConfig(rank=3, target_modules=("o_proj",))
    count, paths = adapter_parameters(model, lora), set(find_target_modules(model, lora))
    inject(model, lora)
    made = [each.numel() for name, each in model.named_parameters() if ".lora_" in name]
    assert paths == set(find_adapted_modules(model))
    assert count == sum(made) > 0


def test_memory_grows_with_weights_gradients_and_two_moments_of_adapters() -> None:
    more = (count_trained_parameters(recipe(100_000)) or 0) - (
        count_trained_parameters(recipe(8)) or 0
    )
    assert needed(100_000) - needed(8) == 4 * 4 * more > 4 * GIB


def test_states_on_disk_are_those_of_adapters_and_not_of_the_model(tmp_path: Path) -> None:
    def disk(parameters: int | None) -> str:
        big = ModelFiles(GIB, 4 * GIB, None, "x")
        _, found = check_run_dir(
            tmp_path, big, requested=False, checkpoints=2, adapter_parameters=parameters
        )
        return found.message

    assert "about 28.2 GiB" in disk(None), "two states of three copies, the export, logs"
    adapters = disk(GIB // 4)
    assert "about 11.2 GiB" in adapters, "two states of the adapters, the export with them, logs"


def test_a_rank_above_an_axis_of_a_matrix_is_warned_of_with_what_is_enough() -> None:
    model = family_model("Llama")
    least = min(
        min(each.weight.shape) for each in find_target_modules(model, LoraConfig()).values()
    )
    assert not warnings(model, rank=least)
    (warned,) = warnings(model, rank=least + 1)
    assert f"trainer.lora.rank={least + 1} is more than the smaller axis of" in warned.message
    assert warned.fix == f"Set trainer.lora.rank to {least} or less."


def test_default_targets_that_miss_experts_are_warned_of_with_both_counts() -> None:
    model = family_model("Qwen3Moe")
    experts = sum(n.numel() for name, n in model.named_parameters() if ".experts." in name)
    adapted = sum(
        each.numel()
        for name, each in model.named_parameters()
        if "self_attn" in name and each.ndim == 2
    )
    (warned,) = warnings(model)
    assert f"{adapted:,} weights are adapted (k_proj, o_proj, q_proj, v_proj)" in warned.message
    assert f"{experts:,} weights of experts are not" in warned.message
    assert not warnings(model, target_modules=["q_proj"]), "which says so itself"
    assert not warnings(family_model("Llama"))


def test_linear_modules_that_peft_cannot_adapt_are_warned_of_with_their_count() -> None:
    model = family_model("DeepseekV3")
    _, warned = warnings(model)
    assert "6 linear modules (down_proj, gate_proj, up_proj) are not adapted" in warned.message
    assert not warnings(model, target_modules=["o_proj"]), "which says so itself"
    (warned,) = warnings(family_model("FalconH1"))
    assert "2 linear modules (out_proj) are not adapted" in warned.message


def test_a_target_that_the_model_lacks_is_answered_with_the_linear_modules() -> None:
    (found,) = check_adapters(family_model("Llama"), LoraConfig(target_modules=("q_prj",)))
    assert found.level is Level.ERROR
    assert "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in found.fix
