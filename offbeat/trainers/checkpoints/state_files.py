"""Tensors by name in a safetensors file: no code runs when one is read."""

# pyright: reportUnknownVariableType=false
# safetensors declares its files without types.

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.run_files.disk import DISK


def save_tensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors to a file, from whatever device they are on, and sync it.

    On a disk that several machines share, only the machine that wrote a file can sync it.

    Raises:
        OSError: The disk failed; safetensors has an error class of its own for it.
    """
    try:
        named = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, file, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    DISK.sync(file)


@contextmanager
def opened_tensors(file: Path) -> Generator[Any]:
    """Yield safetensors' own reader of a file.

    Raises:
        OSError: The file cannot be read, or is damaged; safetensors names no file, and has an error
            class of its own.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise OSError(f"{file} cannot be read: {error}. Copy it again, or name another") from error
