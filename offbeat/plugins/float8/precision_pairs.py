"""Refusals of tensors that cannot be sent in the format that engines hold. Pure.

A quantized matrix has a scale for each block of 128 x 128. vLLM refuses parts of matrices that end
inside a block, be they cut over its ranks or joined with others; a trainer's rank that holds part of
a block does not know its scale.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from offbeat.plugins.float8.precision import (
    BLOCK,
    FP8_BLOCK,
    Refusal,
    RefusedPair,
    conversion_problem,
    is_quantized,
    scale_region,
)
from offbeat.weight_sync.region import Shape, chunk_cuts, part_of

_PLAIN: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_FUSED_EXPERTS: Final = re.compile(r".*\.experts\.(?:gate_up|up|down)_proj")
_EXPERT: Final = re.compile(r".*\.experts\.\d+\..*")
_HEADS: Final = re.compile(r".*\.[kv]_proj\.weight")
_BY_ROWS: Final = re.compile(r".*\.(?:q|k|v|q_b|kv_b|gate|up)_proj\.weight")
_BY_COLUMNS: Final = re.compile(r".*\.(?:o|down)_proj\.weight")
# Matrices that vLLM joins with the next one: each of them has to end with a block
_JOINED: Final = re.compile(r".*\.(?:q|k|gate|q_a)_proj\.weight")


@dataclass(frozen=True, slots=True)
class MatrixCuts:
    """Ranks of one side that matrices are cut over."""

    tensor: int = 1
    expert: int = 1  # of the matrices of an expert
    key_value_heads: int = 0  # ranks that share a head have the same rows; 0: each has its own
    shards: int = 1  # of the rows that a tensor rank has, as torch.chunk cuts them


def refused_pairs(
    tensors: Iterable[tuple[str, Shape, str]],
    trainer: str,
    scheme: str,
    *,
    engine: MatrixCuts,
    senders: MatrixCuts | None = None,
) -> tuple[RefusedPair, ...]:
    """Return every tensor of a model that cannot be sent to engines in their format.

    Args:
        tensors: Name, shape and dtype of each tensor of the model's files.
        trainer: Dtype in which the trainer holds weights.
        scheme: How the engines' weights are quantized, as ``scheme_of`` names it.
        engine: How an engine cuts matrices.
        senders: How the trainer cuts them, if each rank sends what it holds.
    """
    pairs = list[RefusedPair]()
    for name, shape, stored in tensors:
        held = trainer if stored in _PLAIN else stored
        found = _problems(name, shape, held, scheme, engine, senders)
        pairs += [
            RefusedPair(name, held, scheme or trainer, problem, refusal)
            for problem, refusal in islice(found, 1)
        ]
    return tuple(pairs)


def _problems(
    name: str,
    shape: Shape,
    held: str,
    scheme: str,
    engine: MatrixCuts,
    senders: MatrixCuts | None,
) -> Iterator[tuple[str, Refusal]]:
    """Yield what refuses a tensor, the most basic first."""
    if held not in _PLAIN:
        problem = "is not converted: the trainer takes no steps in the format of these files"
        yield problem, Refusal.FORMAT
    if scheme and _FUSED_EXPERTS.fullmatch(name):
        problem = "is not converted where the files hold all experts of a layer as one tensor"
        yield problem, Refusal.FORMAT
    if not scheme or not is_quantized(name, shape):
        return
    if scheme != FP8_BLOCK:
        yield "is not converted", Refusal.FORMAT
    if problem := conversion_problem(held):
        yield problem, Refusal.FORMAT
    if cut := _cut_block(name, shape, engine):
        yield f"would cut a block in the engine: {cut}", Refusal.ENGINE_CUT
    if _JOINED.fullmatch(name) and shape[0] % BLOCK:
        cut = f"{shape[0]} rows, which vLLM joins with others"
        yield f"would cut a block in the engine: {cut}", Refusal.ENGINE_CUT
    if senders is not None and (cut := _cut_block(name, shape, senders)):
        yield f"would cut a block in the trainer: {cut}", Refusal.TRAINER_CUT


def _cut_block(name: str, shape: Shape, cuts: MatrixCuts) -> str:
    """Return which cut ends inside a block; empty if none does."""
    is_expert = bool(_EXPERT.fullmatch(name))
    ranks = cuts.expert if is_expert else cuts.tensor
    if cuts.key_value_heads and _HEADS.fullmatch(name):
        ranks = min(ranks, cuts.key_value_heads)
    for pattern, axis, what in ((_BY_ROWS, 0, "rows"), (_BY_COLUMNS, 1, "columns")):
        if ranks > 1 and pattern.fullmatch(name) and shape[axis] // ranks % BLOCK:
            return f"{shape[axis]} {what} over {ranks} ranks"
    if cuts.shards > 1 and not is_expert:  # experts of a layer are one tensor, cut between experts
        mine = shape[0] // ranks if _BY_ROWS.fullmatch(name) else shape[0], shape[1]
        rows = chunk_cuts(mine[0], cuts.shards)
        parts = (part_of(mine, 0, rows, at) for at in range(cuts.shards))
        if any(part.elements and scale_region(part, mine) is None for part in parts):
            return f"{mine[0]} rows over {cuts.shards} ranks"
    return ""
