"""Writes model weights as they arrive: one safetensors file, or several files and an index.

Also saves and reads single safetensors files, which never runs code from the file, and replaces a
Hugging Face directory atomically.
"""

# pyright: reportUnknownVariableType=false
# safetensors declares its files without types.

import json
import re
import shutil
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offbeat.run_files.disk import DISK


def save_tensors(
    tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors from any device to a file, and sync it.

    On a disk that several machines share, only the machine that wrote a file can sync it.

    Raises:
        OSError: The disk failed. This replaces safetensors' own error class.
    """
    try:
        named = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, file, None if metadata is None else dict(metadata))
    except SafetensorError as error:
        raise OSError(f"{file}: {error}") from error
    DISK.sync(file)


@contextmanager
def open_tensors(file: Path) -> Generator[Any]:
    """Yield safetensors' reader of a file.

    Raises:
        OSError: The file cannot be read, or is damaged. This error replaces safetensors' own error
            class and names the file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise OSError(f"{file} cannot be read: {error}. Copy it again, or name another") from error


_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
_RANDOM: Final = r"[a-z0-9_]{8}"  # the end of a name that ``tempfile`` makes


@contextmanager
def replace_directory(target: Path, like: Path) -> Generator[Path]:
    """Yield a directory for weights and config. It becomes ``target`` if the block does not raise.

    The tokenizer and other assets of ``like`` are added. An existing directory is replaced.
    Leftovers of a killed process for the same target are removed. One writer at a time.

    Raises:
        OSError: The disk failed. ``target`` is unchanged.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(target)
    staged = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield staged
        for source in like.iterdir():
            if source.is_file() and _is_asset(source) and not (staged / source.name).exists():
                shutil.copy2(source, staged / source.name)
        staged.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            target.replace(old)
            staged.replace(target)
            shutil.rmtree(old)
        else:
            staged.replace(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _remove_unfinished(target: Path) -> None:
    unfinished = re.compile(rf"\.{re.escape(target.name)}\.{_RANDOM}")
    for each in target.parent.iterdir():
        if unfinished.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)


def _is_asset(file: Path) -> bool:
    """Return whether a file is neither weights nor a weight index: tokenizer, remote code, ..."""
    return file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")


SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
FILE_BYTES: Final = 4 * 2**30
"""Maximum bytes of a file with several tensors. The writer holds this much in memory."""

_UNFINISHED: Final = "model-{:05}.unfinished"
_SEVERAL: Final = "model-{:05}-of-{:05}.safetensors"
_METADATA: Final = {"format": "pt"}  # as transformers writes it


def write_weights(
    weights: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int = FILE_BYTES
) -> None:
    """Write one file, or several and an index.

    The writer holds at most the tensors of one file, and the next tensor. When all files are
    written, they are renamed to the names that readers expect, the index last.

    Args:
        weights: Tensors by unique name, on any device.
        directory: Directory of the files.
        file_bytes: Maximum bytes of a file. A larger tensor gets a separate file.

    Raises:
        OSError: The disk failed.
    """
    written, pending = list[list[str]](), dict[str, Tensor]()  # names by file; next file
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
