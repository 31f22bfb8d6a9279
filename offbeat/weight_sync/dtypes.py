"""Wire dtypes of tensors. Pure.

Generators often serve 16-bit copies of weights that the trainer keeps in 32 bits. The sender rounds
them once. Some tensors do not tolerate this rounding. For example, the values of a router's
correction bias can be between 25 and 57 and only 7e-4 apart. There, bfloat16 has steps of 0.125, so
the rounding would decide which experts are chosen.
"""

from typing import Final, Protocol, cast

import msgspec

from offbeat.config.sections.sync_base import BaseSyncConfig
from offbeat.doors import find_plugin

ITEMSIZE: Final = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1,
                   "float8_e5m2": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
                   "bool": 1}  # fmt: skip
_ROUNDED: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
SCALE_SUFFIX: Final = "_scale_inv"  # a matrix's name with this suffix names its scales
# Names of router biases: DeepSeek and GLM; LFM2, Trinity and Ling; Step
PRESERVED: Final = ("e_score_correction_bias", "expert_bias", "router_bias")


class _WireFormat(Protocol):
    @property
    def dtype(self) -> str: ...


def wire_dtypes(model_dtype: str, sync: BaseSyncConfig) -> tuple[str | None, ...]:
    """Return all dtypes to which weights are converted before engines compute with them."""
    if sync.quantize is None:
        return model_dtype, sync.wire_dtype
    wire_format = cast("_WireFormat", find_plugin("wire_format", sync.quantize))
    return model_dtype, sync.wire_dtype, wire_format.dtype


def narrowest_bytes(*dtypes: str | None) -> int:
    """Return the element size of the narrowest dtype, which determines the rounding.

    Args:
        dtypes: Dtype names without ``torch.``. None is ignored: it means no further conversion.

    Raises:
        KeyError: A dtype is not in ``ITEMSIZE``.
    """
    return min(ITEMSIZE[dtype] for dtype in dtypes if dtype is not None)


class WirePolicy(msgspec.Struct, frozen=True):
    """Policy that maps a tensor's name and dtype to its wire dtype."""

    dtype: str | None = None  # None: the trainer's dtype
    preserve: tuple[str, ...] = PRESERVED  # name suffixes that keep float32
    quantize: str | None = None  # format of matrices (``wire_format.wire_metas``)

    def __call__(self, name: str, source_dtype: str) -> str:
        """Return the wire dtype of a tensor. Integers, booleans and 8-bit floats are never changed."""
        if self.dtype is None or source_dtype not in _ROUNDED:
            return source_dtype
        if name.endswith((*self.preserve, SCALE_SUFFIX)):
            return "float32" if source_dtype == "float64" else source_dtype
        return self.dtype
