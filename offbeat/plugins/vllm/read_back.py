"""Compares a vLLM worker's weights with a release, under the names of the release.

A worker's parameters join several tensors (``qkv_proj``), are cut over ranks and, on CPU, packed
for kernels. Then no memory holds their values any more. But a kernel shows its matrix in the
results for unit vectors: one column each, exact except for the sign of zeros. The recording of the
loader maps each region of each tensor to elements of a parameter.
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# vllm lives in an environment of its own (docs/vllm.md).
# ruff: noqa: SLF001 -- torch has no public name for a module's own parameters

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from offbeat.weight_sync.fingerprints import tensor_difference
from offbeat.weight_sync.recorder import EngineRecording, RecordedCopy
from offbeat.weight_sync.region import Shape
from offbeat.weight_sync.served import TensorDifference

_KNOWN: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods whose layers hold a plain matrix, or one packed for a kernel that multiplies vectors."""

_AT_ONCE: Final = 256  # unit vectors


class NotComparable(Exception):
    """A parameter that cannot be read, or values that cannot be distinguished from others."""


class _Values(NamedTuple):
    """Values of a parameter, and the place where they were read."""

    tensor: Tensor
    where: str
    signs_zeros: bool


class WorkerWeights:
    """The values that a worker computes with, read through the recording of its loader."""

    def __init__(self, model: nn.Module, recording: EngineRecording) -> None:
        self._model, self._forms = model, recording.parameters
        self._misc = recording.misc
        self._copies = defaultdict[str, list[RecordedCopy]](list)
        for each in recording.copies:
            self._copies[each.tensor].append(each)
        self._last: tuple[str, list[_Values]] = "", []

    def first_difference(self, tensors: Iterable[tuple[str, Tensor]]) -> TensorDifference | None:
        """Return the first region of these tensors that differs in this worker.

        Raises:
            NotComparable: A parameter cannot be read.
        """
        with torch.inference_mode():
            for name, tensor in tensors:
                if name in self._misc:
                    raise NotComparable(f"its loader computes with {name}: {self._misc[name]}")
                for each in self._copies[name]:
                    if found := self._difference(each, tensor[each.region.slices]):
                        return found
        return None

    def _difference(self, copy: RecordedCopy, want: Tensor) -> TensorDifference | None:
        parameter = copy.place.parameter
        for values in self._read_values(parameter):
            got = copy.place.of({parameter: values.tensor})
            expected = want.to(got.device, got.dtype)
            if not values.signs_zeros:
                if not bool(torch.isfinite(expected).all()):
                    raise NotComparable(f"{copy.tensor}{copy.region} has infinities or NaNs")
                expected, got = expected + 0, got + 0
            found = tensor_difference(copy.tensor, expected, got, copy.region.start)
            if found is not None:
                return found._replace(detail=f"{found.detail}; in {parameter} {values.where}")
        return None

    def _read_values(self, parameter: str) -> list[_Values]:
        if self._last[0] != parameter:  # joined tensors follow each other
            self._last = parameter, list(self._read(parameter))
        return self._last[1]

    def _read(self, parameter: str) -> Iterator[_Values]:
        prefix, _, key = parameter.rpartition(".")
        owner, (shape, dtype) = self._model.get_submodule(prefix), self._forms[parameter]
        tensor = owner._parameters.get(key)
        if tensor is None:
            tensor = owner._buffers.get(key)
        if tensor is None:
            raise NotComparable(f"{parameter} is gone from the model")
        in_memory = tuple(tensor.shape) == shape
        if in_memory:
            yield _Values(tensor.detach().contiguous(), "in memory", signs_zeros=True)
        packed = False
        for layer in self._model.modules():  # a tied head packs the embedding's matrix again
            if layer is owner or layer._parameters.get(key) is tensor:
                _check_known(parameter, layer)
                if key == "weight" and hasattr(layer, "cpu_linear"):
                    yield _Values(
                        _through_kernel(layer, shape, dtype),
                        "through its kernel",
                        signs_zeros=False,
                    )
                    packed = True
        if not in_memory and not packed:
            raise NotComparable(f"{parameter} has the shape {tuple(tensor.shape)}, not {shape}")


def _check_known(parameter: str, layer: nn.Module) -> None:
    method = layer.__dict__.get("quant_method") or layer._modules.get("quant_method")
    if method is not None and not isinstance(method, _KNOWN):
        raise NotComparable(f"{parameter} is packed by {type(method).__name__}")


def _through_kernel(layer: Any, shape: Shape, dtype: torch.dtype) -> Tensor:  # noqa: ANN401 -- vLLM's
    rows, columns = shape
    made = torch.empty(rows, columns, dtype=dtype)
    for start in range(0, columns, _AT_ONCE):
        stop = min(start + _AT_ONCE, columns)
        units = torch.zeros(stop - start, columns, dtype=dtype)
        units[torch.arange(stop - start), torch.arange(start, stop)] = 1
        made[:, start:stop] = layer.quant_method.apply(layer, units, None).t()
    return made
