"""Plans of weight syncs from a config alone, and the command that prints them."""

import json
from math import prod
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.launch.commands.main import app
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.grid_text import describe_grid, parse_grid
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.trainers.receiver_names import file_shapes
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.engine_layout import EngineLayout, write_layout
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import Region, chunk_cuts, cut_part

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "tests" / "data" / "model_configs"
TINY = ROOT / "models" / "tiny-addition"
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")
PICTURES = str(ROOT / "recipes" / "quickstart-images.yaml")
LORA = str(ROOT / "recipes" / "lora.yaml")
STUB = str(ROOT / "tests" / "support" / "stub.yaml")


def plan_sync(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan-sync", *args])


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("qwen3-30b-a3b", 30.5e9),
        ("qwen3-235b-a22b", 235e9),
        ("deepseek-v3", 671e9),
        ("nemotron-3-ultra-550b", 550e9),
    ],
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
    assert found["apart"] == 3 * found["bytes"]["model"]


def test_what_receivers_on_one_machine_fetch_apart_is_said() -> None:
    said = "sync.transport=reshard sends it to each receiver apart: "
    beside, alone = (
        plan_sync(QUICKSTART, "generator.engines=3", *machines).stdout
        for machines in ((), ("--per-machine", "1"))
    )
    (line,) = (each for each in beside.splitlines() if each.startswith(said))
    (moved,) = (each for each in alone.splitlines() if each.startswith("in all"))
    assert line.removeprefix(said).split()[0] == moved.split()[2]
    assert said not in alone


