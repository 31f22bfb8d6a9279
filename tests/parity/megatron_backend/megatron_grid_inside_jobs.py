"""What modules compute inside a step: of a grid beside megatron-core, and of the torch trainer in one process.

Runs in workers only. Entries are named by what a module is: ``layer 0`` is the same of both.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from activations import Activations, recorded, recorded_of_tokens
from megatron_cases import JobStep
from megatron_grid_jobs import ENCODER, feed, make, with_library
from parity_cases import Cut as TorchCut
from parity_cases import MegatronCut as Cut
from torch import Tensor
from torch_backend import grid_jobs

from offbeat.messages.fences import StepKey
from offbeat.plugins.encoder_ranks.megatron.encoder import MegatronEncoderTrainer
from offbeat.plugins.megatron.groups import tensor_group
from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer
from offbeat.trainers.ranks.peers import Peers, SingleRank

HEAD = "head"


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


def inside(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: JobStep,
    *,
    encoders: int,
    tower: Sequence[str],
    kind: str = "ExactEncoder",
) -> Activations:
    """Activations of this rank's modules in a step of one chunk, whole on each rank that shares them."""
    trainer = make(peers, path, cut, encoders, encoder=ENCODER[kind])
    if isinstance(trainer, MegatronEncoderTrainer):
        model = trainer._tower.model  # noqa: SLF001 -- no public place has it
        with recorded(model, tower) as found:
            feed(trainer, step, 1, StepKey(1, 1, 0), cut, encoders)
        return found
    layers, heads = _modules(trainer)

    def flat(name: str, made: Tensor) -> Tensor:
        if name == HEAD:
            logits_UV = _joined(made.reshape(-1, made.shape[-1]), dim=1)
            return logits_UV[:, : trainer.vocabulary]
        whole_TRH = _joined(made, dim=0) if cut.sequence else made
        return whole_TRH.transpose(0, 1).reshape(-1, made.shape[-1])

    with recorded_of_tokens(trainer, layers, heads, flat) as found:
        feed(trainer, step, 1, StepKey(1, 1, 0), cut, encoders)
    return found


def _modules(trainer: MegatronTrainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layers of this stage by their number in the model, and the head, if it is the last."""
    layout, decoder = trainer.layout, trainer.model.decoder
    numbers = layout.grid.list_layers(layout.pipeline_rank, trainer.architecture.layers)
    layers = {f"layer {at}": each for at, each in zip(numbers, decoder.layers, strict=True)}
    return layers, {HEAD: trainer.model.output_layer} if layout.is_last_stage else {}


def _joined(part: Tensor, dim: int) -> Tensor:
    """Parts of the ranks that share matrices, end to end."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(tensor_group()))]
    dist.all_gather(parts, part.contiguous(), group=tensor_group())
    return torch.cat(parts, dim=dim)


def inside_one(_: Peers, path: Path, step: JobStep, *, tower: Sequence[str]) -> Activations:
    """The same of the torch trainer in one process that holds both sides."""
    trainer = grid_jobs.make(SingleRank(), path, TorchCut(max_tokens=1000), (), 1, 0)
    model = trainer.module
    layers = {f"layer {at}": each for at, each in enumerate(model.get_decoder().layers)}
    heads = {HEAD: model.get_output_embeddings()}

    def flat(_: str, made: Tensor) -> Tensor:
        return made.reshape(-1, made.shape[-1])

    with recorded(model, tower) as seen, recorded_of_tokens(trainer, layers, heads, flat) as found:
        grid_jobs.feed(trainer, step, step.loss, 1, StepKey(1, 1, 0))
    return seen | found
