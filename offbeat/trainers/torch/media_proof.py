"""Startup proof that packed rows behind media compute what the model computes per sample."""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# torch declares some functions without types.

from typing import Final

import numpy as np
import structlog
import torch
from transformers import PreTrainedModel

from offbeat.model_proof.media_prompts import MediaPrompt, media_prompts
from offbeat.model_proof.plain import distance, eager_attention, plain_logprobs
from offbeat.multimodal.rules import media_rules
from offbeat.trainers.batches.packing import flatten, pack
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
    rows = plan_rows(batch, response_tokens=_WIDEST if share else 0, max_tokens=_WIDEST)
    packed = pack(batch, rows, flat=split)
    got = torch.empty(len(batch.tokens))
    got_N = packed_logprobs(model, packed, 1.0, dtype)
    got[torch.from_numpy(packed.source_N)] = got_N.float().cpu()
    samples = got.split(batch.length_S.tolist())
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
