"""Names of the tensors that an engine was loaded from: a release must contain exactly these.

vLLM says nothing when a tensor is missing from an update: what was not loaded is stale, or memory
nobody wrote.
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
    """Names, shapes and types of the checkpoint an engine was made from."""

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    dtype: str  # the engine computes in
    tied: bool  # the output head is the embedding

    def check(self, epoch: int, manifest: Manifest) -> None:
        """A manifest covers the model.

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
            if spec.dtype not in fitting:  # float32 loses nothing, and some tensors need it
                want = " or ".join(dict.fromkeys(fitting))
                raise TransferRefused(epoch, f"dtype of {spec.name}", spec.dtype, want)


def coverage_of(model_path: str, dtype: str) -> Coverage:
    """Read the headers of a Hugging Face directory's safetensors files."""
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
