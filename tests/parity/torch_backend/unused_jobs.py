"""What ranks are asked to do with weights that not all of them use. Runs in workers only."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from parity_cases import TOKENS, Arrays, Cut, Step
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch_jobs import gradients, make, mine

from offbeat.messages.fences import StepKey
from offbeat.trainers.ranks.peers import Peers
from offbeat.transfer_queue.tensordict_codec import build_chunk

UNUSED = ("model.layers.0.self_attn.q_norm", "model.layers.0.self_attn.k_norm")
"""By rank of two, the norm whose weight gets no gradient there. Both have one shape."""


def fed(
    peers: Peers, path: Path, cut: Cut, step: Step, prompt_indices: Sequence[int] | None = None
) -> tuple[list[int], Arrays]:
    """Return the groups of this rank, and the summed gradients of all.

    ``prompt_indices``: those of a rank that uses all of its weights; None: its share, beside others.
    """
    trainer = make(peers, path, cut)
    own = list(prompt_indices or mine(trainer, step, range(len(step.groups))))
    if prompt_indices is None:
        norm = trainer.module.get_submodule(UNUSED[peers.rank])
        norm.forward = partial(without_gradient, norm)
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, TOKENS)
    groups, advantages = [step.groups[i] for i in own], [step.advantages[i] for i in own]
    trainer.train_microbatch(key.next(), build_chunk(groups), advantages, [0] * len(own))
    return own, gradients(trainer)


def without_gradient(norm: nn.RMSNorm, hidden: Tensor) -> Tensor:
    assert norm.weight is not None
    return rms_norm(hidden, norm.normalized_shape, norm.weight.detach(), norm.eps)
