"""Releases in float8 blocks: the interface for the core."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

from offbeat.config.engine_plugin import known_engines
from offbeat.config.problems import Clash
from offbeat.weight_sync.wire_format_plugin import WireFormat

if TYPE_CHECKING:
    from torch import Tensor, nn

    from offbeat.config.run import RunConfig
    from offbeat.weight_sync.buckets import NamedRegion
    from offbeat.weight_sync.dtypes import WirePolicy
    from offbeat.weight_sync.manifest import TensorMeta
    from offbeat.weight_sync.receiver import TensorRegion
    from offbeat.weight_sync.region import Region, Shape


class Float8Blocks(WireFormat):
    """Rounds matrices to float8_e4m3fn, with a scale for each block of 128 x 128."""

    dtype = "float8_e4m3fn"
    canary_prompts = 16  # one wrong matrix of 210 moves some less than rounding moves others

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield quantized releases that no engine of the recipe can load."""
        yield from float8_clashes(config)

    def converts(self, name: str, shape: "Shape") -> bool:
        """Return whether this tensor is a matrix of a layer that engines compute."""
        from offbeat.plugins.float8.precision import is_quantized

        return is_quantized(name, shape)

    def is_aligned(self, region: "Region", shape: "Shape") -> bool:
        """Return whether a region of a matrix cuts no block."""
        from offbeat.plugins.float8.precision import scale_region

        return scale_region(region, shape) is not None

    def metas(
        self, metas: "Iterable[tuple[str, Shape, str]]", policy: "WirePolicy"
    ) -> "Iterator[TensorMeta]":
        """Yield every tensor of a release: a quantized matrix, then its scales.

        Raises:
            PrecisionRefused: For all tensors together that cannot have this format.
        """
        from offbeat.plugins.float8.precision import list_quantized_metas

        return list_quantized_metas(metas, policy)

    def tensors(self, named: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """Yield tensors in the order and form of ``metas``.

        Raises:
            UnquantizableWeights: A matrix to quantize holds an infinity or a NaN.
        """
        from offbeat.plugins.float8.quantize import quantize_tensors

        return quantize_tensors(named)

    def regions(
        self, held: "Iterable[TensorRegion]", shapes: "Mapping[str, Shape]"
    ) -> "Iterator[TensorRegion]":
        """Yield the regions of one rank, like ``tensors`` for whole tensors.

        Raises:
            UnalignedBlocks: A region of a matrix to quantize cuts a block.
            UnquantizableWeights: It holds an infinity or a NaN.
        """
        from offbeat.plugins.float8.quantize import quantize_regions

        return quantize_regions(held, shapes)

    def held(
        self, held: "Iterable[NamedRegion]", shapes: "Mapping[str, Shape]"
    ) -> "list[NamedRegion]":
        """Return names and regions of ``regions`` without computing a value.

        Raises:
            UnalignedBlocks: For all regions together that cut a block.
        """
        from offbeat.plugins.float8.quantize import list_quantized_held

        return list_quantized_held(held, shapes)

    def rounded(self, name: str, matrix: "Tensor") -> "Tensor":
        """Return a matrix with its values after quantization, in its own dtype.

        Raises:
            UnquantizableWeights: A block holds an infinity or a NaN.
        """
        from offbeat.plugins.float8.quantize import round_matrix

        return round_matrix(name, matrix)

    def trained_pass(self, model: "nn.Module") -> AbstractContextManager[None]:
        """Return a context in which a model computes like engines with quantized matrices."""
        from offbeat.plugins.float8.trained_pass import quantize_matrices

        return quantize_matrices(model)

    def engine_config(self, tensors: "Iterable[tuple[str, Shape]]") -> dict[str, object]:
        """Return the ``quantization_config`` of an engine that loads these blocks."""
        from offbeat.plugins.float8.precision import quantization_config

        return quantization_config(tensors)


def float8_clashes(config: "RunConfig") -> Iterator[Clash]:
    """Yield quantized releases that no engine of the recipe can load."""
    scheme, generator = config.sync.quantize, config.generator
    served = config.sync.wire_dtype or config.model.dtype
    is_16_bit = served in ("bfloat16", "float16")
    if not generator.takes_quantized:
        and_wire = "" if is_16_bit else " and sync.wire_dtype to bfloat16"
        yield Clash(
            ("sync.quantize", "generator.backend"),
            f"sync.quantize={scheme} does not fit generator.backend={generator.backend}, which computes with "
            "no quantized weights",
            f"Leave sync.quantize out{_or_quantized_engines(and_wire)}.",
        )
    if generator.takes_quantized and not is_16_bit:
        yield Clash(
            ("sync.quantize", "sync.wire_dtype", "model.dtype"),
            f"sync.quantize={scheme} needs engines that compute in 16 bits, but they serve {served}",
            "Set sync.wire_dtype to bfloat16.",
        )


def _or_quantized_engines(and_wire: str) -> str:
    """Return the advice to use engines that load quantized weights, or nothing if none exist."""
    names = [name for name, each in known_engines().items() if each.section.takes_quantized]
    return f", or set generator.backend to {' or '.join(names)}{and_wire}" if names else ""


FORMAT: Final = Float8Blocks()
