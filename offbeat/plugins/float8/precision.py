"""The format ``fp8_block``: which matrices have it, their scales, and its place in a model's config. Pure.

``fp8_block`` is the form of DeepSeek-V3's files, which vLLM loads: a matrix ``X.weight`` [N, K] in
float8_e4m3fn, and ``X.weight_scale_inv`` [ceil(N / 128), ceil(K / 128)] in float32, the factor of
each block of 128 x 128. Other formats of engines are refused by name before anything starts.
"""

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, cast

from offbeat.messages.failures import OffbeatError
from offbeat.weight_sync.dtypes import SCALE_SUFFIX, WirePolicy
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.region import Region, Shape

FP8: Final = "float8_e4m3fn"
FP8_BLOCK: Final = "fp8_block"
BLOCK: Final = 128  # rows and columns that share a scale
_QUANTIZABLE: Final = frozenset({"float32", "bfloat16", "float16"})
_NAMED: Final = 3  # tensor names listed of each kind of refusal

# What engines compute as linear layers of a decoder. What is not listed stays as it is: routers,
# whose rounding changes decisions, embeddings, heads, convolutions, and layers nobody has tried.
_MATRIX: Final = re.compile(
    r"(?:.*\.)?layers\.\d+\.(?:.*\.)?"
    r"(?:(?:q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa)\.weight"
)
_TOWER: Final = re.compile(r"(?:^|\.)(?:vision|visual|audio)[^.]*\.")


class UnalignedBlocks(OffbeatError):
    """Regions that cut blocks of 128 x 128 in two, so that no rank alone knows their scale."""

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
    """All tensors of a model whose formats in trainer and engine do not go together."""

    pairs: tuple[RefusedPair, ...]

    def __str__(self) -> str:
        kinds = dict[tuple[str, str, str], list[str]]()
        for each in self.pairs:
            kinds.setdefault((each.trainer, each.engine, each.problem), []).append(each.name)
        said = [
            f"{trainer} to {engine} {problem}: {_listed(names)}"
            for (trainer, engine, problem), names in kinds.items()
        ]
        return f"{len(self.pairs)} tensors cannot be sent: {'; '.join(said)}"


def is_quantized(name: str, shape: Shape) -> bool:
    """Return whether ``fp8_block`` quantizes the tensor with this Hugging Face name."""
    return len(shape) == 2 and bool(_MATRIX.fullmatch(name)) and not _TOWER.search(name)  # noqa: PLR2004


def unquantized_modules(tensors: Iterable[tuple[str, Shape]]) -> list[str]:
    """Return the modules with a matrix that ``fp8_block`` leaves as it is, sorted."""
    return sorted(
        name.removesuffix(".weight")
        for name, shape in tensors
        if name.endswith(".weight") and len(shape) == 2 and not is_quantized(name, shape)  # noqa: PLR2004
    )


def scale_shape(shape: Shape) -> Shape:
    """Return the shape of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def scale_region(region: Region, shape: Shape) -> Region | None:
    """Return the scales of a region of a matrix; None if it cuts a block."""
    ends = zip(region.stop, shape, strict=True)
    if any(start % BLOCK for start in region.start) or any(
        stop % BLOCK and stop != size for stop, size in ends
    ):
        return None
    start = tuple(each // BLOCK for each in region.start)
    return Region(start, scale_shape(region.stop))


def quantized_metas(
    metas: Iterable[tuple[str, Shape, str]], policy: WirePolicy
) -> Iterator[TensorMeta]:
    """Yield every tensor of a release in its wire format: a quantized matrix, then its scales.

    Raises:
        PrecisionRefused: For all tensors together that have no such format.
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


def scheme_of(quantization: object) -> str:
    """Return the name of a model config's ``quantization_config``.

    Returns:
        Empty without one, ``fp8_block``, or a description of a scheme that nothing here makes.
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
        "modules_to_not_convert": unquantized_modules(tensors),
    }


def conversion_problem(dtype: str) -> str:
    """Return why a matrix of this dtype cannot be quantized; empty if it can."""
    return "" if dtype in _QUANTIZABLE else "is not converted"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
