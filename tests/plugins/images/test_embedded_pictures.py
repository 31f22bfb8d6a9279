"""What the embedded engine samples behind pictures is what the model says about them."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from offbeat.generators.errors import UndecodableModel
from offbeat.messages.failures import InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.media import Media
from tests.support.generator_fixtures import Finish, MakeEngine, SamplesOf
from tests.support.image_text_models import (
    PLACEHOLDER,
    HalvesPictures,
    logprobs_with_features_in_the_prompt_alone,
    make,
    pictures,
    plain_logprobs,
    prompt_with,
)
from tests.support.pictures import patches, pixels


def request(
    id_: str, prompt: tuple[int, ...], media: Media | None, samples: int = 3
) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=6, seed=len(prompt))
    return GenerateRequest(id_, prompt, samples, sampling, media)


def requests_of(family: str) -> tuple[GenerateRequest, ...]:
    """Prompts of different lengths, two of them with the same tokens and other pictures."""
    return (
        request("one", prompt_with(1, 5), pictures(1, family=family)),
        request("other", prompt_with(1, 5), pictures(2, family=family)),
        request("two", prompt_with(2, 8, 9, 10), pictures(3, 2, family)),
        request("text", (7, 8, 9), None),
    )


REQUESTS = requests_of("idefics3")


def without_sampled_placeholders(
    dtype: torch.dtype = torch.float32, family: str = "idefics3"
) -> PreTrainedModel:
    """A model that never samples a placeholder, so that transformers can check every sample."""
    model = make(family, dtype)
    if family == "qwen3_vl_moe":  # torch multiplies groups of rows in at most 32 bits
        model.set_experts_implementation("eager")
    head: Any = model.get_output_embeddings()
    bias = torch.zeros(len(head.weight), dtype=dtype)
    bias[PLACEHOLDER] = -1e4
    head.bias = torch.nn.Parameter(bias)
    return model


def assert_samples_are_those_of(
    plain: PreTrainedModel,
    results: dict[str, GenerateResult],
    samples_of: SamplesOf,
    tolerance: float = 1e-6,
    family: str = "idefics3",
) -> None:
    for each in requests_of(family):
        for tokens, logprobs in samples_of(results[each.request_id]):
            with torch.no_grad():
                want = plain_logprobs(plain, each.prompt_ids, tokens, each.media)
            np.testing.assert_allclose(logprobs, want.numpy(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-8)])
def test_logprobs_behind_pictures_equal_the_plain_forward_pass_of_each_sample(
    dtype: torch.dtype,
    tolerance: float,
    family: str,
    make_engine: MakeEngine,
    finish: Finish,
    samples_of: SamplesOf,
) -> None:
    engine = make_engine(without_sampled_placeholders(dtype, family))
    for each in requests_of(family):
        engine.submit(each)
    plain = without_sampled_placeholders(dtype, family)
    assert_samples_are_those_of(plain, finish(engine), samples_of, tolerance, family)


def test_a_new_vision_tower_is_used_from_the_next_prompt_on(
    make_engine: MakeEngine, finish: Finish, samples_of: SamplesOf
) -> None:
    engine, plain = make_engine(without_sampled_placeholders()), without_sampled_placeholders()
    engine.submit(REQUESTS[0])
    old = finish(engine)["one"].logprobs
    for model in (engine.model, plain):
        with torch.no_grad():
            for name, each in model.named_parameters():
                if "vision" in name or "connector" in name:
                    each.mul_(1.1)
    engine.set_version(1)
    for each in REQUESTS:
        engine.submit(each)
    results = finish(engine)
    assert not np.allclose(results["one"].logprobs, old)
    assert_samples_are_those_of(plain, results, samples_of)


def test_another_picture_behind_the_same_tokens_has_other_logprobs(
    make_engine: MakeEngine, finish: Finish
) -> None:
    engine = make_engine(make("idefics3"))
    for each in REQUESTS:
        engine.submit(each)
    results = finish(engine)
    first, other = (results[id_].logprobs[0] for id_ in ("one", "other"))
    assert abs(first - other) > 1e-3


def test_a_sampled_placeholder_is_a_token_and_gets_no_feature(
    make_engine: MakeEngine, finish: Finish, samples_of: SamplesOf
) -> None:
    engine, plain = make_engine(make("idefics3")), make("idefics3")
    media, prompt = pictures(1), prompt_with(1, 5)
    history = (*prompt, 9, PLACEHOLDER, PLACEHOLDER, 10)
    engine.submit(request("history", history, media))
    for tokens, logprobs in samples_of(finish(engine)["history"]):
        behind = (*history[len(prompt) :], *tokens)
        with torch.no_grad():
            want = logprobs_with_features_in_the_prompt_alone(plain, prompt, behind, media)
        np.testing.assert_allclose(logprobs, want[-len(tokens) :].numpy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("prompt", "media", "problem"),
    [
        (prompt_with(1, 5), pictures(1, 2), "has 4 placeholder tokens, but its pictures take 8"),
        (prompt_with(1, 5), pixels((3, 16, 16)), "picture 0 of \\[3, 16, 16\\]"),
        (prompt_with(1, 5), patches((1, 4, 4)), "pictures as patches, but the model reads pixels"),
    ],
)
def test_pictures_that_do_not_fit_the_prompt_or_the_model_are_refused(
    make_engine: MakeEngine, prompt: tuple[int, ...], media: Media, problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        make_engine(make("idefics3")).submit(request("bad", prompt, media))


def test_a_text_model_refuses_pictures(make_engine: MakeEngine) -> None:
    with pytest.raises(InvalidRequest, match="the model reads only text"):
        make_engine().submit(request("bad", (1, 2, 3), pictures(0)))


def test_a_model_that_computes_pictures_otherwise_is_refused_at_the_start(
    make_engine: MakeEngine,
) -> None:
    model = HalvesPictures(make("idefics3").config).eval()
    model.load_state_dict(make("idefics3").state_dict())
    with pytest.raises(UndecodableModel, match=r"decoding behind pictures are off by"):
        make_engine(model)
