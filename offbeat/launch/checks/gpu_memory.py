"""Compares the bytes that a trainer rank holds with the memory of its GPU."""

from typing import Any

from offbeat.config.limits import trainer_resources
from offbeat.config.run import RunConfig
from offbeat.messages.finding import Finding, error, ok, size, warning
from offbeat.trainers.trainer_plugin import RankBytes, known_trainers


def gpu_bytes(config: RunConfig) -> int | None:
    """Return the memory of this machine's smallest GPU, because Ray chooses each rank's GPU.

    Return None if no trainer rank needs a GPU, or this machine has none.
    """
    trainer = config.trainer
    if trainer.backend == "stub" or not trainer.device.startswith("cuda"):
        return None
    import torch  # its import takes seconds, and a recipe for the CPU need not load it here

    every = range(torch.cuda.device_count())
    cuda: Any = torch.cuda  # its return types are undeclared
    found = [cuda.get_device_properties(each) for each in every]
    return min((int(each.total_memory) for each in found), default=None)


def largest_rank_said(held: RankBytes, weights: str = "weights") -> str:
    """Describe, for a finding, the bytes of the rank that holds most, by kind.

    Args:
        held: Its bytes.
        weights: Name of the first part.
    """
    return (
        f"the largest holds {size(held.total)}: {weights} {size(held.weights)}, gradients "
        f"{size(held.gradients)}, optimizer {size(held.optimizer)}"
    )


def against_gpu(
    config: RunConfig,
    about: tuple[str, str],
    held_bytes: int,
    gpu: int | None,
    fix: tuple[str, str],
    rank: int = 0,
    loading_bytes: int = 0,
) -> Finding:
    """Compare a rank's bytes with its GPU: an error above its size, a warning above its share.

    Args:
        config: The recipe.
        about: Subject of the finding, and a name of the computed bytes.
        held_bytes: Bytes that the rank holds throughout a step, which is a lower bound of what it
            needs.
        gpu: Memory of its GPU in bytes, or None if unknown or if the rank is on the CPU.
        fix: How to make a rank hold less, and the recipe key for the share of a GPU that it
            reserves.
        rank: The rank.
        loading_bytes: Bytes that the rank holds at its start, while it loads the model.
    """
    (subject, seen), (less, key) = about, fix
    if loading_bytes > held_bytes:
        seen = (
            f"{seen}; while it starts, rank {rank} holds the whole model plus its own part: "
            f"{size(loading_bytes)}"
        )
        less = "Use a smaller model"
        if backends := [name for name, each in known_trainers().items() if each.loads_parts]:
            less = (
                f"Set trainer.backend={' or '.join(backends)}, whose ranks load their parts only, or "
                "use a smaller model"
            )
        held_bytes = loading_bytes
    if gpu is None:
        return ok(subject, seen)
    if held_bytes > gpu:
        return error(subject, f"{seen}; its GPU has {size(gpu)}", f"{less}.")
    share = min(1.0, trainer_resources(config)[rank].gpus) or 1.0
    if held_bytes > gpu * share:
        seen = f"{seen}; {share:g} of its GPU, which it reserves, is {size(gpu * share)}"
        return warning(subject, seen, f"{less}, or raise {key}.")
    return ok(subject, f"{seen}; its GPU has {size(gpu)}")
