"""Checks that a release contains exactly the tensors that the engine was loaded from.

vLLM does not report a tensor that is missing from an update. The tensor stays stale, or is
uninitialized memory.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from offbeat.weight_sync.dtypes import SCALE_SUFFIX, WirePolicy
from offbeat.weight_sync.errors import CoverageRefused, TransferRefused
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.wire_format import wire_metas

_LENGTH_BYTES: Final = 8
_FLOATS: Final = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES: Final = _FLOATS | {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_HEAD: Final = "lm_head.weight"
_PREFIX: Final = r"(?:model\.|language_model\.)*"
_LAYER: Final = re.compile(_PREFIX + r"layers\.(\d+)\..+")
_FREQUENCIES: Final = ".rotary_emb.inv_freq"
_NAMED_DRAFT: Final = re.compile(_PREFIX + r"mtp[._].+")


@dataclass(frozen=True, slots=True)
class Coverage:
    """Names, shapes and types of the checkpoint that an engine was loaded from."""

    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    dtype: str  # computation dtype of the engine
    tied: bool  # whether the output head is the embedding
    # Tensors that the model itself does not read: no trainer has them and no release needs them
    unread: frozenset[str] = frozenset()

    def check(self, epoch: int, manifest: Manifest) -> None:
        """Raise unless a manifest covers the model.

        Raises:
            CoverageRefused: Tensors are missing or unknown.
            TransferRefused: A tensor's shape or type differs from the engine's.
        """
        names = {spec.name for spec in manifest.tensors}
        optional = self.unread | ({_HEAD} if self.tied else set[str]())
        missing = sorted(self.tensors.keys() - names - optional)
        unknown = sorted(names - self.tensors.keys() - optional)
        if missing or unknown:
            raise CoverageRefused(epoch, tuple(missing), tuple(unknown))
        for spec in manifest.tensors:
            shape, stored = self.tensors.get(spec.name, (spec.shape, spec.dtype))
            if tuple(spec.shape) != shape:
                raise TransferRefused(epoch, f"shape of {spec.name}", str(spec.shape), str(shape))
            fitting = (self.dtype, "float32") if stored in _FLOATS.values() else (stored,)
            if spec.name.endswith(SCALE_SUFFIX):
                fitting = ("float32",)
            if spec.dtype not in fitting:  # float32 is lossless, and some tensors need it
                want = " or ".join(dict.fromkeys(fitting))
                raise TransferRefused(epoch, f"dtype of {spec.name}", spec.dtype, want)


def read_coverage(model_path: str, dtype: str, quantize: str | None = None) -> Coverage:
    """Return the coverage, read from the headers of a Hugging Face directory's safetensors files.

    ``quantize``: format in which an engine holds the matrices of these files. None: unchanged.
    """
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
    if quantize is not None:
        metas = ((name, shape, kind) for name, (shape, kind) in tensors.items())
        policy = WirePolicy(quantize=quantize)
        tensors = {each.name: (each.shape, each.dtype) for each in wire_metas(metas, policy)}
    unread = frozenset(_unread_names(tensors, settings))
    return Coverage(tensors, dtype, bool(settings.get("tie_word_embeddings", False)), unread)


def _unread_names(names: Iterable[str], settings: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of the tensors that vLLM and transformers both leave out.

    Some predict further tokens (MTP), which only a drafter of speculative decoding does. They are
    layers behind the model's last one, as in GLM-4.5 and DeepSeek-V3, or have their own name, as in
    Qwen3-Next. Others are position frequencies, which old files of Llama hold for each layer.
    """
    text = settings.get("text_config")
    sizes = cast("Mapping[str, object]", text if isinstance(text, Mapping) else settings)
    layers, more = sizes.get("num_hidden_layers"), sizes.get("num_nextn_predict_layers")
    drafter_layers = (
        range(layers, layers + more) if isinstance(layers, int) and isinstance(more, int) else ()
    )
    for name in names:
        found = _LAYER.fullmatch(name)
        is_drafter = _NAMED_DRAFT.fullmatch(name) or (
            found is not None and int(found[1]) in drafter_layers
        )
        if is_drafter or name.endswith(_FREQUENCIES):
            yield name
