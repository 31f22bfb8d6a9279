"""What the ranks of a world are asked to do with adapters. Runs in workers only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from parity_cases import TOKENS, Arrays, Cut, Step
from torch import Tensor, nn
from torch_backend.torch_bugs import Exact
from torch_jobs import as_arrays, feed, gradients, make, mine, nbytes

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.plugins.lora.adapters import Adapters
from offbeat.plugins.lora.section import LoraConfig
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.trainer_plugin import RankBytes
from offbeat.transfer_queue.tensordict_codec import build_chunk

LORA = LoraConfig(rank=4, alpha=8.0)
CANARIES = ((2, 5, 14, 8, 17), (3, 9, 4, 11, 6))
KEPT = 8


class Adapting(Exact):
    """With adapters of rank 4 on every linear module."""

    trained_by = Adapters

    def __init__(self, path: Path, *, trainer: Any, **given: Any) -> None:
        super().__init__(path, trainer=trainer.model_copy(update={"lora": LORA}), **given)


class KeepsPartsOfA(Adapting):
    """Nobody adds up the gradients that matrices B, cut by columns, give the matrices A before them."""

    def plant(self, model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith("q_proj.lora_B.default"):
                module.register_forward_pre_hook(self._keep_part, prepend=True)

    def _keep_part(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda whole: whole * (1 + self.peers.rank) / 3)


KINDS = {each.__name__: each for each in (Adapting, KeepsPartsOfA)}


def trained(
    peers: Peers,
    path: Path,
    cut: Cut,
    step: Step,
    root: Path,
    load: Path | None = None,
    kind: str = "Adapting",
) -> dict[str, Any]:
    """Load a state or start anew, take a step; state and model are written under ``root``."""
    trainer: Any = make(peers, path, cut, KINDS[kind])
    seen: dict[str, Any] = {"initial": trainer.weights_digest(), "identity": trainer.identity}
    weights = trainer.module.named_parameters()
    seen["frozen"] = {str(each.dtype) for _, each in weights if not each.requires_grad}
    if load is not None:
        trainer.load_state(load)
        seen["loaded"] = trainer.weights_digest()
    number = trainer.steps_applied + 1
    key = feed(trainer, step, LossSpec(), 2, StepKey(number, number, 0))
    seen["gradients"] = gradients(trainer)
    seen["result"] = trainer.finish_train_step(key)
    seen["digest"] = trainer.weights_digest()
    seen["adapters"] = as_arrays(dict(trainer.iterate_weights()))
    seen["bytes"] = held(trainer)
    seen["reference gap"] = reference_gap(trainer, step)
    seen["canaries"] = trainer.top_logprobs(CANARIES, KEPT)
    assert trainer.weights_digest() == seen["digest"]
    trainer.save_state(root / "state")
    trainer.save(root / "model")
    trainer.reset()
    seen["after reset"] = trainer.weights_digest()
    return seen


def split(
    peers: Peers, path: Path, cut: Cut, step: Step, chunks: Sequence[int]
) -> dict[int, Arrays]:
    """Gradients of a second step by number of chunks; in a first one those of matrices A are zero."""
    trainer: Any = make(peers, path, cut, Adapting)
    trainer.finish_train_step(feed(trainer, step, TOKENS, 2, StepKey(1, 1, 0)))
    seen = dict[int, Arrays]()
    for attempt, count in enumerate(chunks, start=2):
        key = feed(trainer, step, TOKENS, count, StepKey(2, attempt, 0))
        seen[count] = gradients(trainer)
        trainer.abort_train_step(key)
    return seen


def held(trainer: Any) -> RankBytes:
    """Bytes of this rank after a step; gradients are as large as the weights that are trained."""
    parameters = list(trainer.module.parameters())
    return RankBytes(
        nbytes([*parameters, *trainer.module.buffers()]),
        nbytes(each for each in parameters if each.requires_grad),
        nbytes(trainer.updates.moments().values()),
    )


def reference_gap(trainer: Any, step: Step) -> float:
    """Distance between the reference and a policy whose adapters add nothing."""
    groups = [step.groups[i] for i in mine(trainer, step, range(len(step.groups)))]

    def column(name: str) -> Any:
        policy = name == "policy"
        found = trainer.prepare_logprobs(
            build_chunk(groups), policy=policy, reference=not policy, temperature=1.0
        )
        return np.concatenate([each[f"{name}_logprobs"] for each in found])

    reference = column("reference")
    scale(trainer, 0.0)
    gap = float(np.abs(reference - column("policy")).max())
    scale(trainer, trainer.trained.adapter.scaling)
    assert not np.array_equal(reference, column("policy"))
    return gap


def scale(trainer: Any, scaling: float) -> None:
    modules: list[Any] = [each for each in trainer.module.modules() if hasattr(each, "lora_A")]
    for module in modules:
        module.scaling = {"default": scaling}
