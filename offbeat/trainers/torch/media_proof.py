"""Packed rows of a startup proof, and the proof of rows behind media."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.models.media_passes import FeaturesOf
from offbeat.models.media_prompts import MediaPrompt, media_prompts
from offbeat.models.media_rules import media_rules
from offbeat.models.plain import distance, eager_attention, plain_logprobs
from offbeat.trainers.batches.packing import Batch, PackedRows, flatten, pack
from offbeat.trainers.batches.rows import plan_rows
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch.forward import packed_logprobs
from offbeat.trainers.torch.model import vocabulary
from offbeat.transfer_queue.schema import PROMPT_IDS, RESPONSE_IDS, RESPONSE_OFFSETS, Columns

_WIDEST: Final = 1 << 30  # one row for all samples of a group
_log = structlog.stdlib.get_logger()


@torch.no_grad()
def prove_media(
    model: PreTrainedModel,
    max_model_len: int,
    dtype: torch.dtype,
    tolerance: float,
    *,
    share: bool,
    split: bool,
) -> None:
    """Prove rows of groups with media on the model itself, if it reads any.

    Args:
        model: The whole model on its device.
        max_model_len: Tokens of the longest sequence of the run.
        dtype: Dtype that it computes in.
        tolerance: Largest mean distance of a sample.
        share: Samples share one copy of their prompt.
        split: Rows are laid end to end.

    Raises:
        UntrainableModel: A sample differs from transformers' own pass over its ids and media.
    """
    prompts = media_prompts(model, max_model_len)
    if not prompts:
        return
    with eager_attention(model):
        want = [
            plain_logprobs(model, each.prompt + response, media=each.media)[-len(response) :]
            for each in prompts
            for response in each.responses
        ]
    rules = media_rules(model.config)
    groups = [_columns(each) for each in prompts]
    batch = flatten(groups, only_trained=False, vocabulary=vocabulary(model), media_rules=rules)
    firsts = [0] * len(prompts)
    samples = in_rows(model, batch, firsts, share=share, split=split, dtype=dtype).values()
    gap, name = distance(samples, want), type(model).__name__
    if problem := gap.problem(tolerance):
        problem = f"computes log-probabilities behind {rules.noun} that are {problem}"
        raise UntrainableModel(name, problem, f"Train another model, or leave {rules.noun} out")
    _log.info("model.media_proved", model=name, dtype=str(dtype), **gap._asdict())


def _columns(each: MediaPrompt) -> Columns:
    tokens = [len(response) for response in each.responses]
    return {
        PROMPT_IDS: np.array(each.prompt, np.int32),
        RESPONSE_IDS: np.concatenate(each.responses).astype(np.int32),
        RESPONSE_OFFSETS: np.cumsum([0, *tokens]),
        **each.media,
    }


@torch.no_grad()
def in_rows(
    model: PreTrainedModel,
    batch: Batch,
    firsts: Sequence[int],
    *,
    share: bool,
    split: bool,
    dtype: torch.dtype = torch.float32,
    features_of: FeaturesOf | None = None,
) -> dict[int, Tensor]:
    """Return log-probabilities of all responses, computed in one microbatch as a trainer does."""
    packed = packed_in_one(batch, firsts, share=share, split=split)
    logprobs = torch.empty(len(batch.tokens))
    got_N = packed_logprobs(model, packed, 1.0, dtype, features_of=features_of)
    logprobs[torch.from_numpy(packed.source_N)] = got_N.float().cpu()
    return dict(enumerate(logprobs.split(batch.length_S.tolist())))


def packed_in_one(batch: Batch, firsts: Sequence[int], *, share: bool, split: bool) -> PackedRows:
    """Return the rows of a batch in one microbatch, their prompts at these positions."""
    rows = plan_rows(batch, response_tokens=_WIDEST if share else 0, max_tokens=_WIDEST)
    packed = pack(batch, rows, flat=split)
    first_R = np.array([firsts[row.group] for row in rows])
    shift = np.repeat(first_R, [row.length for row in rows])[None] if split else first_R[:, None]
    return replace(packed, positions_RT=packed.positions_RT + shift)
