"""Bugs of layouts that other systems have had, planted one at a time, each beside its clean twin.

Each case syncs a small model from several senders to a receiver, through plan, packing, selection and
transaction, and compares what arrived with the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pytest
import torch
from region_target import RegionTarget, metas, packed, receive
from torch import Tensor

from offbeat.weight_sync.buckets import plan_buckets
from offbeat.weight_sync.engine_layout import EngineLayout, find_needed_buckets
from offbeat.weight_sync.errors import ReplicasDiverged, TransferRefused, WeightsNotCovered
from offbeat.weight_sync.fingerprints import tensor_difference
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.recorder import record
from offbeat.weight_sync.region import Region, chunk_cuts

HIDDEN, EXPERTS = 4, 12
Model = Mapping[str, Tensor]
Shards = Sequence[Sequence[TensorRegion]]
"""What each sender holds, under the names and regions that it believes to be right."""


class Differs(AssertionError):
    """A tensor that arrived with other values."""


def sync(
    model: Model,
    shards: Shards,
    layout: EngineLayout | None = None,
    rank: int = 0,
    asked: int | None = None,
    held: Mapping[str, Sequence[Region]] | None = None,
) -> None:
    """Sync one receiver and compare what it holds with the model.

    Args:
        model: The true weights.
        shards: What each sender holds.
        layout: Regions that the receivers asked for; None: one that needs everything.
        rank: The receiver.
        asked: Rank by whose needs it selects its buckets; None: its own.
        held: Regions that it holds; None: those that it asked for.
    """
    layout = layout or EngineLayout(
        tuple(model), (tuple((name, Region.whole(tuple(t.shape))) for name, t in model.items()),)
    )
    named = [[(each.name, each.region) for each in of] for of in shards]
    plan = plan_buckets(metas(model), named, 64, layout.placement(metas(model)))
    manifest, chunks = packed(plan, shards)
    needs = layout.needs(rank)
    buckets = find_needed_buckets(1, manifest, layout.needs(rank if asked is None else asked))
    target = RegionTarget(model, held or needs)
    receive(target, manifest, chunks, buckets)
    for name, regions in needs.items():
        for region in regions:
            want, got = (each[name][region.slices] for each in (model, target.tensors))
            compare(name, want, got)


def compare(name: str, want: Tensor, got: Tensor) -> None:
    if found := tensor_difference(name, want, got):
        raise Differs(str(found))


def numbered(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Weights of which no two elements are equal."""
    found, start = dict[str, Tensor](), 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    return found


def expert(at: int) -> str:
    return f"layers.0.mlp.experts.{at}.up_proj.weight"


def of_experts() -> dict[str, Tensor]:
    return numbered({expert(at): (2, HIDDEN) for at in range(EXPERTS)})


def whole(model: Model, name: str, values: Tensor | None = None) -> TensorRegion:
    tensor = model[name] if values is None else values
    return TensorRegion(name, Region.whole(tuple(tensor.shape)), tensor)


def local_experts(model: Model, ranks: int, rank: int) -> list[Tensor]:
    """The experts of an expert rank, as a trainer has them: by place, without names."""
    each = EXPERTS // ranks
    return [model[expert(at)] for at in range(rank * each, (rank + 1) * each)]


# --- the bugs --------------------------------------------------------------------------------------


def metadata_of_rank_0_for_all(*, planted: bool) -> None:
    """The second receiver takes what the first one needs."""
    model = numbered({"w": (6, HIDDEN)})
    top, bottom = Region((0, 0), (3, HIDDEN)), Region((3, 0), (6, HIDDEN))
    layout = EngineLayout(("w",), ((("w", top),), (("w", bottom),)))
    sync(model, [[whole(model, "w")]], layout, rank=1, asked=0 if planted else 1)


