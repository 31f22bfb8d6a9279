"""Export of a stream of tensors as a Hugging Face directory for transformers and vLLM."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig

from offbeat.trainers.checkpoints.model_directory import replaced
from offbeat.trainers.checkpoints.state_files import save_tensors
from offbeat.trainers.megatron.hf_files import INDEX, SINGLE
from offbeat.trainers.ranks.peers import Peers

FILE_BYTES: Final = 5 * 10**9
_PROBLEM: Final = msgspec.msgpack.Decoder[str | None](str | None)


def save_directory(
    weights: Iterable[tuple[str, Tensor]],
    target: Path,
    like: Path,
    dtype: torch.dtype,
    peers: Peers,
) -> None:
    """Write weights, ``like``'s config and its tokenizer, atomically. All ranks call it.

    Rank 0 writes, and the others return when it is done. An existing directory is replaced.

    Raises:
        OSError: The disk failed. Every rank raises it, so that none waits for another.
    """
    problem: str | None = None
    if peers.rank == 0:
        consumed = iter(weights)
        try:
            _write(consumed, target, like, dtype)
        except OSError as error:
            problem = str(error)
            for _ in consumed:  # the other ranks are in its collectives
                pass
    else:
        for _ in weights:
            pass
    if (failure := peers.broadcast(problem, _PROBLEM)) is not None:
        raise OSError(failure)


def _write(
    weights: Iterator[tuple[str, Tensor]], target: Path, like: Path, dtype: torch.dtype
) -> None:
    with replaced(target, like) as staged:
        _write_weights(weights, staged)
        config = AutoConfig.from_pretrained(like, local_files_only=True)
        config.dtype = dtype
        config.save_pretrained(staged)


def _write_weights(weights: Iterator[tuple[str, Tensor]], directory: Path) -> None:
    """Write one file, or several and an index."""
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
