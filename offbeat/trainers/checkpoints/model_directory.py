"""A Hugging Face directory that is there whole, or not at all. Knows no backend and no tensors."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


@contextmanager
def replaced(target: Path, like: Path) -> Iterator[Path]:
    """A directory to write weights and config to; it becomes ``target`` if the block does not raise.

    ``like``'s tokenizer and other assets are added. A directory that is there already is replaced.

    Raises:
        OSError: The disk refused; what was at ``target`` is there still.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
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


def _is_asset(file: Path) -> bool:
    """Tokenizer, chat template, remote code: whatever is neither weights nor an index of them."""
    return file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
