"""The format ``fp8_block``: its matrices, their scales, and its place in a model's config. Pure.

``fp8_block`` is the form of DeepSeek-V3's files, which vLLM loads. A matrix ``X.weight`` [N, K] is
in float8_e4m3fn. ``X.weight_scale_inv`` [ceil(N / 128), ceil(K / 128)] in float32 is the factor of
each block of 128 x 128. Other formats of engines are refused by name before anything starts.

Also defines refusals of tensors that cannot be sent in the engines' format. Pure.

A quantized matrix has a scale for each block of 128 x 128. If vLLM cuts a matrix over its ranks or
joins it with others, it refuses parts that end inside a block. A trainer rank that holds only part
of a block cannot know the block's scale.
"""

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, cast

from offbeat.messages.failures import OffbeatError
from offbeat.weight_sync.dtypes import SCALE_SUFFIX, WirePolicy
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.region import Region, Shape, chunk_cuts, cut_part

FP8: Final = "float8_e4m3fn"
FP8_BLOCK: Final = "fp8_block"
BLOCK: Final = 128  # rows and columns that share a scale
_QUANTIZABLE: Final = frozenset({"float32", "bfloat16", "float16"})
_NAMED: Final = 3  # tensor names listed of each kind of refusal

# Linear layers of a decoder in engines. Unlisted matrices stay unchanged: routers, because
# rounding changes their decisions, embeddings, heads, convolutions, and untested layers.
_MATRIX: Final = re.compile(
    r"(?:.*\.)?layers\.\d+\.(?:.*\.)?"
    r"(?:(?:q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa)\.weight"
)
_TOWER: Final = re.compile(r"(?:^|\.)(?:vision|visual|audio)[^.]*\.")


class UnalignedBlocks(OffbeatError):
    """Regions cut blocks of 128 x 128 in two, so no single rank can compute their scale.

    Fix: set ``sync.transport`` to ``object_store``.
    """

    regions: tuple[str, ...]  # as in name[0:64, 0:64]

    def __str__(self) -> str:
        return (
            f"{len(self.regions)} regions end inside a block of {BLOCK} x {BLOCK} elements, whose scale no "
            f"rank knows alone: {', '.join(self.regions[:_NAMED])}. Set sync.transport to "
            "object_store, or choose parallel sizes of the trainer that cut between blocks"
        )


class Refusal(enum.StrEnum):
    """Reason why a tensor cannot be sent."""

    FORMAT = "format"  # nothing converts it
    ENGINE_CUT = "engine cut"  # a part of it in the engine ends inside a block
    TRAINER_CUT = "trainer cut"  # a part of it in the trainer does


class RefusedPair(NamedTuple):
    """A tensor that cannot reach an engine in the engine's format."""

    name: str
    trainer: str  # format
    engine: str  # format
    problem: str
    refusal: Refusal = Refusal.FORMAT


class PrecisionRefused(OffbeatError):
    """Trainer and engine have incompatible formats for the same tensors.

    Fix: change the formats that the message names; ``offbeat check`` finds them.
    """

    pairs: tuple[RefusedPair, ...]

    def __str__(self) -> str:
        kinds = dict[tuple[str, str, str], list[str]]()
        for each in self.pairs:
            kinds.setdefault((each.trainer, each.engine, each.problem), []).append(each.name)
        said = [
            f"{trainer} to {engine} {problem}: {_list_names(names)}"
            for (trainer, engine, problem), names in kinds.items()
        ]
        return f"{len(self.pairs)} tensors cannot be sent: {'; '.join(said)}"


def is_quantized(name: str, shape: Shape) -> bool:
    """Return whether ``fp8_block`` quantizes the tensor with this Hugging Face name."""
    return len(shape) == 2 and bool(_MATRIX.fullmatch(name)) and not _TOWER.search(name)  # noqa: PLR2004


def find_unquantized_modules(tensors: Iterable[tuple[str, Shape]]) -> list[str]:
    """Return the modules with a matrix that ``fp8_block`` leaves unchanged, sorted."""
    return sorted(
        name.removesuffix(".weight")
        for name, shape in tensors
        if name.endswith(".weight") and len(shape) == 2 and not is_quantized(name, shape)  # noqa: PLR2004
    )


