"""A Hugging Face directory that transformers and vLLM load, written from a stream of tensors."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from offbeat.actors.trainers.megatron.hf_files import INDEX, SINGLE
from offbeat.actors.trainers.torch_backend.state_files import save_tensors

FILE_BYTES: Final = 5 * 10**9
_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"})


def save_directory(
    weights: Iterable[tuple[str, Tensor]], target: Path, like: Path, dtype: torch.dtype
) -> None:
    """Write weights, ``like``'s config and its tokenizer: wholly, or not at all. All ranks call it.

    Rank 0 writes, and the others come back when it is done. A directory that is there is replaced.

    Raises:
        OSError: The disk refused. Every rank raises it, so that none waits for another.
    """
    problem: list[str | None] = [None]
    if dist.get_rank() == 0:
        consumed = iter(weights)
        try:
            _write(consumed, target, like, dtype)
        except OSError as error:
            problem = [str(error)]
            for _ in consumed:  # the other ranks are in its collectives
                pass
    else:
        for _ in weights:
            pass
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise OSError(problem[0])


def _write(
    weights: Iterator[tuple[str, Tensor]], target: Path, like: Path, dtype: torch.dtype
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _write_weights(weights, staged)
        config = AutoConfig.from_pretrained(like, local_files_only=True)
        config.dtype = dtype
        config.save_pretrained(staged)
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


def _write_weights(weights: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    """One file, or several and an index."""
    files, held, nbytes, total = dict[str, str](), dict[str, Tensor](), 0, 0
    count = 0

    def flush() -> None:
        nonlocal held, nbytes, count
        count += 1
        name = f"model-{count:05}.safetensors"
        save_tensors(held, directory / name)
        files.update(dict.fromkeys(held, name))
        held, nbytes = {}, 0

    for name, tensor in weights:
        if held and nbytes + tensor.nbytes > FILE_BYTES:
            flush()
        held[name] = tensor.cpu()
        nbytes, total = nbytes + tensor.nbytes, total + tensor.nbytes
    flush()
    if count == 1:
        (directory / "model-00001.safetensors").rename(directory / SINGLE)
        return
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


def _is_asset(file: Path) -> bool:
    """Tokenizer, chat template, generation config: neither weights nor an index of them."""
    return file.suffix not in _WEIGHTS and not file.name.endswith(".index.json")
