"""Placements by the names of tensors, for models and engines that do not exist yet. Pure.

In a live sync an engine rank itself reports the regions that it needs. A plan for a future cluster
has only names and shapes. So it declares how trainers and engines cut each tensor:

    rows        first axis over tensor-parallel ranks           gate, up
    queries     as rows, in whole attention heads               queries, MLA up-projections
    columns     second axis                                     output of attention, down
    heads       first axis in key-value heads, repeated if      keys, values
                ranks outnumber heads
    vocabulary  first axis, padded to equal numbers of rows     embedding, output head
    segments    first axis in segments, each cut separately     input of a state space layer
    whole       every rank                                      norms, routers, MLA down-projections
    no rule     every rank                                      all other tensors
    tower       every rank of the first stage, or first axis    the vision tower
                over encoder ranks, of which tensor ranks
                divide the matrices of layers first
    expert      one of these, for one expert, over expert and expert-tensor ranks

A tensor without a rule is whole on every receiver. That costs bytes but is never wrong, and its
bytes are counted separately. Such a tensor must be somewhere on the senders, so it is assumed to be
whole on each sender too.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Final, Literal

from offbeat.weight_sync.dtypes import SCALE_SUFFIX
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.region import (
    PlacedTensor,
    Placement,
    Ranks,
    Region,
    Shape,
    chunk_cuts,
    cut_part,
)

Cut = Literal["rows", "columns", "queries", "heads", "vocabulary", "segments", "whole"]

_RULES: Final[tuple[tuple[str, Cut], ...]] = (
    (r"(embed_tokens|embeddings|lm_head)\.weight", "vocabulary"),
    (r"[kv]_proj\.(weight|bias)", "heads"),
    (r"(q|q_b|kv_b)_proj\.(weight|bias)", "queries"),
    (r"(gate|up)_proj\.(weight|bias)", "rows"),
    (r"(o|down|out)_proj\.weight", "columns"),
    (r"mixer\.(in_proj|conv1d)\.(weight|bias)", "segments"),
    (r"mixer\.(A_log|D|dt_bias|norm\.weight)", "rows"),
    (r"(o|down|out)_proj\.bias", "whole"),
    (r"\w*norm\w*\.(weight|bias)", "whole"),
    (r"gate\.(weight|e_score_correction_bias)", "whole"),
    (r"(q_a_proj|kv_a_proj_with_mqa|fc\d+_latent_proj)\.(weight|bias)", "whole"),
)
_CUTS: Final[tuple[tuple[re.Pattern[str], Cut], ...]] = tuple(
    (re.compile(rf"(?:.*\.)?{pattern}"), cut) for pattern, cut in _RULES
)
_FOR_ANY_RANKS: Final = ("vocabulary", "whole")  # cuts that leave no number of ranks over
_ALONG: Final[dict[int | None, Cut]] = {None: "whole", 0: "rows", 1: "columns"}
_EXPERT: Final = re.compile(r".*\.experts\.(\d+)\.(?:gate|up|down)_proj\.weight")
_LAYER: Final = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_FIRST_STAGE: Final = re.compile(r"(?:.*\.)?(embed_tokens|embeddings)\.weight")
_LAST_STAGE: Final = re.compile(r"(?:.*\.)?(norm|norm_f|final_layernorm|lm_head)\.(weight|bias)")
_STATE_SPACE: Final = re.compile(r".*\.mixer\.(in_proj|conv1d|A_log|D|dt_bias|norm|out_proj)\b.*")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a model that placements depend on, in addition to the shapes of its tensors."""

    layers: int
    key_value_heads: int
    experts: int = 0
    tied: bool = False  # whether the output head is the embedding
    # Rows of a state space layer's input: gate, values, B, C, time steps
    segments: tuple[int, ...] = ()
    state_space_groups: int = 1
    attention_heads: int = 0  # 0: unknown
    tower: frozenset[str] = frozenset()  # names of the tensors of a vision tower
    # Axis that tensor ranks divide, by name, from the model's own plan; None: by rules of names
    tensor_axes: Mapping[str, int] | None = field(default=None, compare=False)
    # Axis that encoder ranks divide, by name; empty: no rule divides this tower
    tower_axes: Mapping[str, int] = field(default_factory=dict[str, int], compare=False)
    tower_heads: int = 0  # attention heads that tensor ranks share; 0: each rank computes all


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """A tensor of a model: its Hugging Face name, shape, and bytes of an element on the wire."""

    name: str
    shape: Shape
    itemsize: int


