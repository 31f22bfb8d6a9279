"""What the ranks of a world are asked to do with adapters. Runs in workers only."""

from pathlib import Path
from typing import Any

import numpy as np
from parity_cases import Cut, Step
from torch_jobs import as_arrays, feed, make, mine

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.lora import LoraConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.lora_trainer import LoraTrainer


class Adapting(LoraTrainer):
    """With adapters of rank 4 on every linear module."""

    def __init__(self, path: Path, *, trainer: Any, **given: Any) -> None:
        lora = LoraConfig(rank=4, alpha=8.0)
        super().__init__(path, trainer=trainer.model_copy(update={"lora": lora}), **given)


def trained(
    peers: Peers, path: Path, cut: Cut, step: Step, root: Path, load: Path | None = None
) -> dict[str, Any]:
    """Load a state or start anew, take a step; state and model are written under ``root``."""
    trainer: Any = make(peers, path, cut, Adapting)
    seen: dict[str, Any] = {"initial": trainer.weights_digest(), "identity": trainer.identity}
    weights = trainer.module.named_parameters()
    seen["frozen"] = {str(each.dtype) for _, each in weights if not each.requires_grad}
    if load is not None:
        trainer.load_state(load)
        seen["loaded"] = trainer.weights_digest()
    number = trainer.steps_applied + 1
    key = feed(trainer, step, LossSpec(), 2, StepKey(number, number, 0))
    seen["result"] = trainer.finish_train_step(key)
    seen["digest"] = trainer.weights_digest()
    seen["adapters"] = as_arrays(dict(trainer.named_weights()))
    seen["reference gap"] = reference_gap(trainer, step)
    trainer.save_state(root / "state")
    trainer.save(root / "model")
    trainer.reset()
    seen["after reset"] = trainer.weights_digest()
    return seen


def reference_gap(trainer: LoraTrainer, step: Step) -> float:
    """Distance between the reference and a policy whose adapters add nothing."""
    groups = [step.groups[i] for i in mine(trainer, step, range(len(step.groups)))]

    def column(name: str) -> Any:
        policy = name == "policy"
        found = trainer.prepare_logprobs(
            groups, policy=policy, reference=not policy, temperature=1.0
        )
        return np.concatenate([each[f"{name}_logprobs"] for each in found])

    reference = column("reference")
    scale(trainer, 0.0)
    gap = float(np.abs(reference - column("policy")).max())
    scale(trainer, trainer.adapter.scaling)
    assert not np.array_equal(reference, column("policy"))
    return gap


def scale(trainer: LoraTrainer, scaling: float) -> None:
    modules: list[Any] = [each for each in trainer.module.modules() if hasattr(each, "lora_A")]
    for module in modules:
        module.scaling = {"default": scaling}
