"""Random prompts with pictures, on which a model is proved to compute what it defines.

Legend: I pictures.
"""

from typing import Final, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.multimodal.picture_rules import picture_rules

RESPONSE_TOKENS: Final = 3
_TEXT_TOKENS: Final = (2, 5)  # of the prompts, behind a picture each


class PicturedPrompt(NamedTuple):
    """A prompt with one picture, and responses behind it without a placeholder."""

    prompt: list[int]
    responses: list[list[int]]
    media: Media


def pictured_prompts(model: PreTrainedModel, max_model_len: int) -> list[PicturedPrompt]:
    """Return prompts of different lengths with different pictures.

    Empty if the model reads none, or if its longest sequence is too short for one.
    """
    rules = picture_rules(model.config)
    if rules is None:
        return []
    rng = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().get_parameter("weight").shape[0]

    def text(tokens: int) -> list[int]:
        others = rng.integers(vocabulary - 1, size=tokens)
        return (others + (others >= rules.placeholder)).tolist()

    made = list[PicturedPrompt]()
    for tokens in _TEXT_TOKENS:
        media = rules.example(rng)
        prompt = text(1) + [rules.placeholder] * rules.features(media) + text(tokens)
        responses = [text(RESPONSE_TOKENS) for _ in range(2)]
        made.append(PicturedPrompt(prompt, responses, media))
    longest = max(len(each.prompt) for each in made) + RESPONSE_TOKENS
    return made if longest <= max_model_len else []
