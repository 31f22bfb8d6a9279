"""Plans of weight syncs from a config alone, and the command that prints them."""

import json
from math import prod
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.cli.main import app
from offbeat.planning.grid_text import describe_grid, parse_grid
from offbeat.planning.model_tensors import model_tensors
from offbeat.trainers.receiver_names import file_shapes
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.reshard.declared import placement
from offbeat.weight_sync.reshard.errors import LayoutRefused
from offbeat.weight_sync.reshard.grid import ModelGrid

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "tests" / "data" / "model_configs"
TINY = ROOT / "models" / "tiny-addition"
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
LORA = str(ROOT / "recipes" / "lora.yaml")
STUB = str(ROOT / "tests" / "ray" / "stub.yaml")


def plan_sync(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan-sync", *args])


@pytest.mark.parametrize(
    ("model", "published"),
    [("qwen3-30b-a3b", 30.5e9), ("deepseek-v3", 671e9), ("nemotron-3-ultra-550b", 550e9)],
)
def test_a_config_has_the_published_number_of_parameters(model: str, published: float) -> None:
    tensors, _ = model_tensors(CONFIGS / f"{model}.json", WirePolicy())
    assert sum(prod(each.shape) for each in tensors) == pytest.approx(published, rel=2e-3)


def test_the_tensors_are_those_of_the_model_s_files() -> None:
    tensors, _ = model_tensors(TINY, WirePolicy())
    assert {each.name: each.shape for each in tensors} == file_shapes(TINY)


def test_a_router_s_correction_travels_in_its_own_width() -> None:
    tensors, _ = model_tensors(CONFIGS / "deepseek-v3.json", WirePolicy())
    wide = {each.name.rpartition(".")[2] for each in tensors if each.itemsize == 4}
    assert wide == {"e_score_correction_bias"}


def test_a_vision_tower_is_whole_on_the_first_stage_whatever_its_tensors_are_called() -> None:
    tensors, sizes = model_tensors(ROOT / "models" / "tiny-digits", WirePolicy())
    grid = ModelGrid(tensor=2, pipeline=2)
    towers = [
        each for each in tensors if ".text_model." not in each.name and "lm_head" not in each.name
    ]
    assert {each.name for each in towers} == sizes.tower
    for each in towers:
        ((region, ranks),) = placement(each, sizes, grid).parts
        assert (region.shape, ranks) == (each.shape, (0, 1))


def test_a_recipe_s_plan_moves_the_model_once_to_its_machine_of_engines() -> None:
    done = plan_sync(QUICKSTART, "generator.engines=3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["bytes"]["ratio"] == 1
    assert found["bytes"]["over_network"] == found["bytes"]["model"]
    assert found["receivers"] == "3 ranks: data 3"


def test_a_megatron_recipe_of_vllm_engines_is_planned_by_its_own_sizes() -> None:
    args = ["trainer.backend=megatron", "trainer.tensor_parallel=2", "trainer.data_parallel=2"]
    args += ["generator.backend=vllm", "generator.vllm.tensor_parallel=2"]
    done = plan_sync(QUICKSTART, *args)
    assert done.exit_code == 0, done.output
    assert "senders    4 ranks: tensor 2, data 2, expert_tensor 1\n" in done.stdout
    assert "receivers  2 ranks: tensor 2, vocabulary_multiple 32\n" in done.stdout
    assert "no rule" not in done.stdout


def test_a_pair_of_layouts_is_planned_without_a_recipe() -> None:
    model = str(CONFIGS / "qwen3-30b-a3b.json")
    sides = ["--senders", "tensor=2,pipeline=2,stages=23+25", "--receivers", "tensor=4"]
    done = plan_sync("--model", model, *sides)
    assert done.exit_code == 0, done.output
    assert "61.06 GB in 18,867 tensors" in done.stdout
    assert "crosses it 1.00 times" in done.stdout


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "give a RECIPE, or all of --model, --senders and --receivers"),
        ([LORA], "trainer.lora sends the adapters alone. Set sync.adapter=merged"),
        ([STUB], "trainer.backend is stub, which has no weights"),
        (
            [QUICKSTART, "--senders", "tp=2"],
            "--senders: size is 'tp', expected one of tensor, pipeline",
        ),
        ([QUICKSTART, "--senders", "tensor=x"], "tensor is 'x', expected a positive number"),
        ([QUICKSTART, "--senders", "tensor=3"], "senders, model.layers.0."),
        ([QUICKSTART, "--receivers", "tensor=3"], "tensor is 3, expected a divisor of"),
        ([QUICKSTART, "--receivers", "tensor=3"], "receivers, model.layers.0."),
        ([QUICKSTART, "--model", "nowhere/config.json"], "nowhere/config.json: cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(args: list[str], sentence: str) -> None:
    done = plan_sync(*args)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_sizes_are_read_and_told_in_the_same_words() -> None:
    grid = parse_grid("tensor=8, pipeline=2, expert=16, expert_tensor=1, data=2, stages=10+9")
    assert grid == ModelGrid(8, 2, data=2, expert=16, expert_tensor=1, stages=(10, 9))
    said = "32 ranks: tensor 8, pipeline 2, data 2, expert 16, expert_tensor 1, stages 10+9"
    assert describe_grid(grid) == said


def test_stages_are_the_only_size_of_several_numbers() -> None:
    with pytest.raises(LayoutRefused, match=r"tensor is '2\+2', expected one number"):
        parse_grid("tensor=2+2")


def test_a_size_that_is_given_twice_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="tensor is given twice in 'tensor=8,tensor=4'"):
        parse_grid("tensor=8,tensor=4")
