"""Export of a stream of tensors as a Hugging Face directory for transformers and vLLM."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor
from transformers import AutoConfig

from offbeat.trainers.checkpoints.model_directory import replaced
from offbeat.trainers.checkpoints.weight_files import write_weights
from offbeat.trainers.ranks.peers import Peers

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
        write_weights(weights, staged)
        config = AutoConfig.from_pretrained(like, local_files_only=True)
        config.dtype = dtype
        config.save_pretrained(staged)
