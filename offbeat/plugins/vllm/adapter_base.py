"""Merges a release of adapters into a release of the whole model for vLLM's weight transfer.

The actor computes the sums from the files that the engine was loaded from. vLLM itself serves no
adapters (decision 0031 has the reasons).
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# safetensors declares some functions without types.

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from offbeat.messages.weights import WeightRelease
from offbeat.plugins.lora.release import AdapterTarget, check_base
from offbeat.plugins.vllm.coverage import Coverage
from offbeat.weight_sync.chunks import WeightChunk, pack, walk
from offbeat.weight_sync.manifest import Bytes, Manifest, plan, release_digest
from offbeat.weight_sync.receiver import Receiver
from offbeat.weight_sync.served import digest_loaded

_CHUNK_BYTES: Final = 64 * 2**20
_FLOATS: Final = frozenset({"float64", "float32", "float16", "bfloat16"})
_HEAD: Final = "lm_head.weight"


class FileBase:
    """Model of a directory, to which adapters are added in host memory. Thread-safe.

    Chunks without an adapted matrix are packed once and kept. The others are packed per release.
    """

    def __init__(self, path: str, coverage: Coverage) -> None:
        """Read names only. The first release reads the weights.

        Raises:
            OSError: A file cannot be read.
        """
        self.digest = digest_loaded(path)
        self._files = _file_by_name(path)
        self._dtypes = {
            name: coverage.dtype if stored in _FLOATS else stored
            for name, (_, stored) in coverage.tensors.items()
            if not (coverage.tied and name == _HEAD)
        }
        self._shapes = {name: coverage.tensors[name][0] for name in self._dtypes}
        metas = ((name, self._shapes[name], dtype) for name, dtype in self._dtypes.items())
        self._manifest = plan(metas, _CHUNK_BYTES)
        self._chunks = list(walk(self._manifest))
        self._kept = dict[int, tuple[Bytes, str]]()  # chunks as loaded, with their digests
        self._packed = list[tuple[Bytes, str]]()  # chunks of the release being made
        self._one_at_a_time = threading.Lock()

    def whole(self, epoch: int, release: WeightRelease, chunks: Sequence[Bytes]) -> WeightRelease:
        """Verify a release of adapters and return the release of the model with them added.

        Raises:
            TransferRefused: It does not fit this base, or arrived damaged.
        """
        manifest: Manifest = release.manifest
        with self._one_at_a_time:
            check_base(epoch, self, manifest)
            receiver = Receiver(AdapterTarget(self, manifest))
            receiver.begin(epoch, manifest)
            for index, chunk in enumerate(chunks):
                receiver.apply(epoch, index, chunk)
            receiver.verify(release.digest)
            receiver.commit(release.version)
            packed, self._packed = self._packed, []
        sealed = self._manifest.seal([each for _, each in packed])
        sealed = msgspec.structs.replace(sealed, canary=manifest.canary)
        return msgspec.structs.replace(
            release,
            digest=release_digest(sealed, sealed.chunk_digests),
            manifest=sealed,
            chunks=tuple(chunk for chunk, _ in packed),
        )

    # --- the base of an ``AdapterTarget`` ---------------------------------------------------------

    def matrix(self, module: str) -> tuple[tuple[int, ...], str] | None:
        name = f"{module}.weight"
        return (self._shapes[name], self._dtypes[name]) if name in self._shapes else None

    def of(self, module: str) -> Tensor:
        return self._read(f"{module}.weight")

    def write(self, matrices: Mapping[str, Tensor]) -> None:
        adapted = {f"{module}.weight": each for module, each in matrices.items()}
        self._packed = [self._fill(chunk, adapted) for chunk in self._chunks]

    def _fill(self, chunk: WeightChunk, adapted: Mapping[str, Tensor]) -> tuple[Bytes, str]:
        if adapted.keys().isdisjoint(chunk.names):
            if chunk.index not in self._kept:
                self._kept[chunk.index] = self._pack(chunk, {})
            return self._kept[chunk.index]
        return self._pack(chunk, adapted)

    def _pack(self, chunk: WeightChunk, adapted: Mapping[str, Tensor]) -> tuple[Bytes, str]:
        tensors = {
            name: adapted[name] if name in adapted else self._read(name) for name in chunk.names
        }
        into = np.empty(chunk.nbytes, np.uint8)
        return into, pack(chunk, tensors, into)

    def _read(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            dtype: Any = getattr(torch, self._dtypes[name])
            return opened.get_tensor(name).to(dtype)


def _file_by_name(path: str) -> dict[str, Path]:
    files = dict[str, Path]()
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files |= dict.fromkeys(opened.keys(), file)
    return files
