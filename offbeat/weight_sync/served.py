"""Reports of engines about their served weights. Pure: no torch."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from offbeat.weight_sync.manifest import Manifest


class TensorDifference(NamedTuple):
    """First region of a tensor that differs from the expected values."""

    tensor: str
    region: str  # in the coordinates of the tensor; empty: unknown, or the whole tensor
    detail: str

    def __str__(self) -> str:
        return f"{self.tensor}{self.region and ' '}{self.region}: {self.detail}"


class TensorFingerprint(msgspec.Struct, frozen=True):
    """Digests of the regions of a tensor, in the order of its rows."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digests: tuple[str, ...]


class ServedWeights(msgspec.Struct, frozen=True):
    """Release that an engine verified, and digests of the tensors that it serves."""

    engine: str
    version: int | None
    manifest: Manifest | None = None  # None: it has loaded no release of this run
    chunk_digests: tuple[str, ...] = ()  # of the served tensors, packed again
    fingerprints: tuple[TensorFingerprint, ...] = ()  # of the served tensors, in wire dtypes
    differences: tuple[TensorDifference, ...] = ()  # found by the engine itself
    problem: str = ""  # why the served tensors cannot be read back; empty if they were


_BLOCK_BYTES = 4 * 2**20


def digest_loaded(model_path: str) -> str:
    """Return the xxh3-128 digest over names and bytes of the weight files of a directory.

    Each serving process reads the files itself. So if two machines have different files under the
    same name, their digests differ.

    Raises:
        OSError: A file cannot be read.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(Path(model_path).glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()
