"""What ranks are asked to do that train a part of a vision tower, or none. Runs in workers only."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_cases import JobStep
from megatron_grid_jobs import Watched, feed, gathered, make, with_library
from megatron_jobs import as_arrays
from parity_cases import MegatronCut as Cut
from torch import nn

from offbeat.messages.fences import StepKey
from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.ranks.peers import Peers


def run(peers: Peers, name: str, arguments: dict[str, Any]) -> Any:
    return with_library(peers, globals()[name], arguments)


def trained(
    peers: Peers, path: Path, cut: Cut, encoders: int, steps: Sequence[JobStep]
) -> dict[str, Any]:
    """Steps in two chunks each: gradients of the first, weights around all, and what is kept of whom."""
    trainer = make(peers, path, cut, encoders)
    seen: dict[str, Any] = {
        "before": as_arrays(dict(trainer.iterate_weights())),
        "initial": trainer.weights_digest(),
        "identity": trainer.identity,
        "state": trainer.state_nbytes,
        "results": [],
    }
    for number, step in enumerate(steps, start=1):
        watched = Watched(trainer)
        key = feed(trainer, step, 2, StepKey(number, number, 0), cut, encoders)
        seen.setdefault("with gradient", with_gradient(trainer))
        seen["results"].append(trainer.finish_train_step(key))
        seen.setdefault("gradients", as_arrays(gathered(trainer, watched.kept)))
        if number == 1:
            seen["first"] = as_arrays(dict(trainer.iterate_weights()))
    seen["weights"], seen["digest"] = (
        as_arrays(dict(trainer.iterate_weights())),
        trainer.weights_digest(),
    )
    for kind, values in trainer.optimizer.state().items():
        seen[kind] = tensors_of(trainer, values)
    return seen


def with_gradient(trainer: Any) -> set[str]:
    """The tensors of this rank that have a gradient, or room for one in a buffer of the library."""
    is_language = isinstance(trainer, MegatronTrainer)
    module: nn.Module = trainer.model if is_language else trainer._tower.model  # noqa: SLF001 -- no public place has it
    found = {
        name if is_language else f"tower.{name}"
        for name, each in module.named_parameters()
        if each.grad is not None or hasattr(each, "main_grad")
    }
    if is_language:
        names = {each: name for name, each in module.named_parameters()}
        buffers: Any = trainer.ddp.buffers
        for buffer in buffers:
            found |= {names[each] for each in buffer.param_index_map}
    return tensors_of(trainer, found)


def tensors_of(trainer: Any, parameters: Iterable[str]) -> set[str]:
    """The Hugging Face names of what these parameters of a rank hold."""
    names = set(parameters)
    assert names <= trainer.model_state.local_weights.keys()
    return {box.tensor for box in trainer.model_state.boxes if box.parameter in names}


def refusal(peers: Peers, path: Path, cut: Cut, encoders: int) -> str:
    """What a rank says of the patterns when it starts."""
    try:
        make(peers, path, cut, encoders)
    except UntrainableModel as refused:
        return str(refused)
    return ""
