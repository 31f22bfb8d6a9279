"""Plans of weight syncs whose senders have encoder ranks: who holds and sends what."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from offbeat.launch.commands.main import app
from offbeat.plugins.encoder_ranks.layout import Grid
from offbeat.plugins.encoder_ranks.sides import make_inventory
from offbeat.plugins.planning.grid_text import parse_grid
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.plugins.planning.sync_plan import SyncLayouts, make_plan
from offbeat.trainers.sides import Side
from offbeat.trainers.trainer_plugin import find_trainer
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid
from tests.support.image_text_models import make

ROOT = Path(__file__).resolve().parents[3]
IMAGES = str(ROOT / "recipes" / "quickstart-images.yaml")
TEXT_MODEL = str(ROOT / "models" / "tiny-addition")
EXPERTS = str(ROOT / "tests" / "data" / "model_configs" / "qwen3-30b-a3b.json")
FAMILIES = ["idefics3", "smolvlm", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"]
PIECE = 1 << 26


def plan_sync(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan-sync", *args])


def planned(**settings: int | str) -> dict[str, Any]:
    done = plan_sync(IMAGES, "--json", *(f"trainer.{key}={n}" for key, n in settings.items()))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def held_by_ranks(path: Path, family: str, grid: Grid) -> tuple[int, ...]:
    """Bytes in float32 of each rank, cut by torch's own rule out of the tensors of its side."""
    nbytes = [0] * grid.ranks
    for each in make_inventory(make(family)).weights:
        ranks = grid.list_ranks(each.side)
        parts = torch.chunk(torch.empty(each.shape, device="meta"), len(ranks))
        for rank, part in zip(ranks, parts, strict=False):
            nbytes[rank] += part.numel() * 4
    return tuple(nbytes)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tower_of_a_plan_has_the_tensors_that_an_encoder_rank_holds(
    family: str, tmp_path: Path
) -> None:
    make(family).save_pretrained(tmp_path)
    tensors, sizes = model_tensors(tmp_path, WirePolicy())
    inventory = make_inventory(make(family)).weights
    assert {each.name for each in tensors} == {each.name for each in inventory}
    assert sizes.tower == {each.name for each in inventory if each.side is Side.TOWER}


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl"])
@pytest.mark.parametrize(("lanes", "encoders"), [(1, 1), (2, 1), (2, 2), (6, 3)])
def test_ranks_hold_and_send_the_bytes_of_their_side(
    family: str, lanes: int, encoders: int, tmp_path: Path
) -> None:
    make(family).save_pretrained(tmp_path)
    senders = ModelGrid(shards=lanes, encoders=encoders)
    layouts = SyncLayouts(tmp_path, WirePolicy("float32"), senders, ModelGrid(), 8, PIECE)
    plan, report = make_plan(layouts)
    held = held_by_ranks(tmp_path, family, Grid(lanes, encoders=encoders))
    assert report.bytes.held == held
    assert report.bytes.sent == held  # each part has one holder, and one machine needs it
    assert report.bytes.busiest == max(held)
    tower = model_tensors(tmp_path, WirePolicy())[1].tower
    for piece, sender, _, _ in plan.transfers():
        assert (sender >= lanes) == (plan.tensors[piece.tensor].name in tower)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_ranks_that_divide_a_tower_hold_and_send_half_of_its_matrices(backend: str) -> None:
    whole = planned(**{"encoder.data_parallel": 1}, backend=backend)
    axes = {"tensor_parallel": 2, "encoder.tensor_parallel": 2}
    found = planned(**axes, backend=backend)
    assert found["encoders"] == 2
    assert found["bytes"]["model"] == whole["bytes"]["model"]
    first, second = found["bytes"]["held"][2:]
    assert first == second
    tower = whole["bytes"]["held"][1]
    # Of two layers: four matrices of attention and two of the MLP, and biases of what they make.
    matrices = 2 * (4 * 64 * 64 + 2 * 64 * 128 + 3 * 64 + 128)
    assert first == tower - 4 * matrices // 2
    assert sum(found["bytes"]["sent"]) == found["bytes"]["model"]  # of copies one is sent
    # The language model into its second rank; the tower into both of its own, and into rank 0.
    once = found["bytes"]["model"]
    assert found["gathered"] == (once + tower if backend == "torch" else 3 * once)


