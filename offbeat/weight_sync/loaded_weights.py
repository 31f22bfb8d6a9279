"""Identity of the weight files of a model directory, as trainers and engines load them."""

from pathlib import Path

import xxhash

_BLOCK_BYTES = 4 * 2**20


def loaded_digest(model_path: str) -> str:
    """Return the xxh3-128 digest over names and bytes of the weight files of a directory.

    Read by each process that serves them, so that two machines with different files under the
    same name are distinguished.

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
