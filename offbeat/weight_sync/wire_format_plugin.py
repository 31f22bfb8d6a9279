"""Interface of the plug-in of ``sync.quantize``, which converts matrices to a format of engines.

    trainer   converts its weights once, and computes canaries with the engines' values
    engine    holds the converted format

A plug-in imports this module while a recipe's models are checked, so this module must not import
array libraries.
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
    """Weights have values that a wire format cannot represent.

    Fix: resume from the last checkpoint.
    """


class WireFormat(ABC):
    """Format of matrices, with their additional tensors, on the wire and in engines.

    Names are the Hugging Face names of the release. A tensor that is already stored in the format
    is not changed.
    """

    dtype: ClassVar[str]
    """Dtype of converted matrices. No other tensor is converted to it."""

    canary_prompts: ClassVar[int]
    """Number of canary prompts that reveals one wrong matrix although all matrices are rounded."""

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]:
        """Yield settings of real runs that do not work with the format."""
        del config
        yield from ()

    @abstractmethod
    def converts(self, name: str, shape: "Shape") -> bool:
        """Return whether a tensor of this name and shape is converted."""

    @abstractmethod
    def is_aligned(self, region: "Region", shape: "Shape") -> bool:
        """Return whether a converted region has the same bytes as in the converted whole matrix."""

    @abstractmethod
    def metas(
        self, metas: "Iterable[tuple[str, Shape, str]]", policy: "WirePolicy"
    ) -> "Iterator[TensorMeta]":
        """Yield every tensor of a release in its wire form, each matrix before its derived tensors.

        Args:
            metas: Name, shape and dtype of each weight.
            policy: Wire dtypes of the tensors that are not converted.

        Raises:
            OffbeatError: Some tensors cannot be converted. The error names all of them.
        """

    @abstractmethod
    def tensors(self, named: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """Yield tensors in the order and form of ``metas``. Packing rounds them later.

        Raises:
            UnconvertibleWeights: The format cannot represent a matrix.
        """

    @abstractmethod
    def regions(
        self, held: "Iterable[TensorRegion]", shapes: "Mapping[str, Shape]"
    ) -> "Iterator[TensorRegion]":
        """Yield the regions of one rank in the way that ``tensors`` yields whole tensors.

        Args:
            held: Regions, under the names of the release.
            shapes: Shapes of the whole tensors, by the same names.

        Raises:
            OffbeatError: A region is not aligned.
            UnconvertibleWeights: The format cannot represent a matrix.
        """

    @abstractmethod
    def held(
        self, held: "Iterable[NamedRegion]", shapes: "Mapping[str, Shape]"
    ) -> "list[NamedRegion]":
        """Return the names and regions that ``regions`` yields, without computing values.

        Raises:
            OffbeatError: Some regions are not aligned. The error names all of them.
        """

    @abstractmethod
    def rounded(self, name: str, matrix: "Tensor") -> "Tensor":
        """Round a matrix, or an aligned region, to the engines' values and keep its dtype.

        Raises:
            UnconvertibleWeights: The format cannot represent the matrix.
        """

    @abstractmethod
    def trained_pass(self, model: "nn.Module") -> AbstractContextManager[None]:
        """Return a context in which a model computes with the engines' values.

        It computes no gradients. All ranks must enter it together.
        """

    @abstractmethod
    def engine_config(self, tensors: "Iterable[tuple[str, Shape]]") -> dict[str, object]:
        """Return the ``quantization_config`` of engines that load a model's tensors in this format."""