def test_whole_weights_are_gathered_side_by_side_and_the_tower_goes_to_rank_0() -> None:
    found = planned(**{"data_parallel": 2, "encoder.data_parallel": 2})
    held = found["bytes"]["held"]
    language, tower = sum(held[:2]), sum(held[2:])
    assert language + tower == found["bytes"]["model"]
    # Half a side into each of its two ranks; then the tower from an encoder rank into rank 0.
    assert found["gathered"] == 2 * (language // 2) + 2 * (tower // 2) + tower


def test_encoder_ranks_hold_the_tower_beside_any_layout_of_the_megatron_trainer() -> None:
    sizes = {"data_parallel": 2, "tensor_parallel": 2, "pipeline_parallel": 2}
    with_tower = planned(**sizes, backend="megatron")
    found = planned(**sizes, **{"encoder.data_parallel": 2}, backend="megatron")
    tower = sum(found["bytes"]["held"][8:])
    assert found["encoders"] == 2
    assert found["bytes"]["model"] == with_tower["bytes"]["model"]
    # Four ranks of the first stage, with two parts of each of its copies, held the tower whole.
    less = np.subtract(with_tower["bytes"]["held"], found["bytes"]["held"][:8])
    assert less.tolist() == [tower] * 4 + [0] * 4
    assert found["gathered"] == 9 * found["bytes"]["model"]  # every rank but the one that reads


def test_without_encoder_ranks_every_rank_holds_a_share_of_everything() -> None:
    found = planned(data_parallel=2)
    assert found["encoders"] == 0
    assert found["gathered"] == found["bytes"]["model"] == sum(found["bytes"]["held"])


def test_the_table_says_what_each_side_holds_and_sends() -> None:
    done = plan_sync(IMAGES, "trainer.data_parallel=2", "trainer.encoder.data_parallel=1")
    assert done.exit_code == 0, done.output
    assert "senders    3 ranks: shards 2, encoders 1\n" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["language", "0", "to", "1", "0.64", "0.64"] in rows
    assert ["tower", "2", "0.45", "0.45"] in rows
    assert "busiest sender 0.64 MB" in done.stdout
    assert "the tower into rank 0\n" in done.stdout


ENCODER = "trainer.encoder.data_parallel=1"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            [IMAGES, ENCODER, "--model", TEXT_MODEL],
            "trainer.encoder.data_parallel is 1, expected 0 for a model without a vision tower",
        ),
        ([IMAGES, "--senders", "tensor=2,encoders=2"], "expected a divisor of data = 1"),
        (
            [IMAGES, "--senders", "shards=2,data=2,encoders=1"],
            "encoders is 1 together with copies of shards",
        ),
        ([IMAGES, "--senders", "shards=3,encoders=2"], "expected a divisor of shards = 3"),
        (
            [IMAGES, "--senders", "encoders=1,encoder_tensor=3"],
            "encoder_tensor is 3, expected a divisor of 4 attention heads of the vision tower",
        ),
        ([IMAGES, "--senders", "encoder_tensor=2"], "encoder_tensor is 2 without encoders"),
        ([IMAGES, "--receivers", "encoders=1"], "receivers: encoders is 1, expected 0: engines"),
    ],
)
def test_what_encoder_ranks_do_not_go_with_is_refused_by_name(
    args: list[str], sentence: str
) -> None:
    done = plan_sync(*args)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_encoder_ranks_of_a_text_model_of_experts_are_refused() -> None:
    layouts = SyncLayouts(Path(EXPERTS), WirePolicy(), ModelGrid(encoders=1), ModelGrid(), 8, PIECE)
    with pytest.raises(LayoutRefused, match="encoders is 1, expected 0 for a model without"):
        make_plan(replace(layouts, trainer=find_trainer("megatron")))