def one_mesh_for_dense_and_expert(*, planted: bool) -> None:
    """An expert rank is taken for the data rank of the dense mesh, of which there are as many."""
    model, grid = of_experts(), ModelGrid(tensor=2, data=2, expert=2, expert_tensor=1)
    shards = list[list[TensorRegion]]()
    for rank in range(grid.ranks):
        (true,) = (at for at in range(grid.expert) if rank in grid.of_expert(at, 0, 0))
        held = local_experts(model, grid.expert, true)
        first = len(held) * (rank // grid.tensor if planted else true)
        shards.append([whole(model, expert(first + at), each) for at, each in enumerate(held)])
    sync(model, shards)


def names_sorted_as_strings(*, planted: bool) -> None:
    """The tenth expert is counted before the second."""
    model = of_experts()
    names = sorted(model) if planted else list(model)
    shards = [
        [
            whole(model, name, values)
            for name, values in zip(
                names[rank * 6 : rank * 6 + 6], local_experts(model, 2, rank), strict=True
            )
        ]
        for rank in range(2)
    ]
    sync(model, shards)


def balanced_instead_of_chunked_cuts(*, planted: bool) -> None:
    """Ten rows over four ranks are 3, 3, 3, 1; a balanced cut believes 3, 3, 2, 2."""
    model = numbered({"embed.weight": (10, HIDDEN)})
    shards = list[list[TensorRegion]]()
    for rank, values in enumerate(model["embed.weight"].chunk(4)):
        start = ([0, 3, 6, 8] if planted else chunk_cuts(10, 4))[rank]
        region = Region.at((start, 0), tuple(values.shape))
        shards.append([TensorRegion("embed.weight", region, values)])
    sync(model, shards)


def interleaved_w13(*, planted: bool) -> None:
    """Rows of gate and up alternate in the engine; they are written as two halves."""
    model = numbered({"gate_proj.weight": (4, HIDDEN), "up_proj.weight": (4, HIDDEN)})

    def alternate(w13: Tensor, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            w13[int(name.startswith("up")) :: 2].copy_(weight)

    def halves(w13: Tensor, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            w13.narrow(0, 4 * name.startswith("up"), 4).copy_(weight)

    loaded, written = torch.zeros(8, HIDDEN), torch.zeros(8, HIDDEN)
    alternate(loaded, model.items())
    believed = halves if planted else alternate
    specs = {name: (tuple(each.shape), each.dtype) for name, each in model.items()}
    recording = record(lambda weights: believed(written, weights), {"w13": written}, specs)
    for name, region in recording.regions():
        recording.write(name, region, model[name][region.slices], {"w13": written})
    compare("w13", loaded, written)


def stage_0_by_default(*, planted: bool) -> None:
    """Whatever is in no layer is looked for on the first of two stages, also what the last one holds."""
    model = numbered(
        {
            "layers.0.up_proj.weight": (2, HIDDEN),
            "layers.1.up_proj.weight": (2, HIDDEN),
            "value_head.weight": (1, HIDDEN),
        }
    )
    held_by = {0: ["layers.0.up_proj.weight"], 1: ["layers.1.up_proj.weight", "value_head.weight"]}

    def stage(name: str) -> int:
        layer = name.split(".")[1]
        return int(layer) if layer.isdigit() else 0 if planted else 1

    shards = [
        [whole(model, name) for name in names if stage(name) == rank]
        for rank, names in held_by.items()
    ]
    sync(model, shards)


def misc_beside_bulk(*, planted: bool) -> None:
    """A tensor that the loader computes with is left out of the fetch: another way is to bring it."""
    model = numbered({"w": (6, HIDDEN), "norm.weight": (HIDDEN,)})
    needs = {name: (Region.whole(tuple(each.shape)),) for name, each in model.items()}
    bulk = tuple(
        (name, region)
        for name, regions in needs.items()
        for region in regions
        if not planted or name == "w"
    )
    layout = EngineLayout(tuple(model), (bulk,))
    sync(model, [[whole(model, name) for name in model]], layout, held=needs)


@pytest.mark.parametrize(
    ("bug", "refused", "named"),
    [
        (metadata_of_rank_0_for_all, TransferRefused, r"tensor 'w'.* once"),
        (
            one_mesh_for_dense_and_expert,
            ReplicasDiverged,
            r"ranks 0 and 1 have different copies of layers\.0\.mlp\.experts\.0\.",
        ),
        (names_sorted_as_strings, Differs, r"experts\.2\.up_proj"),
        (
            balanced_instead_of_chunked_cuts,
            WeightsNotCovered,
            r"embed\.weight: .* of its elements are on none of 4",
        ),
        (interleaved_w13, Differs, "w13"),
        (stage_0_by_default, WeightsNotCovered, r"value_head\.weight: 4 of its elements"),
        (misc_beside_bulk, TransferRefused, r"tensor 'norm\.weight' is 0 elements"),
    ],
)
def test_a_planted_bug_is_caught_and_its_tensor_is_named(
    bug: Callable[..., None], refused: type[Exception], named: str
) -> None:
    with pytest.raises(refused, match=named):
        bug(planted=True)
    bug(planted=False)
