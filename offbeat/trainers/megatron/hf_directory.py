"""Export of a stream of tensors as a Hugging Face directory for transformers and vLLM."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from offbeat.trainers.checkpoints.gathered_export import write_on_first_rank
from offbeat.trainers.checkpoints.model_directory import replaced
from offbeat.trainers.checkpoints.weight_files import write_weights
from offbeat.trainers.ranks.peers import Peers


def save_directory(
    weights: Iterable[tuple[str, Tensor]],
    target: Path,
    like: Path,
    dtype: torch.dtype,
    peers: Peers,
    file_bytes: int,
) -> None:
    """Write weights, ``like``'s config and its tokenizer, atomically. All ranks call it.

    Rank 0 writes, and the others return when it is done. An existing directory is replaced.
    ``file_bytes`` is the most that a file of weights has.

    Raises:
        OSError: The disk failed. Every rank raises it, so that none waits for another.
    """

    def write(gathered: Iterator[tuple[str, Tensor]]) -> None:
        with replaced(target, like) as staged:
            write_weights(gathered, staged, file_bytes)
            config = AutoConfig.from_pretrained(like, local_files_only=True)
            config.dtype = dtype
            config.save_pretrained(staged)

    write_on_first_rank(weights, peers, write)