def place_tensors(
    tensors: Iterable[DeclaredTensor], sizes: ModelSizes, source: ModelGrid, target: ModelGrid
) -> list[PlacedTensor]:
    """Return every tensor with its placement on both sides, in the order of pipeline stages.

    Receivers get the tensors of state space layers whole, because engines rearrange them as they
    load.

    Raises:
        LayoutRefused: Parallel sizes of one side, which the error names, do not divide a tensor. Or
            a tensor is in no known stage. Or encoder ranks are among the receivers, or have no
            tower to hold.
    """
    if target.encoders:
        want = "0: engines hold the whole model"
        raise LayoutRefused("encoders", str(target.encoders), want).of("receivers")
    if target.own_plan:
        want = "0: engines divide the vocabulary, or have one tensor rank"
        raise LayoutRefused("own_plan", "1", want).of("receivers")
    if source.expert > 1 and not sizes.experts:
        want = "1 for a model without experts"
        raise LayoutRefused("expert", str(source.expert), want).of("senders")
    order = sorted(
        tensors, key=lambda each: _first_stage(each.name.removesuffix(SCALE_SUFFIX), sizes, source)
    )
    shapes = {each.name: each.shape for each in order}
    # Divided tensors come first, to refuse a million ranks before others are cut for each
    on_both = {
        each.name: (
            _on_side("senders", each, shapes, sizes, source),
            _on_side("receivers", each, shapes, sizes, target),
            classify(each.name.removesuffix(SCALE_SUFFIX)),
        )
        for each in sorted(order, key=lambda each: _find_cut(each.name) in _FOR_ANY_RANKS)
    }
    return [
        PlacedTensor(each.name, each.shape, each.itemsize, *on_both[each.name]) for each in order
    ]


def _first_stage(name: str, sizes: ModelSizes, source: ModelGrid) -> int:
    try:
        return _stages(name, sizes, source)[0]
    except LayoutRefused as refused:
        raise refused.of("senders") from refused


def _on_side(
    side: str,
    tensor: DeclaredTensor,
    shapes: Mapping[str, Shape],
    sizes: ModelSizes,
    grid: ModelGrid,
) -> Placement:
    rearranges = side == "receivers"
    matrix = tensor.name.removesuffix(SCALE_SUFFIX)
    try:
        if matrix == tensor.name:
            return placement(tensor, sizes, grid, rearranges=rearranges)
        scaled = DeclaredTensor(matrix, shapes[matrix], 1)
        of_matrix = placement(scaled, sizes, grid, rearranges=rearranges)
        return _of_scales(of_matrix, shapes[matrix])
    except LayoutRefused as refused:
        raise refused.of(f"{side}, {tensor.name}") from refused


@cache
def _of_scales(of_matrix: Placement, shape: Shape) -> Placement:
    """Place the scales of a quantized matrix with their blocks."""
    from offbeat.plugins.float8.precision import (  # noqa: PLC0415 -- other releases have no scales
        BLOCK,
        scale_region,
    )

    parts = list[tuple[Region, Ranks]]()
    for region, ranks in of_matrix.parts:
        scaled = scale_region(region, shape)
        if scaled is None:
            raise LayoutRefused("region", str(region), f"borders of blocks of {BLOCK} x {BLOCK}")
        parts.append((scaled, ranks))
    return Placement(tuple(parts))


def classify(name: str) -> str:
    """Return the class under which a tensor's bytes are counted."""
    if _EXPERT.fullmatch(name):
        return "experts"
    if _STATE_SPACE.fullmatch(name):
        return "state space"
    cut = _known_cut(name)
    return "no rule" if cut is None else "vocabulary" if cut == "vocabulary" else "dense"


def placement(
    tensor: DeclaredTensor, sizes: ModelSizes, grid: ModelGrid, *, rearranges: bool = False
) -> Placement:
    """Return which ranks of a grid hold which regions of a tensor.

    Args:
        tensor: The tensor.
        sizes: Sizes of its model.
        grid: The ranks.
        rearranges: Whether the ranks get tensors of state space layers whole.
    """
    stages = _stages(tensor.name, sizes, grid)
    is_whole = rearranges and _STATE_SPACE.fullmatch(tensor.name)
    cut = "whole" if is_whole or tensor.name in sizes.tower else _find_cut(tensor.name)
    expert = _EXPERT.fullmatch(tensor.name)
    if grid.encoders:
        _check_apart(sizes, grid)
        if tensor.name in sizes.tower:
            return _on_encoders(tensor.shape, _ALONG[sizes.tower_axes.get(tensor.name)], grid)
    if grid.own_plan:
        return _divide(tensor.shape, _find_divided_cut(tensor.name, cut, sizes), grid, sizes)
    if grid.shards > 1:
        return (
            _shard_expert(tensor.shape, grid, int(expert[1]), sizes.experts)
            if expert
            else _shard(tensor.shape, grid)
        )
    if expert:
        if sizes.experts % grid.expert:
            want = f"a divisor of {sizes.experts} experts"
            raise LayoutRefused("expert", str(grid.expert), want)
        rank = int(expert[1]) // (sizes.experts // grid.expert)
        return _of_expert(tensor.shape, cut, grid, rank, stages[0])
    return _dense(tensor.shape, cut, grid, stages, sizes)