def scale_shape(shape: Shape) -> Shape:
    """Return the shape of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def scale_region(region: Region, shape: Shape) -> Region | None:
    """Return the scales of a region of a matrix, or None if the region cuts a block."""
    ends = zip(region.stop, shape, strict=True)
    if any(start % BLOCK for start in region.start) or any(
        stop % BLOCK and stop != size for stop, size in ends
    ):
        return None
    start = tuple(each // BLOCK for each in region.start)
    return Region(start, scale_shape(region.stop))


def list_quantized_metas(
    metas: Iterable[tuple[str, Shape, str]], policy: WirePolicy
) -> Iterator[TensorMeta]:
    """Yield every tensor of a release in its wire format: a quantized matrix, then its scales.

    Raises:
        PrecisionRefused: For all tensors together that cannot have this format.
    """
    refused, found = list[RefusedPair](), list[TensorMeta]()
    for name, shape, dtype in metas:
        if not is_quantized(name, shape) or dtype == FP8:
            found.append(TensorMeta(name, shape, policy(name, dtype), dtype))
        elif problem := conversion_problem(dtype):
            refused.append(RefusedPair(name, dtype, FP8_BLOCK, problem))
        else:
            found.append(TensorMeta(name, shape, FP8, dtype))
            scales = name + SCALE_SUFFIX
            found.append(TensorMeta(scales, scale_shape(shape), "float32", "float32"))
    if refused:
        raise PrecisionRefused(tuple(refused))
    yield from found


def find_scheme(quantization: object) -> str:
    """Return the name of a model config's ``quantization_config``.

    Returns:
        An empty string without one, ``fp8_block``, or a description of a scheme that offbeat cannot
        produce.
    """
    if not quantization:
        return ""
    if not isinstance(quantization, Mapping):
        return f"quantization_config={quantization!r}"
    settings = dict(cast("Mapping[str, object]", quantization))
    method = str(settings.get("quant_method") or "unnamed quantization")
    if method != "fp8":
        return method
    blocks, form = settings.get("weight_block_size"), settings.get("fmt") or "e4m3"
    if not isinstance(blocks, list | tuple):
        return "fp8 with a scale per tensor"
    sizes = [str(size) for size in cast("Sequence[object]", blocks)]
    activations = settings.get("activation_scheme") or "dynamic"
    if sizes == [str(BLOCK)] * 2 and form == "e4m3" and activations == "dynamic":
        return FP8_BLOCK
    return f"fp8 ({form}) in blocks of {'x'.join(sizes)}, {activations} activations"


def quantization_config(tensors: Iterable[tuple[str, Shape]]) -> dict[str, object]:
    """Return the ``quantization_config`` of an engine that loads ``fp8_block`` weights."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": find_unquantized_modules(tensors),
    }


def conversion_problem(dtype: str) -> str:
    """Return why a matrix of this dtype cannot be quantized, or an empty string if it can."""
    return "" if dtype in _QUANTIZABLE else "is not converted"


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


_PLAIN: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_FUSED_EXPERTS: Final = re.compile(r".*\.experts\.(?:gate_up|up|down)_proj")
_EXPERT: Final = re.compile(r".*\.experts\.\d+\..*")
_HEADS: Final = re.compile(r".*\.[kv]_proj\.weight")
_BY_ROWS: Final = re.compile(r".*\.(?:q|k|v|q_b|kv_b|gate|up)_proj\.weight")
_BY_COLUMNS: Final = re.compile(r".*\.(?:o|down)_proj\.weight")
# Matrices that vLLM joins with the next one. Each must end with a block
_JOINED: Final = re.compile(r".*\.(?:q|k|gate|q_a)_proj\.weight")


@dataclass(frozen=True, slots=True)
class MatrixCuts:
    """Numbers of ranks that share the matrices of one side."""

    tensor: int = 1
    expert: int = 1  # of the matrices of an expert
    key_value_heads: int = 0  # ranks that share a head have the same rows; 0: each has its own
    shards: int = 1  # of the rows of a tensor rank, as torch.chunk cuts them


def find_refused_pairs(
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
        scheme: Quantization of the engines' weights, named as by ``find_scheme``.
        engine: Cuts of matrices in an engine.
        senders: Cuts of matrices in the trainer, if each rank sends its own part.
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
    """Yield the reasons to refuse a tensor, the most basic first."""
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
    """Return the cut that ends inside a block, or an empty string."""
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
        parts = (cut_part(mine, 0, rows, at) for at in range(cuts.shards))
        if any(part.elements and scale_region(part, mine) is None for part in parts):
            return f"{mine[0]} rows over {cuts.shards} ranks"
    return ""
