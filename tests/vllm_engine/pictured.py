"""Prompts with pictures, and what a trainer computes behind them."""

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from releases import CHUNK_BYTES, Weights, move_to, released
from transformers import AutoModelForImageTextToText

from offbeat.environments.protocol import EncodedPrompt
from offbeat.messages.generation import GenerateResult
from offbeat.messages.weights import Canary
from offbeat.models.media_canaries import canary_prompts
from offbeat.models.media_rules import media_rules
from offbeat.plugins.images.digits import drawn
from offbeat.plugins.images.processors import load_processor
from offbeat.trainers.torch.forward import top_logprobs
from offbeat.weight_sync.canary import KEPT, TOLERANCE_FLOAT32
from tests.support.image_text_models import logprobs_with_features_in_the_prompt_alone
from tests.support.plain_modules import ModuleSource

DIGITS = Path(__file__).parents[2] / "models" / "tiny-digits"


@cache
def digits_of(*indices: int) -> EncodedPrompt:
    """A prompt with these pictures, as a worker encodes it."""
    processor = load_processor(str(DIGITS), trust_remote_code=False)
    drawings = [drawn({"seed": 0, "index": index}) for index in indices]
    return processor.encode("<image>" * len(indices) + "=", drawings)


@cache
def pictured(version: int, stale: str = "") -> Weights:
    """Version 0 is the model of the repository; each other one is far from it, tower and all.

    Of ``stale``, a part of the model, the release holds the weights of version 0.
    """
    model = _model(version)
    rules = media_rules(model.config)
    asked = canary_prompts(model.config.text_config.vocab_size, rules)
    canary = Canary(asked, *top_logprobs(model, asked, KEPT), TOLERANCE_FLOAT32)
    sent, loaded = _model(version), _model(0)
    if stale:
        sent.get_submodule(stale).load_state_dict(loaded.get_submodule(stale).state_dict())
    source = ModuleSource(sent, CHUNK_BYTES)
    packed = [chunk.copy() for chunk, _ in source.chunks()]
    return Weights(model, released(version, source.manifest, packed, canary))


def _model(version: int) -> Any:
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(DIGITS, local_files_only=True, dtype=torch.float32)
    move_to(version, model)
    return model.eval()


def worst_error(
    model: Any, prompt: EncodedPrompt, result: GenerateResult, asked: tuple[int, ...] = ()
) -> float:
    """Largest difference between a logprob of the engine and the model's, in nats.

    ``asked`` are ids behind the prompt, among which no picture is.
    """
    media, gaps = prompt.media, list[float]()
    assert media is not None
    for start, end in pairwise(result.offsets.tolist()):
        response = [*asked, *result.token_ids[start:end].tolist()]
        with torch.no_grad():
            want = logprobs_with_features_in_the_prompt_alone(
                model, prompt.token_ids, response, media
            )
        gap = result.logprobs[start:end] - want[len(asked) :].numpy()
        gaps.append(float(np.abs(gap).max()))
    return max(gaps)
