"""Features of pictures may be computed elsewhere than in the tower of the model that reads them."""

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from offbeat.messages.media import Media
from offbeat.models.media_passes import Features, write_media
from offbeat.models.media_placing import RowSpan, place_media
from offbeat.models.media_rules import media_rules
from tests.support.image_text_models import make, pictures, prompt_with
from tests.support.pictures import features


@torch.no_grad()
def test_given_features_stand_where_those_of_the_models_own_tower_would() -> None:
    model: Any = make("qwen3_vl")
    rules, media = media_rules(model.config), (pictures(0, 1, "qwen3_vl"),)
    prompt = prompt_with(1, 5, 6)
    spans, positions_RT = [RowSpan(0, 0, len(prompt))], np.arange(len(prompt))[None]
    placed_here = place_media(rules, [prompt], media, spans, positions_RT)
    ids = torch.tensor([prompt])
    with write_media(model, rules, placed_here):
        want = model(input_ids=ids, use_cache=False).logits
    made, asked = features(model, media), list[tuple[Media, ...]]()

    def given(_: PreTrainedModel, requested: tuple[Media, ...]) -> Features:
        asked.append(requested)
        return made

    del model.model.visual
    with write_media(model, rules, placed_here, given):
        got = model(input_ids=ids, use_cache=False).logits
    assert asked == [media]
    assert torch.equal(got, want)
