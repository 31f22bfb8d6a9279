"""What the ranks of a world are asked to do with the losses of routers. Runs in workers only."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parity_cases import BALANCED, Arrays, Cut, Step
from torch import Tensor
from torch_jobs import as_arrays, feed, gradients, make

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch.routing import find_routers


def of_routers(
    peers: Peers, path: Path, cut: Cut, step: Step, loss: LossSpec, chunks: Sequence[int]
) -> tuple[dict[int, Arrays], Arrays]:
    """Gradients after a first step, of the routers' losses alone, by number of chunks; and its shares.

    Without advantages nothing else is there.
    """
    trainer: Any = make(peers, path, cut)
    trainer.finish_train_step(feed(trainer, step, loss, 2, StepKey(1, 1, 0)))
    silent = replace(step, advantages=[(0.0,) * len(each) for each in step.advantages])
    seen = dict[int, Arrays]()
    for attempt, count in enumerate(chunks, start=2):
        key = feed(trainer, silent, loss, count, StepKey(2, attempt, 0))
        seen[count] = {name: each for name, each in gradients(trainer).items() if each.any()}
        trainer.abort_train_step(key)
    return seen, as_arrays({"shares": trainer.expert_load.state()})


def plainly(peers: Peers, path: Path, cut: Cut, step: Step, loss: LossSpec) -> Arrays:
    """The same the slow way: one unpadded branch after another, the formulas as in the papers."""
    trainer: Any = make(peers, path, cut)
    trainer.finish_train_step(feed(trainer, step, loss, 2, StepKey(1, 1, 0)))
    model, seen, total = trainer.module, list[Tensor](), torch.zeros((), dtype=torch.float64)
    for each in find_routers(model):
        each.register_forward_hook(lambda _, __, output: seen.append(output[0]))
    for group in step.groups:
        samples = group.get("branch_samples", np.arange(len(group["response_offsets"]) - 1))
        for sample in np.unique(samples):
            terms, trained = list[Tensor](), 0
            for branch in np.flatnonzero(samples == sample):
                own = slice(*group["response_offsets"][branch : branch + 2])
                wanted = np.flatnonzero(group["loss_mask"][own])
                if not len(wanted):
                    continue
                trained += len(wanted)
                ids = np.concatenate([group["prompt_ids"], group["response_ids"][own]])
                seen.clear()
                model(input_ids=torch.tensor(ids, dtype=torch.int64)[None])
                first = len(group["prompt_ids"])
                for every, shares_E in zip(seen, trainer.expert_load.state(), strict=True):
                    terms.append(_loss(every[first : first + wanted[-1]], shares_E, model))
            if trained:
                part = torch.stack(terms).sum()
                total = total + (part / trained if loss.config.normalize == "sequences" else part)
    total.backward()
    return {name: each for name, each in gradients(trainer).items() if each.any()}


def _loss(logits: Tensor, shares_E: Tensor, model: Any) -> Tensor:
    if model.config.model_type == "glm4_moe":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    else:
        scores = logits.softmax(-1)
    balance = len(shares_E) * (scores * shares_E).sum()
    flatness = logits.exp().sum(-1).log().square().sum()
    return BALANCED["load_balancing_coef"] * balance + BALANCED["z_loss_coef"] * flatness
