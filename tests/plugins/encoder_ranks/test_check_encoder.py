"""``offbeat check`` says what a rank of either side holds, and whether its GPU has room for it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from offbeat.config.run import RunConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.launch.checks.gpu_memory import gpu_bytes
from offbeat.launch.checks.torch_ranks import check_data_ranks
from offbeat.messages.finding import Finding, Level, size
from offbeat.plugins.encoder_ranks.checks import check_encoder
from offbeat.plugins.encoder_ranks.tower_plan import tower_plan
from offbeat.plugins.megatron.architecture import read_architecture
from offbeat.plugins.megatron.checks import check_layout, largest_rank
from offbeat.plugins.tensor_ranks.plugin import PART
from offbeat.plugins.tensor_ranks.tensor_parallel import cut_axis
from offbeat.trainers.sides import Side, keep_side
from offbeat.trainers.torch.optimizer import Optimizer
from offbeat.weight_sync.grid import ModelGrid
from tests.support.image_text_models import make
from tests.support.recipes import make_config

TOWER = ("model.vision_model.*", "model.connector.*")
GPU = {"device": "cuda", "gpus": 1.0}


def recipe(path: Path, encoder: dict[str, Any] | None = None, **trainer: Any) -> RunConfig:
    return make_config(
        path,
        environment={"name": "digits", "images": {"max_mib": 0.02}},
        trainer={"backend": "torch", "encoder": encoder or {"data_parallel": 1}, **trainer},
    )


def without_encoder(config: RunConfig) -> RunConfig:
    trainer = config.trainer.model_copy(update={"encoder": None})
    return config.model_copy(update={"trainer": trainer})


def saved(path: Path, model: PreTrainedModel | None = None) -> Path:
    (model or make("idefics3")).save_pretrained(path)
    return path


def held_in_a_step(side: Side) -> tuple[int, int, int]:
    """Bytes of weights, gradients and moments of one side, from the tensors of a step on it."""
    model = make("idefics3")
    keep_side(model, side)
    optimizer = Optimizer(model, OptimizerConfig())
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    gradients = sum(each.grad.nbytes for each in model.parameters() if each.grad is not None)
    optimizer.step(1.0, 1e-3)
    return weights, gradients, sum(each.nbytes for each in optimizer.moments().values())


def findings(config: RunConfig, gpu: int | None = None) -> tuple[Finding, Finding]:
    language, tower = check_encoder(config, gpu)
    return language, tower


@pytest.mark.parametrize("side", Side)
def test_each_side_is_said_with_the_bytes_that_a_step_on_it_takes(
    side: Side, tmp_path: Path
) -> None:
    found = dict(zip(Side, findings(recipe(saved(tmp_path))), strict=True))[side]
    weights, gradients, optimizer = held_in_a_step(side)
    assert found.level is Level.OK
    assert f"the largest holds {size(weights + gradients + optimizer)}: " in found.message
    assert f"weights {size(weights)}, gradients {size(gradients)}, " in found.message
    assert f"optimizer {size(optimizer)};" in found.message


def test_ranks_of_each_side_are_named(tmp_path: Path) -> None:
    language, tower = findings(recipe(saved(tmp_path), {"data_parallel": 2}, data_parallel=4))
    assert language.message.startswith("4 of the language model, rank 0 to 3; ")
    assert tower.message.startswith("2 of the vision tower, rank 4 to 5; ")


def test_the_tower_is_said_to_compute_all_pictures_of_a_chunk_or_as_many_as_are_allowed(
    tmp_path: Path,
) -> None:
    path = saved(tmp_path)
    _, whole = findings(recipe(path))
    language, cut = findings(recipe(path, {"max_tokens_per_microbatch": 64}))
    assert "comes on top, for all media of a chunk at once; " in whole.message
    assert "comes on top, for 64 tokens of media at once; " in cut.message
    assert language.message.endswith("comes on top")


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, "128 at most (32 prompts, by environment.images.max_mib)"),
        ({"groups_per_step": 3}, "12 at most (3 prompts, by environment.images.max_mib)"),
        ({"images": 0.025}, "256 at most (32 prompts, by environment.images.max_mib)"),
        ({"length": 4}, "96 at most (32 prompts, by generator.max_model_len)"),
    ],
    ids=["one picture", "few groups", "two pictures", "short prompts"],
)
def test_messages_of_a_chunk_are_bounded_by_the_pictures_and_the_length_of_its_prompts(
    given: dict[str, Any], most: str, tmp_path: Path
) -> None:
    """A picture has 12,288 bytes of values and four tokens; a prompt has more tokens than they."""
    config = make_config(
        saved(tmp_path),
        groups_per_step=given.get("groups_per_step", 32),
        environment={"name": "digits", "images": {"max_mib": given.get("images", 0.02)}},
        generator={"max_model_len": given.get("length", 128)},
        trainer={"encoder": {"data_parallel": 1}},
    )
    _, tower = findings(config)
    assert f" per 1,000 tokens of pictures, of which it has {most}: " in tower.message


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_ranks_that_divide_a_side_hold_half_of_its_matrices_and_the_rest_whole(
    backend: str, tmp_path: Path
) -> None:
    encoder = {"data_parallel": 1, "tensor_parallel": 2}
    given = recipe(saved(tmp_path), encoder, backend=backend, tensor_parallel=2)
    *language, tower = check_encoder(given, None)
    whole = sum(held_in_a_step(Side.TOWER))
    model = make("idefics3")
    plan = tower_plan(model, 2)
    matrices = sum(
        each.nbytes
        for name, each in model.named_parameters()
        if cut_axis(plan, name, each.ndim) is not None
    )
    assert tower.message.startswith(
        f"2 of the vision tower, rank 2 to 3; the largest holds {size(whole - 4 * matrices // 2)}"
    )
    if backend == "torch":
        assert language[0].message.startswith("2 of the language model, rank 0 to 1; ")
        assert not [*check_data_ranks(given), *PART.check(given, None)]


@pytest.mark.parametrize(
    ("family", "trainer", "problem"),
    [
        (
            "idefics3",
            {"encoder": {"tensor_parallel": 3}},
            "has 4 attention heads in its vision tower",
        ),
        ("idefics3", {"tensor_parallel": 4, "encoder": {}}, "has 2 key-value heads"),
        ("qwen3_vl", {"tensor_parallel": 2, "encoder": {}}, "its config has no base_model_tp_plan"),
    ],
)
def test_a_side_that_its_ranks_cannot_divide_is_an_error_before_the_start(
    family: str, trainer: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (found,) = check_encoder(recipe(saved(tmp_path, make(family)), **trainer), None)
    assert found.level is Level.ERROR
    assert problem in found.message
    assert "tensor_parallel to " in found.fix


def test_beside_the_megatron_trainer_the_tower_is_said_apart_from_the_layout(
    tmp_path: Path,
) -> None:
    axes = {"backend": "megatron", "data_parallel": 2, "tensor_parallel": 2}
    config = recipe(saved(tmp_path), {"data_parallel": 1}, **axes)
    (tower,) = check_encoder(config, None)
    assert tower.message.startswith("1 of the vision tower, rank 4; ")
    assert f"the largest holds {size(sum(held_in_a_step(Side.TOWER)))}: " in tower.message
    (layout,) = check_layout(config)
    assert layout.message.startswith("4 ranks of the language model; ")
    (whole,) = check_layout(without_encoder(config))
    assert whole.message.startswith("4 ranks; ")
    tower_bytes = sum(held_in_a_step(Side.TOWER))
    architecture = read_architecture(tmp_path)
    given = ModelGrid(tensor=2, data=2), "float32"
    largest = largest_rank(architecture, *given, sharded=False).total
    assert size(largest) in whole.message
    assert size(largest - tower_bytes) in layout.message


def test_a_frozen_tower_has_neither_gradients_nor_moments(tmp_path: Path) -> None:
    _, tower = findings(recipe(saved(tmp_path), freeze=TOWER))
    assert "gradients 0 bytes, optimizer 0 bytes" in tower.message


def test_a_tower_beyond_its_gpu_is_an_error_and_beyond_its_share_a_warning(tmp_path: Path) -> None:
    need = sum(held_in_a_step(Side.TOWER))
    config = recipe(saved(tmp_path), {"data_parallel": 1, "gpus": 0.5}, **GPU)
    level = {gpu: findings(config, gpu)[1] for gpu in (need - 1, need, 2 * need - 1, 2 * need)}
    assert level[need - 1].level is Level.ERROR
    assert level[need - 1].fix == (
        "Raise trainer.encoder.tensor_parallel, freeze more of it (trainer.freeze)."
    ), "trained weights are float32 in either type"
    assert level[need].level is level[2 * need - 1].level is Level.WARNING
    assert "0.5 of its GPU, which it reserves, is" in level[need].message
    assert level[need].fix.endswith("or raise trainer.encoder.gpus.")
    assert level[2 * need].level is Level.OK


@pytest.mark.parametrize(
    ("encoders", "advice"),
    [
        (1, "Raise trainer.encoder.data_parallel or trainer.encoder.tensor_parallel, freeze"),
        (2, "Raise trainer.encoder.tensor_parallel, freeze"),
    ],
)
def test_no_more_encoder_ranks_are_advised_than_there_are_language_ranks(
    encoders: int, advice: str, tmp_path: Path
) -> None:
    config = recipe(saved(tmp_path), {"data_parallel": encoders}, data_parallel=2, **GPU)
    _, tower = findings(config, 1)
    assert tower.level is Level.ERROR
    assert tower.fix.startswith(advice)


def test_bfloat16_is_advised_for_a_frozen_tower_which_it_halves(tmp_path: Path) -> None:
    _, tower = findings(recipe(saved(tmp_path), freeze=TOWER, **GPU), 1)
    assert ", set model.dtype=bfloat16, freeze more" in tower.fix


def test_a_language_model_beyond_its_gpu_is_an_error_of_its_own_key(tmp_path: Path) -> None:
    need = sum(held_in_a_step(Side.LANGUAGE))
    language, _ = findings(recipe(saved(tmp_path), **GPU), need - 1)
    assert language.level is Level.ERROR
    assert language.fix.startswith("Raise trainer.data_parallel or trainer.tensor_parallel, ")


def test_a_language_model_that_is_frozen_as_a_whole_is_an_error_before_the_start(
    tmp_path: Path,
) -> None:
    config = recipe(saved(tmp_path), freeze=("model.text_model.*", "lm_head.*"))
    (found,) = check_encoder(config, None)
    assert found.level is Level.ERROR
    assert "trains nothing of its language model" in found.message


def test_nothing_is_said_without_encoder_ranks_and_no_gpu_looked_for_on_the_cpu(
    tmp_path: Path,
) -> None:
    config = recipe(saved(tmp_path))
    without = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"encoder": None})}
    )
    assert not list(check_encoder(without, 1))
    assert gpu_bytes(without) is None
    assert gpu_bytes(config) is None
