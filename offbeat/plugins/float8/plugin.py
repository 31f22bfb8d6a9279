"""Releases in float8 blocks: the interface for the core."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final

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
        from offbeat.plugins.float8.clashes import float8_clashes

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


FORMAT: Final = Float8Blocks()