def _find_divided_cut(name: str, cut: Cut, sizes: ModelSizes) -> Cut:
    """Return how tensor ranks cut a tensor, by the model's own plan if it has one."""
    if sizes.tensor_axes is None:
        return cut
    axis = sizes.tensor_axes.get(name)
    if axis == 0 and not _LAYER.fullmatch(name):  # outside of layers: embedding and output head
        return "vocabulary"
    return _ALONG[axis]


def _find_cut(name: str) -> Cut:
    return _known_cut(name) or "whole"


@cache
def _known_cut(name: str) -> Cut | None:
    """Return the cut of a tensor, or None if no rule matches its name."""
    return next((cut for pattern, cut in _CUTS if pattern.fullmatch(name)), None)


def _stages(name: str, sizes: ModelSizes, grid: ModelGrid) -> tuple[int, ...]:
    """Return the pipeline stages that hold a tensor."""
    if name in sizes.tower:
        return (0,)
    if found := _LAYER.fullmatch(name):
        return (grid.find_stage(int(found[1]), sizes.layers),)
    last = grid.pipeline - 1
    if _FIRST_STAGE.fullmatch(name):
        return (0, last) if sizes.tied and last else (0,)
    if _LAST_STAGE.fullmatch(name):
        return (last,)
    raise LayoutRefused(
        "tensor", name, "one of a layer, the embedding, the last norm or the output head"
    )


def _check_apart(sizes: ModelSizes, grid: ModelGrid) -> None:
    """Refuse encoder ranks for a model without a vision tower, or one that they do not divide."""
    if not sizes.tower:
        raise LayoutRefused("encoders", str(grid.encoders), "0 for a model without a vision tower")
    if grid.encoder_tensor > 1 and not sizes.tower_axes:
        want = "1 for a vision tower that no rule divides"
        raise LayoutRefused("encoder_tensor", str(grid.encoder_tensor), want)
    if sizes.tower_heads % grid.encoder_tensor:
        want = f"a divisor of {sizes.tower_heads} attention heads of the vision tower"
        raise LayoutRefused("encoder_tensor", str(grid.encoder_tensor), want)


@cache
def _shard(shape: Shape, grid: ModelGrid) -> Placement:
    return _cut_by_rows(shape, [grid.shard(at) for at in range(grid.shards)])


@cache
def _on_encoders(shape: Shape, cut: Cut, grid: ModelGrid) -> Placement:
    """Place a tower's tensor that tensor ranks divide first. Encoders share each part by rows."""
    ranks, parts = grid.encoder_tensor, list[tuple[Region, list[Ranks]]]()
    for at in range(ranks):
        outer = Region.whole(shape)
        if cut != "whole":
            axis = 1 if cut == "columns" else 0
            outer = cut_part(shape, axis, _equal_cuts("encoder_tensor", shape[axis], ranks), at)
        parts.append((outer, [grid.encoder(part, at) for part in range(grid.encoders)]))
    return _shard_parts(parts)


def _shard_parts(parts: Iterable[tuple[Region, Sequence[Ranks]]]) -> Placement:
    """Cut each region of a tensor by rows over its holders. Equal regions merge their holders."""
    merged = dict[Region, tuple[int, ...]]()
    for outer, holders in parts:
        for inner, ranks in _cut_by_rows(outer.shape, holders).parts:
            start = tuple(map(sum, zip(outer.start, inner.start, strict=True)))
            region = Region.at(start, inner.shape)
            merged[region] = tuple(sorted({*merged.get(region, ()), *ranks}))
    return Placement(tuple(merged.items()))


def _cut_by_rows(shape: Shape, holders: Sequence[Ranks]) -> Placement:
    """Cut the first axis as ``torch.chunk`` does. A tensor without axes is whole on all holders."""
    cuts = chunk_cuts(shape[0], len(holders)) if shape else []
    if not cuts:
        every = tuple(sorted(rank for ranks in holders for rank in ranks))
        return Placement(((Region.whole(shape), every),))
    parts = ((cut_part(shape, 0, cuts, at), ranks) for at, ranks in enumerate(holders))
    return Placement(tuple(each for each in parts if each[0].elements))