@pytest.fixture(scope="module")
def pictured_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_vl_moe")
    make("qwen3_vl_moe").save_pretrained(path)
    return path


@pytest.mark.parametrize("senders", ["data=2,expert=2,encoders=1", "tensor=2,encoders=2,data=2"])
def test_experts_are_planned_beside_encoder_ranks_of_the_megatron_trainer(
    pictured_experts: Path, senders: str
) -> None:
    model = str(pictured_experts)
    done = plan_sync("--model", model, "--senders", senders, "--receivers", "data=1", "--json")
    assert done.exit_code == 0, done.output
    found, grid = json.loads(done.stdout), parse_grid(senders)
    tower = sum(found["bytes"]["held"][-grid.encoders :])
    (alone,) = make_plan(on_one_rank(pictured_experts))[1].bytes.held
    weights = make_inventory(make("qwen3_vl_moe"), has_experts=True).weights
    elements = sum(int(np.prod(each.shape)) for each in weights if each.side is Side.TOWER)
    assert tower == elements * 4  # in float32
    assert sum(found["bytes"]["sent"]) == found["bytes"]["model"] == alone


def on_one_rank(path: Path) -> SyncLayouts:
    return SyncLayouts(path, WirePolicy(), ModelGrid(), ModelGrid(), 8, PIECE)


@pytest.mark.parametrize(
    "senders",
    [
        ModelGrid(shards=2, encoders=1),
        ModelGrid(encoders=1),
        ModelGrid(shards=2, encoders=1, encoder_tensor=2),
    ],
    ids=["shards", "one rank of each", "a divided tower"],
)
def test_experts_beside_encoder_ranks_of_the_torch_trainer_are_refused(
    pictured_experts: Path, senders: ModelGrid
) -> None:
    layouts = replace(on_one_rank(pictured_experts), senders=senders)
    with pytest.raises(LayoutRefused, match="with experts and the torch trainer") as refused:
        make_plan(layouts)
    assert (refused.value.where, refused.value.what) == ("senders", "encoders")


MEGATRON = "trainer.backend=megatron"
EVERYWHERE, SIDES = "the model into each other rank", "each side into the ranks that hold it"


@pytest.mark.parametrize(
    ("args", "into"),
    [
        ([ENCODER], SIDES),
        ([MEGATRON, ENCODER], EVERYWHERE),
        (["--senders", "tensor=2,encoders=1"], EVERYWHERE),
        ([MEGATRON, "--senders", "shards=2,encoders=1"], SIDES),
        ([MEGATRON, "--senders", "encoders=1"], EVERYWHERE),
        (["--senders", "encoders=1"], SIDES),
    ],
)
def test_weights_through_rank_0_are_gathered_as_the_trainer_of_the_layout_does(
    args: list[str], into: str
) -> None:
    """Where both trainers have such ranks it is the recipe's."""
    done = plan_sync(IMAGES, *args)
    assert done.exit_code == 0, done.output
    (line,) = [each for each in done.stdout.splitlines() if "into trainer ranks" in each]
    assert into in line
    (model,) = [each for each in done.stdout.splitlines() if "into receivers" in each]
    ranks = int(re.findall(r"senders +(\d+) ranks", done.stdout)[0])
    gathered, whole = (float(re.findall(r"([\d.,]+) MB", each)[0]) for each in (line, model))
    if into is EVERYWHERE:
        assert gathered == pytest.approx(whole * (ranks - 1), rel=0.01)
    else:
        assert gathered < whole * (ranks - 1)


def test_layouts_without_a_recipe_are_gathered_as_their_trainer_does() -> None:
    model = str(ROOT / "models" / "tiny-digits")
    for senders, into in (("pipeline=2,encoders=1", EVERYWHERE), ("shards=2,encoders=1", SIDES)):
        done = plan_sync("--model", model, "--senders", senders, "--receivers", "data=1")
        assert into in done.stdout, done.output
