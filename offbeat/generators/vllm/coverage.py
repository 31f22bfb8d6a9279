"""Checks that a release contains exactly the tensors that the engine was loaded from.

vLLM does not report a tensor that is missing from an update: it stays stale, or is uninitialized
memory.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.weight_sync.errors import CoverageRefused, TransferRefused
from offbeat.weight_sync.manifest import Manifest

_LENGTH_BYTES: Final = 8
_DTYPES: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FLOATS: Final = frozenset(_DTYPES.values())
_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Names, shapes and types of the checkpoint that an engine was loaded from."""

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    dtype: str  # type that the engine computes in
    tied: bool  # whether the output head is the embedding

    def check(self, epoch: int, manifest: Manifest) -> None:
        """Raise unless a manifest covers the model.

        Raises:
            CoverageRefused: Tensors are missing or unknown.
            TransferRefused: A tensor is of another shape or type than the engine's.
        """
        names = {spec.name for spec in manifest.tensors}
        optional = {_HEAD} if self.tied else set[str]()
        missing = sorted(self.tensors.keys() - names - optional)
        unknown = sorted(names - self.tensors.keys() - optional)
        if missing or unknown:
            raise CoverageRefused(epoch, tuple(missing), tuple(unknown))
        for spec in manifest.tensors:
            shape, stored = self.tensors.get(spec.name, (spec.shape, spec.dtype))
            if tuple(spec.shape) != shape:
                raise TransferRefused(epoch, f"shape of {spec.name}", str(spec.shape), str(shape))
            fitting = (self.dtype, "float32") if stored in _FLOATS else (stored,)
            if spec.dtype not in fitting:  # float32 is lossless, and some tensors need it
                want = " or ".join(dict.fromkeys(fitting))
                raise TransferRefused(epoch, f"dtype of {spec.name}", spec.dtype, want)


def coverage_of(model_path: str, dtype: str) -> Coverage:
    """Read the headers of a Hugging Face directory's safetensors files; return the coverage."""
    folder = Path(model_path)
    tensors: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header: dict[str, dict[str, list[int] | str]] = json.loads(stream.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                kind = str(about["dtype"])
                shape = tuple(int(size) for size in about["shape"])
                tensors[name] = shape, _DTYPES.get(kind, kind)
    settings: dict[str, object] = json.loads((folder / "config.json").read_bytes())
    return Coverage(tensors, dtype, tied=bool(settings.get("tie_word_embeddings", False)))