@cache
def _divide(shape: Shape, cut: Cut, grid: ModelGrid, sizes: ModelSizes) -> Placement:
    """Place a tensor that tensor ranks divide first. FSDP ranks shard each part."""
    if sizes.experts:
        raise LayoutRefused("own_plan", "1", "0 for a model with experts")
    parts = list[tuple[Region, list[Ranks]]]()
    for at in range(grid.tensor):
        holders = [grid.shard(part, at) for part in range(grid.shards)]
        parts += [(outer, holders) for outer in _regions(shape, cut, grid, sizes, at)]
    return _shard_parts(parts)


@cache
def _shard_expert(shape: Shape, grid: ModelGrid, expert: int, experts: int) -> Placement:
    """Place one expert of a trainer's layer, which is one tensor cut between experts."""
    rank = bisect_right(chunk_cuts(experts, grid.shards), expert) - 1
    return Placement(((Region.whole(shape), grid.shard(rank)),))


@cache
def _of_expert(shape: Shape, cut: Cut, grid: ModelGrid, expert_rank: int, stage: int) -> Placement:
    ranks = grid.expert_tensor_ranks
    axis = 1 if cut == "columns" else 0
    cuts = _equal_cuts("expert_tensor", shape[axis], ranks)
    return Placement(
        tuple(
            (cut_part(shape, axis, cuts, at), grid.of_expert(expert_rank, at, stage))
            for at in range(ranks)
        )
    )


@cache
def _dense(
    shape: Shape, cut: Cut, grid: ModelGrid, stages: tuple[int, ...], sizes: ModelSizes
) -> Placement:
    parts = list[tuple[Region, tuple[int, ...]]]()
    for at in range(grid.tensor):
        ranks = tuple(rank for stage in stages for rank in grid.dense(at, stage))
        parts += [(region, ranks) for region in _regions(shape, cut, grid, sizes, at)]
    merged = dict[Region, tuple[int, ...]]()
    for region, ranks in parts:
        merged[region] = tuple(sorted({*merged.get(region, ()), *ranks}))
    return Placement(tuple(merged.items()))


def _regions(shape: Shape, cut: Cut, grid: ModelGrid, sizes: ModelSizes, at: int) -> list[Region]:
    """Return the regions of one tensor-parallel rank."""
    if cut == "whole" or grid.tensor == 1:
        return [Region.whole(shape)]
    if cut == "vocabulary":
        rows = shape[0]
        block = grid.vocabulary_multiple * grid.tensor
        each = -(-rows // block) * grid.vocabulary_multiple
        region = cut_part(shape, 0, [min(rows, each * at), min(rows, each * (at + 1))], 0)
        return [region] if region.elements else []
    if cut == "queries" and sizes.attention_heads % grid.tensor:
        want = f"a divisor of {sizes.attention_heads} attention heads"
        raise LayoutRefused("tensor", str(grid.tensor), want)
    if cut == "heads":
        heads = sizes.key_value_heads
        if grid.own_plan and heads % grid.tensor:
            raise LayoutRefused("tensor", str(grid.tensor), f"a divisor of {heads} key-value heads")
        if max(heads, grid.tensor) % min(heads, grid.tensor):
            want = f"a multiple or a divisor of {heads} key-value heads"
            raise LayoutRefused("tensor", str(grid.tensor), want)
        if heads < grid.tensor:
            return [cut_part(shape, 0, chunk_cuts(shape[0], heads), at * heads // grid.tensor)]
    if cut == "segments":
        return _of_segments(shape, grid, sizes, at)
    axis = 1 if cut == "columns" else 0
    return [cut_part(shape, axis, _equal_cuts("tensor", shape[axis], grid.tensor), at)]


def _of_segments(shape: Shape, grid: ModelGrid, sizes: ModelSizes, at: int) -> list[Region]:
    segments: Sequence[int] = sizes.segments
    if sum(segments) != shape[0]:
        segments = segments[1:-1]  # the convolution has neither gate nor time steps
    if sum(segments) != shape[0]:
        want = f"rows of gate, values, B, C and time steps: {' + '.join(map(str, sizes.segments))}"
        raise LayoutRefused("state space layer", f"{shape[0]} rows", want)
    if sizes.state_space_groups % grid.tensor:
        want = f"a divisor of {sizes.state_space_groups} state space groups"
        raise LayoutRefused("tensor", str(grid.tensor), want)
    regions = list[Region]()
    for start, stop in pairwise((0, *accumulate(segments))):
        cuts = [start + cut for cut in _equal_cuts("tensor", stop - start, grid.tensor)]
        regions.append(cut_part(shape, 0, cuts, at))
    return regions


def _equal_cuts(what: str, length: int, parts: int) -> list[int]:
    if length % parts:
        raise LayoutRefused(what, str(parts), f"a divisor of {length}")
    return chunk_cuts(length, parts)
