"""Weights of a model directory, written as they come: one safetensors file, or several and an index."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from offbeat.trainers.checkpoints.state_files import save_tensors

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FILE_BYTES: Final = 4 * 2**30
"""Most bytes of a file that holds several tensors; so many are in memory at a time."""

_UNFINISHED: Final = "model-{:05}.unfinished"
_SEVERAL: Final = "model-{:05}-of-{:05}.safetensors"
_METADATA: Final = {"format": "pt"}  # as transformers writes it


def write_weights(
    weights: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write one file, or several and an index.

    No more than the tensors of one file, and the one that comes next, are held. Files get the names by
    which readers know weights when all are written, the index last.

    Args:
        weights: Tensors by name, on any device; no name twice.
        directory: Where the files go.
        file_bytes: Most bytes of a file; a larger tensor has a file of its own.

    Raises:
        OSError: The disk failed.
    """
    written, pending = list[list[str]](), dict[str, Tensor]()  # names by file; of the next one
    nbytes = total = 0

    def flush() -> None:
        save_tensors(pending, directory / _UNFINISHED.format(len(written)), _METADATA)
        written.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and nbytes + tensor.nbytes > file_bytes:
            flush()
            nbytes = 0
        pending[name] = tensor.cpu().contiguous()
        nbytes, total = nbytes + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(written) == 1:
        (directory / _UNFINISHED.format(0)).rename(directory / SINGLE)
        return
    file_by_name = dict[str, str]()
    for number, names in enumerate(written):
        file = _SEVERAL.format(number + 1, len(written))
        (directory / _UNFINISHED.format(number)).rename(directory / file)
        file_by_name |= dict.fromkeys(names, file)
    weight_map = dict(sorted(file_by_name.items()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