def test_a_wire_between_devices_is_planned_with_the_device_memory_that_it_takes() -> None:
    own = [
        f"{each}.{key}" for each in ("trainer", "generator") for key in ("device=cuda", "gpus=1")
    ]
    done = plan_sync(QUICKSTART, "sync.transport=reshard", "sync.wire=nccl", *own)
    assert done.exit_code == 0, done.output
    moved = next(line.split()[2] for line in done.stdout.splitlines() if line.startswith("in all"))
    assert (
        f"sync.wire nccl: in addition in device memory, up to {moved} MB on a sender" in done.stdout
    )
    assert "sync.wire" not in plan_sync(QUICKSTART, "sync.transport=reshard").stdout


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
        ([], "give a RECIPE, or all of --model, --senders and --receivers\n"),
        (
            ["--model", PICTURES, "--senders", "", "--receivers", ""],
            "--senders and --receivers without a size: one rank is tensor=1",
        ),
        (
            ["--model", PICTURES, "--senders", "tensor=1", "--receivers", ""],
            "; --receivers without a size: one rank is tensor=1",
        ),
        ([LORA], "trainer.lora sends only the adapters. Set sync.adapter=merged"),
        ([STUB], "trainer.backend is stub, which has no weights"),
        (
            [QUICKSTART, "--senders", "tp=2"],
            "--senders: size is 'tp', expected one of tensor, pipeline",
        ),
        ([QUICKSTART, "--senders", "tensor=x"], "tensor is 'x', expected a positive number"),
        ([QUICKSTART, "--senders", "tensor=3"], "senders, model.layers.0."),
        ([QUICKSTART, "--receivers", "tensor=3"], "tensor is 3, expected a divisor of"),
        ([QUICKSTART, "--receivers", "tensor=3"], "receivers, model.layers.0."),
        (
            [QUICKSTART, "--senders", "tensor=2,own_plan=7"],
            "--senders: own_plan is 7, expected 0 or 1",
        ),
        (
            [QUICKSTART, "--senders", "tensor=2,own_plan=1,vocabulary_multiple=64"],
            "--senders: vocabulary_multiple is 64, expected 1 together with own_plan",
        ),
        ([QUICKSTART, "--senders", "tensor=0"], "tensor is '0', expected a positive number"),
        ([QUICKSTART, "--senders", "data=-1"], "data is '-1', expected a positive number"),
        ([QUICKSTART, "--senders", "data=9999999999"], "data is '9999999999', expected a positive"),
        (
            [QUICKSTART, "--senders", "data=2000000"],
            "--senders: their product is 2000000 ranks, expected at most 1048576",
        ),
        (
            [QUICKSTART, "--senders", "data=4,expert=4"],
            "senders: expert is 4, expected 1 for a model without experts",
        ),
        (
            [QUICKSTART, "--receivers", "tensor=2,own_plan=1"],
            "receivers: own_plan is 1, expected 0: engines divide the vocabulary",
        ),
        (
            [QUICKSTART, "trainer.tensor_parallel=3"],
            "attention heads, which trainer.tensor_parallel=3 does not divide",
        ),
        (
            [QUICKSTART, "trainer.backend=megatron", "trainer.tensor_parallel=3"],
            "trainer.tensor_parallel is 3, expected a divisor of",
        ),
        (
            [QUICKSTART, "trainer.backend=megatron", "trainer.tensor_parallel=4"],
            "trainer.tensor_parallel is 4, expected at most the 2 key-value heads",
        ),
        (
            [QUICKSTART, "generator.backend=vllm", "generator.vllm.tensor_parallel=3"],
            "generator.vllm.tensor_parallel is 3, expected a divisor of",
        ),
        (
            [QUICKSTART, "--senders", "tensor=3,own_plan=1"],
            "attention heads, which --senders tensor=3 does not divide. Set --senders tensor to one of",
        ),
        (
            [PICTURES, "--senders", "tensor=2,own_plan=1"],
            "Set --senders tensor to 1, or give the tower separate ranks: --senders encoders",
        ),
        ([QUICKSTART, "--model", "nowhere/config.json"], "nowhere/config.json: cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(args: list[str], sentence: str) -> None:
    done = plan_sync(*args)
    assert done.exit_code == 2
    assert sentence in done.stderr
    if "--senders" in args:
        assert "trainer." not in done.stderr  # a key that the reader has not used


def test_tensor_ranks_of_the_torch_trainer_are_planned_by_the_plan_of_the_model(
    tmp_path: Path,
) -> None:
    """A plan that divides attention alone leaves the feed-forward matrices whole on every rank."""
    config = json.loads((TINY / "config.json").read_text())
    attention = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
        f"layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"
    }
    config["base_model_tp_plan"] = {**attention, "layers.*.self_attn.o_proj": "rowwise"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors, sizes = model_tensors(tmp_path, WirePolicy(), tensor_ranks=2)
    grid = parse_grid("tensor=2,own_plan=1")
    held = {
        each.name: [region.shape for region in placement(each, sizes, grid).at(1)]
        for each in tensors
    }
    layer, shapes = "model.layers.0.", {each.name: each.shape for each in tensors}
    for name, shape in shapes.items():
        if name.startswith(f"{layer}mlp.") or "norm" in name:
            assert held[name] == [shape]
        if "embed" in name or "lm_head" in name:
            assert held[name] == [(shape[0] // 2, shape[1])]
    rows, columns = shapes[f"{layer}self_attn.o_proj.weight"]
    assert held[f"{layer}self_attn.o_proj.weight"] == [(rows, columns // 2)]
    rows, columns = shapes[f"{layer}self_attn.k_proj.weight"]
    assert held[f"{layer}self_attn.k_proj.weight"] == [(rows // 2, columns)]


def test_a_model_that_tensor_ranks_cannot_divide_has_no_plan_for_them() -> None:
    model = str(CONFIGS / "qwen3-30b-a3b.json")
    sides = ["--senders", "tensor=2,own_plan=1", "--receivers", "tensor=2"]
    done = plan_sync("--model", model, *sides)
    assert done.exit_code == 2
    assert "cannot be divided over tensor ranks: its config has num_experts=128" in done.stderr
    assert "Set --senders tensor to 1" in done.stderr


def recording(path: Path, ranks: int) -> Path:
    """The layout of engines that load columns of embeddings, and everything else whole."""
    tensors, _ = model_tensors(TINY, WirePolicy())
    cut = {each.name: chunk_cuts(each.shape[-1], ranks) for each in tensors}
    layout = EngineLayout(
        tuple(each.name for each in tensors),
        tuple(
            tuple(
                (
                    each.name,
                    cut_part(each.shape, 1, cut[each.name], rank)
                    if "embed_tokens" in each.name
                    else Region.whole(each.shape),
                )
                for each in tensors
            )
            for rank in range(ranks)
        ),
    )
    write_layout(layout, path)
    return path


def test_engines_that_were_recorded_are_planned_as_their_loaders_read(tmp_path: Path) -> None:
    done = plan_sync(QUICKSTART, "generator.engines=3", "--recorded", str(recording(tmp_path, 2)))
    assert done.exit_code == 0, done.output
    assert "receivers  6 ranks: tensor 2, data 3\n" in done.stdout
    assert "receivers as their loaders were recorded, senders declared\n" in done.stdout
    tensors, _ = model_tensors(TINY, WirePolicy())
    embedding = next(prod(each.shape) * 4 for each in tensors if "embed_tokens" in each.name)
    found = json.loads(
        plan_sync(QUICKSTART, "--recorded", str(tmp_path), "--per-machine", "1", "--json").stdout
    )
    model = found["bytes"]["model"]
    assert found["bytes"]["over_network"] == 2 * (model - embedding) + embedding


def test_a_recording_of_another_model_or_none_is_refused(tmp_path: Path) -> None:
    done = plan_sync(QUICKSTART, "--recorded", str(tmp_path))
    assert done.exit_code == 2
    assert "engine_layout.msgpack holds no recorded layout" in done.stderr
    model = str(CONFIGS / "qwen3-30b-a3b.json")
    sides = ["--senders", "tensor=2", "--receivers", "tensor=2"]
    done = plan_sync("--model", model, *sides, "--recorded", str(recording(tmp_path, 2)))
    assert "--recorded gives the receivers: leave --receivers out" in done.stderr
    done = plan_sync(QUICKSTART, "--model", model, "--recorded", str(tmp_path))
    assert done.exit_code == 2
    assert "the recorded engine loads a different model, without model.layers." in done.stderr


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
