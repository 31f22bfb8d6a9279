"""Interface of the plug-in that converts matrices of releases to a format of engines: ``sync.quantize``.

    trainer   converts its weights once, and computes canaries with the values that engines have
    engine    holds the format itself

A plug-in imports this module when the models of a recipe are checked, so it imports no arrays.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from offbeat.config.problems import Clash
from offbeat.messages.failures import OffbeatError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from offbeat.config.run import RunConfig
    from offbeat.weight_sync.buckets import NamedRegion
    from offbeat.weight_sync.dtypes import WirePolicy
    from offbeat.weight_sync.manifest import TensorMeta
    from offbeat.weight_sync.receiver import TensorRegion
    from offbeat.weight_sync.region import Region, Shape


class UnconvertibleWeights(OffbeatError):
    """Weights with values that a wire format cannot represent."""


class WireFormat(ABC):
    """Form in which the matrices of a release travel and are held, each with tensors that belong to it.

    Names are the Hugging Face names of the release. A tensor that is stored in the format already
    stays as it is.
    """

    dtype: ClassVar[str]
    """Dtype of converted matrices, which no other tensor is converted to."""

    canary_prompts: ClassVar[int]
    """Prompts of a canary that show one wrong matrix beside the rounding of all."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings that do not go together with the format, of real runs."""
        del config
        yield from ()

    @abstractmethod
    def converts(self, name: str, shape: "Shape") -> bool:
        """Return whether a tensor of this name and shape is converted."""

    @abstractmethod
    def is_aligned(self, region: "Region", shape: "Shape") -> bool:
        """Return whether a region of a converted matrix has the bytes that it has in the whole one."""

    @abstractmethod
    def metas(
        self, metas: "Iterable[tuple[str, Shape, str]]", policy: "WirePolicy"
    ) -> "Iterator[TensorMeta]":
        """Yield every tensor of a release as it travels: a matrix, then the tensors made of it.

        Args:
            metas: Name, shape and dtype of each weight.
            policy: Wire dtypes of what is not converted.

        Raises:
            OffbeatError: For all tensors together that cannot be converted.
        """

    @abstractmethod
    def tensors(self, named: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """Yield tensors in the order and form of ``metas``, but for the rounding of packing.

        Raises:
            UnconvertibleWeights: The format cannot represent a matrix.
        """

    @abstractmethod
    def regions(
        self, held: "Iterable[TensorRegion]", shapes: "Mapping[str, Shape]"
    ) -> "Iterator[TensorRegion]":
        """Yield the regions of one rank as ``tensors`` yields whole tensors.

        Args:
            held: Regions, under the names of the release.
            shapes: Shapes of the whole tensors, by those names.

        Raises:
            OffbeatError: A region is not aligned.
            UnconvertibleWeights: The format cannot represent a matrix.
        """

    @abstractmethod
    def held(
        self, held: "Iterable[NamedRegion]", shapes: "Mapping[str, Shape]"
    ) -> "list[NamedRegion]":
        """Return names and regions of ``regions`` without computing a value.

        Raises:
            OffbeatError: For all regions together that are not aligned.
        """

    @abstractmethod
    def rounded(self, name: str, matrix: "Tensor") -> "Tensor":
        """Return a matrix, or an aligned region of one, with the values of engines in its own dtype.

        Raises:
            UnconvertibleWeights: The format cannot represent it.
        """

    @abstractmethod
    def trained_pass(self, model: "nn.Module") -> AbstractContextManager[None]:
        """Return a context in which a model computes with the values of engines.

        Without gradients. All ranks enter it together.
        """

    @abstractmethod
    def engine_config(self, tensors: "Iterable[tuple[str, Shape]]") -> dict[str, object]:
        """Return the ``quantization_config`` of engines that load a model's tensors in this format."""
