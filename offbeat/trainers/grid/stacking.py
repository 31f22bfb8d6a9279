"""Features of media as one tensor, and a medium for a pass that no prompt needs."""

import numpy as np
import torch
from torch import Tensor

from offbeat.messages.media import Media
from offbeat.multimodal.rules import MediaRules


def example(rules: MediaRules) -> Media:
    """Return a medium of noise, for a pass that no prompt needs."""
    return rules.example(np.random.default_rng(0))


def stacked(made: tuple[Tensor, tuple[Tensor, ...]]) -> Tensor:
    """Return features and those of deeper layers as one tensor [blocks, F, H]."""
    embedded_FH, deep = made
    return torch.stack([embedded_FH, *deep])
