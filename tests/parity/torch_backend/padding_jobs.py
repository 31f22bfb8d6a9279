"""A model without a gradient at one token, trained on fewer groups than ranks. Runs in workers only."""

from pathlib import Path

import numpy as np
from parity_cases import TOKENS, Arrays, Cut, Step
from torch import Tensor, nn
from torch_jobs import gradients, make, mine

from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers
from offbeat.transfer_queue.tensordict_codec import build_chunk


def one_group(peers: Peers, path: Path, cut: Cut, step: Step) -> Arrays:
    """Return the summed gradients of the first group, which other ranks have no row of."""
    trainer = make(peers, path, cut)
    trainer.module.get_submodule("model.embed_tokens").register_forward_hook(add_magnitude)
    group = step.groups[0] | {
        name: np.maximum(step.groups[0][name], 1) for name in ("prompt_ids", "response_ids")
    }
    own = len(mine(trainer, step, range(1)))
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, TOKENS)
    trainer.train_microbatch(
        key.next(), build_chunk([group][:own]), step.advantages[:own], [0] * own
    )
    return gradients(trainer)


def add_magnitude(_: nn.Module, ids: tuple[Tensor], embedded_RTH: Tensor) -> Tensor:
    """Add the size of an embedding, which is 0 and without a gradient at token 0."""
    own_RTH = embedded_RTH * (ids[0] != 0).unsqueeze(-1)
    return own_RTH + own_RTH.square().mean(-1, keepdim=True).sqrt()
