"""Weights of a model directory, written as they come: one safetensors file, or several and an index."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from torch import Tensor

from offbeat.trainers.checkpoints.state_files import save_tensors

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FILE_BYTES: Final = 5 * 10**9
"""Most bytes of a file that holds several tensors; so many are in memory at a time."""


def write_weights(weights: Iterable[tuple[str, Tensor]], directory: Path) -> None:
    """Write one file, or several and an index.

    Raises:
        OSError: The disk failed.
    """
    files, pending, nbytes, total = dict[str, str](), dict[str, Tensor](), 0, 0
    count = 0

    def flush() -> None:
        nonlocal pending, nbytes, count
        count += 1
        name = f"model-{count:05}.safetensors"
        save_tensors(pending, directory / name)
        files.update(dict.fromkeys(pending, name))
        pending, nbytes = {}, 0

    for name, tensor in weights:
        if pending and nbytes + tensor.nbytes > FILE_BYTES:
            flush()
        pending[name] = tensor.cpu()
        nbytes, total = nbytes + tensor.nbytes, total + tensor.nbytes
    flush()
    if len(set(files.values())) == 1:
        (directory / "model-00001.safetensors").rename(directory / SINGLE)
        return
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / INDEX).write_text(json.dumps(index, indent=2))
