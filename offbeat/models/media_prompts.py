"""Random prompts with media, for proofs that passes compute the model's definition."""

from typing import Final, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_rules import media_rules

RESPONSE_TOKENS: Final = 3
_TEXT_TOKENS: Final = (2, 5)  # of the prompts, one medium in front of each


class MediaPrompt(NamedTuple):
    """A prompt with one medium, and responses to it without a placeholder."""

    prompt: list[int]
    responses: list[list[int]]
    media: Media


def media_prompts(model: PreTrainedModel, max_model_len: int) -> list[MediaPrompt]:
    """Return prompts of different lengths with different media.

    Empty if the model reads no media, or if its longest sequence is too short for one.
    """
    rules = media_rules(model.config)
    if not rules.reads_media:
        return []
    rng = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]

    def text(tokens: int) -> list[int]:
        others = rng.integers(vocabulary - 1, size=tokens)
        return (others + (others >= rules.placeholder)).tolist()

    made = list[MediaPrompt]()
    for tokens in _TEXT_TOKENS:
        media = rules.example(rng)
        prompt = text(1) + [rules.placeholder] * rules.count_features(media) + text(tokens)
        responses = [text(RESPONSE_TOKENS) for _ in range(2)]
        made.append(MediaPrompt(prompt, responses, media))
    longest = max(len(each.prompt) for each in made) + RESPONSE_TOKENS
    return made if longest <= max_model_len else []
