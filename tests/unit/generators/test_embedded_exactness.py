"""What the engine generates is what the model says, whoever else runs."""

import random

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from offbeat.messages.generation import GenerateRequest, SamplingParams
from tests.support.default_dtype import sixteen_bit_default
from tests.support.generator_fixtures import Finish, MakeEngine, MakeModel, MakeRequest, SamplesOf


def full_forward_logprobs(
    model: PreTrainedModel, prompt: tuple[int, ...], tokens: list[int], temperature: float
) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()


def ragged_requests(count: int, seed: int) -> list[GenerateRequest]:
    dice = random.Random(seed)
    return [
        GenerateRequest(
            f"r{number}",
            tuple(dice.randrange(64) for _ in range(dice.choice((1, 2, 5, 17, 50)))),
            dice.choice((1, 2, 5)),
            SamplingParams(
                temperature=dice.choice((0.7, 1.0, 1.3)),
                top_p=dice.choice((1.0, 0.9)),
                top_k=dice.choice((0, 0, 5)),
                min_p=dice.choice((0.0, 0.0, 0.1)),
                max_new_tokens=dice.choice((1, 4, 30, 70)),
                stop_token_ids=(number % 64,),
                seed=number,
            ),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_logprobs_equal_a_full_forward_while_rows_join_and_leave(
    family: str,
    dtype: torch.dtype,
    tolerance: float,
    make_model: MakeModel,
    make_engine: MakeEngine,
    samples_of: SamplesOf,
) -> None:
    reference = make_model(family, dtype)
    engine = make_engine(make_model(family, dtype), max_sequences=16)
    requests = {request.request_id: request for request in ragged_requests(20, seed=1)}
    results = []
    for number, request in enumerate(requests.values()):
        engine.submit(request)
        for _ in range(number % 4):
            results += engine.step()
    while engine.has_work:
        results += engine.step()
    assert {result.request_id for result in results} == set(requests)
    for result in results:
        request = requests[result.request_id]
        for tokens, logprobs in samples_of(result):
            want = full_forward_logprobs(
                reference, request.prompt_ids, tokens, request.sampling.temperature
            )
            np.testing.assert_allclose(logprobs, want, atol=tolerance, rtol=0)


def test_an_engine_generates_the_same_while_another_thread_makes_a_16_bit_model(
    make_model: MakeModel, make_engine: MakeEngine, finish: Finish
) -> None:
    undisturbed, disturbed = make_engine(make_model()), make_engine(make_model())
    for request in ragged_requests(12, seed=5):
        undisturbed.submit(request)
        disturbed.submit(request)
    want = finish(undisturbed)
    with sixteen_bit_default():
        got = finish(disturbed)
    for id_, result in want.items():
        np.testing.assert_array_equal(got[id_].token_ids, result.token_ids)
        np.testing.assert_array_equal(got[id_].logprobs, result.logprobs)


def test_eager_and_fused_attention_give_the_same_tokens(
    make_model: MakeModel, make_engine: MakeEngine, finish: Finish
) -> None:
    results = {}
    for attention in ("eager", "sdpa"):
        model = make_model(dtype=torch.float64, attn_implementation=attention)
        assert model.config._attn_implementation == attention  # noqa: SLF001 -- kept nowhere else
        engine = make_engine(model)
        for request in ragged_requests(6, seed=3):
            engine.submit(request)
        results[attention] = finish(engine)
    assert len(results["eager"]) == 6
    for id_, result in results["eager"].items():
        np.testing.assert_array_equal(results["sdpa"][id_].token_ids, result.token_ids)


def test_a_seeded_request_draws_the_same_tokens_alone_and_in_a_crowd(
    make_model: MakeModel, make_engine: MakeEngine, finish: Finish, samples_of: SamplesOf
) -> None:
    requests = ragged_requests(12, seed=2)
    crowded = make_engine(make_model(dtype=torch.float64))
    results = {}
    for request in requests:
        crowded.submit(request)
        results |= {result.request_id: result for result in crowded.step()}
    results |= finish(crowded)
    for request in requests:
        alone = make_engine(make_model(dtype=torch.float64))
        alone.submit(request)
        (expected,) = finish(alone).values()
        got = results[request.request_id]
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.finish_reasons == expected.finish_reasons
        np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-9)


def test_a_cold_request_takes_the_most_probable_tokens(
    make_model: MakeModel, make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    model = make_model(dtype=torch.float64)
    reference = make_model(dtype=torch.float64)
    engine = make_engine(model)
    engine.submit(request_of("r", samples=3, temperature=1e-4, max_new_tokens=12))
    tokens = finish(engine)["r"].token_ids.reshape(3, 12)
    greedy = [1, 2, 3]
    with torch.inference_mode():
        for _ in range(12):
            greedy.append(int(reference(torch.tensor([greedy])).logits[0, -1].argmax()))
    assert (tokens == np.array(greedy[3:])).all()


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("after", [0, 2])
def test_a_deterministic_engine_answers_bit_for_bit_whatever_else_was_submitted(
    before: int, after: int, make_engine: MakeEngine, finish: Finish
) -> None:
    *crowd, probe = ragged_requests(6, seed=5)
    alone = make_engine(deterministic=True)
    alone.submit(probe)
    expected = finish(alone)[probe.request_id]
    engine = make_engine(deterministic=True)
    for request in crowd[:before]:
        engine.submit(request)
    engine.step()
    engine.submit(probe)
    engine.step()
    for request in crowd[before : before + after]:
        engine.submit(request)
    got = finish(engine)[probe.request_id]
    assert got.token_ids.tobytes() == expected.token_ids.tobytes()
    assert got.logprobs.tobytes() == expected.logprobs.tobytes()
    assert got.offsets.tobytes() == expected.offsets.tobytes()


def test_a_deterministic_engine_seeds_a_request_by_its_id(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    alone, crowded = make_engine(deterministic=True), make_engine(deterministic=True)
    alone.submit(request_of("r", samples=3))
    for id_ in ("a", "r", "b"):
        crowded.submit(request_of(id_, samples=3))
    results = finish(crowded)
    assert results["r"].token_ids.tolist() == finish(alone)["r"].token_ids.tolist()
    assert results["a"].token_ids.tolist() != results["b"].token_ids.tolist()


def test_a_deterministic_engine_decodes_one_request_at_a_time(
    make_engine: MakeEngine, request_of: MakeRequest
) -> None:
    engine = make_engine(deterministic=True)
    for id_ in "abc":
        engine.submit(request_of(id_, samples=2, max_new_tokens=5))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 2)


def test_samples_of_one_request_differ_and_unseeded_requests_follow_the_engine_seed(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish, samples_of: SamplesOf
) -> None:
    outcomes = []
    for seed in (1, 1, 2):
        engine = make_engine(seed=seed)
        engine.submit(request_of("r", samples=4, max_new_tokens=20))
        outcomes.append([tokens for tokens, _ in samples_of(finish(engine)["r"])])
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert len({tuple(tokens) for tokens in outcomes[0]}) == 4


def test_not_a_number_in_one_generation_of_weights_does_not_outlive_its_rows(
    make_model: MakeModel, make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    model = make_model(dtype=torch.float64)
    engine = make_engine(model)
    good = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    engine.submit(request_of("poisoned", samples=8, max_new_tokens=40))
    engine.submit(request_of("poisoned briefly", samples=8, max_new_tokens=10))
    for _ in range(12):
        engine.step()
    assert engine.running == 8
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(good[name])
    engine.submit(request_of("healthy", samples=8, max_new_tokens=60))
    results = finish(engine)
    assert np.isnan(results["poisoned"].logprobs).all()
    assert np.isfinite(results["healthy"].logprobs).all()
