"""Set-up of tests of encoder ranks: tiny models on disk, steps with pictures, groups dealt to ranks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.dispatch import Replicas, shares
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.image_text_models import PLACEHOLDER, make, picture_groups


class Families:
    """Directories of tiny image-text models; each is written when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str) -> Path:
        path = self._root / family
        if not path.exists():
            make(family).save_pretrained(path)
            (path / "tokenizer.json").write_text("{}")
        return path


def advantages_of(groups: Sequence[Any]) -> list[tuple[float, ...]]:
    """Random advantages of groups of three samples."""
    rng = np.random.default_rng(1)
    return [tuple(rng.normal(0, 1, 3).tolist()) for _ in groups]


def pictured(
    counts: Sequence[int], family: str = "idefics3", seed: int = 0, least_id: int = 0
) -> tuple[list[dict[str, Any]], list[tuple[float, ...]]]:
    """Groups with so many pictures each, and their advantages.

    ``least_id``: lowest token of a response. transformers gives the embedding of the padding token, 0,
    no gradient, and megatron-core does.
    """
    groups = picture_groups(counts, seed=seed, family=family)
    for group in groups:
        group["response_ids"] = np.maximum(group["response_ids"], least_id)
    return groups, advantages_of(groups)


def dealt(
    groups: Sequence[dict[str, Any]], prompt_indices: Iterable[int], replicas: Replicas, rank: int
) -> list[int]:
    """A rank's groups of a chunk, dealt as in production."""
    sizes = {
        each: len(groups[each]["prompt_ids"]) + len(groups[each]["response_ids"])
        for each in prompt_indices
    }
    parts = shares(sizes, replicas.data)
    return [each for share in replicas.list_shares(rank) for each in parts[share]]


def feed(
    trainer: Any,
    step: Any,
    loss: LossSpec,
    parts: Iterable[Sequence[int]],
    key: StepKey,
    replicas: Replicas,
) -> StepKey:
    """Begin a step and train its chunks; return the key of the call that follows.

    Args:
        trainer: Of one rank.
        step: ``groups`` and their ``advantages``.
        loss: What is trained.
        parts: Indices of the groups of each chunk.
        key: Of the step's first call.
        replicas: The ranks of the world.
    """
    trainer.begin_train_step(key, loss)
    for part in parts:
        key, own = key.next(), dealt(step.groups, part, replicas, trainer.peers.rank)
        trainer.train_microbatch(
            key,
            build_chunk([step.groups[i] for i in own]),
            [step.advantages[i] for i in own],
            [i % loss.minibatches for i in own],
        )
    return key.next()


HEADER_NBYTES = 9 * 8
HIDDEN = 32  # of the tiny models


def bridge_nbytes(
    groups: Sequence[dict[str, Any]],
    lanes: int,
    parts: Iterable[Sequence[int]],
    *,
    there: int = 8,
    back: int = 8,
    blocks: int = 1,
) -> float:
    """Bytes of the activations of a step once each way, and of a header before each message.

    Args:
        groups: Of the step.
        lanes: Data-parallel replicas of the language model.
        parts: Indices of the groups of each chunk.
        there: Bytes of an element of the features.
        back: Of one of their gradients; 0 for a frozen tower, of which none are sent.
        blocks: 1, and one for each decoder layer that has features of its own.
    """
    total = 0
    for part in parts:
        for lane in range(lanes):
            tokens_by_pictures = {
                groups[i]["media_values"].tobytes(): int(
                    (groups[i]["prompt_ids"] == PLACEHOLDER).sum()
                )
                for i in dealt(groups, part, Replicas(lanes), lane)
                if "media_values" in groups[i] and groups[i]["loss_mask"].any()
            }
            elements = sum(tokens_by_pictures.values()) * blocks * HIDDEN
            ways = [size for size in (there, back) if size and elements]
            total += sum(elements * size + HEADER_NBYTES for size in ways)
    return float(total)
