"""Atomic replacement of a Hugging Face directory, independent of backend and tensors."""

import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})
_RANDOM: Final = r"[a-z0-9_]{8}"  # the end of a name that ``tempfile`` makes


@contextmanager
def replaced(target: Path, like: Path) -> Generator[Path]:
    """Yield a directory for weights and config; it becomes ``target`` if the block does not raise.

    The tokenizer and other assets of ``like`` are added. An existing directory is replaced. What a
    process that was killed left of the same target is removed. One writer at a time.

    Raises:
        OSError: The disk failed; what was at ``target`` is unchanged.
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
    """Return whether a file is neither weights nor an index of them: tokenizer, remote code, ..."""
    return file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
