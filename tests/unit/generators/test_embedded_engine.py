"""The scheduler: what starts, what ends and why, what is refused."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import find_undecodable_layer, load_model
from offbeat.generators.errors import UndecodableModel
from offbeat.messages.failures import InvalidRequest
from offbeat.messages.generation import GenerateResult
from tests.support.generator_fixtures import Finish, MakeEngine, MakeModel, MakeRequest, SamplesOf


def test_a_request_ends_at_its_length_and_says_so(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine()
    engine.submit(request_of("r", samples=3, max_new_tokens=7))
    result = finish(engine)["r"]
    assert result.offsets.tolist() == [0, 7, 14, 21]
    assert result.finish_reasons == ("length",) * 3
    assert (result.engine, result.incarnation) == ("engine-0", "first")
    assert (result.token_ids.dtype, result.logprobs.dtype) == (np.int32, np.float32)


def test_a_stop_token_ends_a_sample_and_is_kept(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish, samples_of: SamplesOf
) -> None:
    engine = make_engine(eos_token_ids=(5,))
    engine.submit(request_of("r", samples=16, max_new_tokens=100, stop_token_ids=(9, 11)))
    result = finish(engine)["r"]
    stopped = 0
    for (tokens, _), reason in zip(samples_of(result), result.finish_reasons, strict=True):
        ends = [token in (5, 9, 11) for token in tokens]
        assert not any(ends[:-1])
        assert (reason == "stop") == ends[-1]
        stopped += ends[-1]
    assert stopped > 8


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"min_p": 1.0}])
def test_a_filter_of_one_request_is_nothing_to_another_and_ends_with_it(
    filters: dict[str, Any],
    make_engine: MakeEngine,
    request_of: MakeRequest,
    finish: Finish,
    samples_of: SamplesOf,
) -> None:
    engine = make_engine()
    engine.submit(request_of("greedy", samples=4, max_new_tokens=8, seed=1, **filters))
    engine.submit(request_of("free", samples=4, max_new_tokens=30, seed=2))
    results = finish(engine)
    greedy = [tokens for tokens, _ in samples_of(results["greedy"])]
    assert greedy == [greedy[0]] * 4, "only the most probable token is left"
    alone = make_engine()
    alone.submit(request_of("free", samples=4, max_new_tokens=30, seed=2))
    assert results["free"].token_ids.tolist() == finish(alone)["free"].token_ids.tolist()
    assert len({tuple(tokens) for tokens, _ in samples_of(results["free"])}) == 4


def test_a_stop_string_over_two_tokens_ends_a_sample_with_the_second_one(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish, samples_of: SamplesOf
) -> None:
    def decode(token_ids: Sequence[int]) -> str:
        return "".join(f"{token:02}" for token in token_ids)

    def drawn(*stop: str) -> GenerateResult:
        engine = make_engine(decode=decode)
        engine.submit(request_of("r", samples=8, max_new_tokens=60, seed=1, stop=stop))
        return finish(engine)["r"]

    whole = [tokens for tokens, _ in samples_of(drawn())]
    stop = decode(whole[0])[5:7]  # a digit of two tokens each
    result = drawn(stop)
    ended = 0
    for tokens, (kept, _), reason in zip(
        whole, samples_of(result), result.finish_reasons, strict=True
    ):
        found = [stop in decode(tokens[: count + 1]) for count in range(len(tokens))]
        length = found.index(True) + 1 if True in found else len(tokens)
        assert list(kept) == list(tokens[:length])
        assert reason == ("stop_string" if True in found else "length")
        ended += True in found
    assert ended


def test_a_stop_token_of_one_request_is_nothing_to_another(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine()
    engine.submit(
        request_of("stops", samples=4, max_new_tokens=30, stop_token_ids=tuple(range(64)))
    )
    engine.submit(request_of("goes on", samples=4, max_new_tokens=30))
    results = finish(engine)
    assert len(results["stops"].token_ids) == 4
    assert len(results["goes on"].token_ids) == 120


def test_max_model_len_bounds_prompt_and_response_together(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine(max_model_len=10)
    engine.submit(request_of("r", prompt=(1,) * 7, max_new_tokens=50))
    result = finish(engine)["r"]
    assert len(result.token_ids) == 3
    assert result.finish_reasons == ("length",)


def test_requests_wait_in_order_until_all_their_samples_fit(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine(max_sequences=8)
    engine.submit(request_of("first", samples=6, max_new_tokens=3))
    engine.submit(request_of("large", samples=8, max_new_tokens=3))
    engine.submit(request_of("small", samples=1, max_new_tokens=3))
    engine.step()
    assert (engine.running, engine.waiting) == (6, 2)
    order = list(finish(engine))
    assert order == ["first", "large", "small"]
    assert (engine.running, engine.waiting, engine.has_work) == (0, 0, False)
    assert engine.tokens == 15 * 3


def test_a_row_that_ends_frees_its_place(make_engine: MakeEngine, request_of: MakeRequest) -> None:
    engine = make_engine()
    engine.submit(request_of("short", samples=20, max_new_tokens=2))
    engine.submit(request_of("long", samples=3, max_new_tokens=50))
    engine.step()
    assert engine.running == 23
    engine.step()
    assert engine.running == 3


def test_a_small_request_joins_a_full_engine_within_a_few_steps(
    make_engine: MakeEngine, request_of: MakeRequest
) -> None:
    engine = make_engine()
    engine.submit(request_of("many", samples=30, max_new_tokens=50))
    engine.step()
    engine.submit(request_of("one", max_new_tokens=50))
    for _ in range(6):
        engine.step()
    assert engine.running == 31


def test_every_token_is_stamped_with_the_version_that_drew_it(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine()
    engine.set_version(3)
    engine.submit(request_of("a", samples=2, max_new_tokens=10))
    for _ in range(4):
        engine.step()
    engine.set_version(4)
    engine.submit(request_of("b", samples=30, max_new_tokens=2))
    engine.submit(request_of("c", max_new_tokens=2))
    engine.step()
    engine.set_version(7)
    results = finish(engine)
    assert results["a"].version_spans == (((3, 4), (4, 1), (7, 5)),) * 2
    assert results["b"].version_spans == (((4, 1), (7, 1)),) * 30
    assert results["c"].version_spans[0][-1][0] == 7


def test_a_version_set_while_idle_stamps_the_next_request_alone(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine()
    for version in (1, 2, 3):
        engine.set_version(version)
        engine.submit(request_of("r", max_new_tokens=2))
        assert finish(engine)["r"].version_spans == (((version, 2),),)


def test_weights_written_in_place_are_used_by_the_next_step(
    make_model: MakeModel, make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine, expected = make_engine(), make_engine()
    engine.submit(request_of("before", max_new_tokens=5))
    finish(engine)
    with torch.no_grad():
        for model in (engine.model, expected.model):
            for parameter in model.parameters():
                parameter.mul_(0.5)
    for served in (engine, expected, unchanged := make_engine()):
        served.submit(request_of("r", max_new_tokens=5, seed=1))
    logprobs = finish(engine)["r"].logprobs.tolist()
    assert logprobs == finish(expected)["r"].logprobs.tolist()
    assert logprobs != finish(unchanged)["r"].logprobs.tolist()


def test_a_request_that_is_dropped_leaves_the_others_alone(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    def start(engine: EmbeddedEngine) -> None:
        for id_ in ("a", "b", "c"):
            engine.submit(request_of(id_, samples=3, max_new_tokens=9, seed=ord(id_)))
        for _ in range(4):
            engine.step()

    untouched, engine = make_engine(), make_engine()
    start(untouched)
    start(engine)
    engine.submit(request_of("waiting", samples=32))
    for id_ in ("a", "waiting", "unknown"):
        engine.drop(id_)
    assert (engine.running, engine.waiting) == (6, 0)
    rest, all_ = finish(engine), finish(untouched)
    assert set(rest) == {"b", "c"}
    for id_ in rest:
        assert rest[id_].token_ids.tolist() == all_[id_].token_ids.tolist()


def test_an_engine_whose_every_request_is_dropped_serves_the_next_one(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine(max_sequences=4)
    for number in range(3):
        engine.submit(request_of(str(number), samples=3, max_new_tokens=9))
    engine.step()
    for number in range(3):
        engine.drop(str(number))
    assert (engine.running, engine.waiting, engine.has_work) == (0, 0, False)
    engine.submit(request_of("next", max_new_tokens=2))
    assert len(finish(engine)["next"].token_ids) == 2


def test_long_running_rows_outlast_many_short_ones(
    make_engine: MakeEngine, request_of: MakeRequest
) -> None:
    engine = make_engine(max_model_len=120)
    engine.submit(request_of("long", samples=2, max_new_tokens=100))
    done = []
    for number in range(200):
        engine.submit(request_of(f"s{number}", prompt=(1,) * (number % 60 + 1), max_new_tokens=3))
        done += [result.request_id for result in engine.step()]
    while engine.has_work:
        done += [result.request_id for result in engine.step()]
    assert len(done) == len(set(done)) == 201


def test_busy_time_is_what_steps_took(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    ticks = iter(range(1000))
    engine = make_engine(clock=lambda: float(next(ticks)))
    engine.submit(request_of("r", max_new_tokens=4))
    finish(engine)
    assert engine.busy_s == 4


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"prompt": ()}, ["empty"]),
        ({"prompt": (1,) * 128}, ["128", "max_model_len=128"]),
        ({"prompt": (1, 64)}, ["64", "vocabulary"]),
        ({"prompt": (-1, 2)}, ["-1", "vocabulary"]),
        ({"samples": 0}, ["samples=0"]),
        ({"samples": 33}, ["samples=33", "max_sequences"]),
        ({"max_new_tokens": 0}, ["max_new_tokens=0"]),
        ({"temperature": 0.0}, ["temperature=0", "0.01"]),
        ({"temperature": 1e-46}, ["temperature=1e-46", "the least is 1e-30"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"top_p": 0.0}, ["top_p=0"]),
        ({"top_p": 1.5}, ["top_p=1.5"]),
        ({"top_k": -1}, ["top_k=-1", "Use 0"]),
        ({"min_p": -0.1}, ["min_p=-0.1"]),
        ({"min_p": 1.5}, ["min_p=1.5"]),
        ({"min_p": float("nan")}, ["min_p=nan"]),
        ({"stop": ("x", "")}, ["empty string"]),
    ],
)
def test_a_request_that_can_never_be_served_is_refused(
    changes: dict[str, Any], names: list[str], make_engine: MakeEngine, request_of: MakeRequest
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(request_of("r", **changes))
    assert all(name in str(refused.value) for name in ["'r'", *names])
    assert not engine.has_work


def test_an_id_is_open_only_once(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish
) -> None:
    engine = make_engine()
    engine.submit(request_of("r"))
    with pytest.raises(InvalidRequest, match="is open"):
        engine.submit(request_of("r"))
    finish(engine)
    engine.submit(request_of("r"))


def test_a_model_with_a_short_sliding_window_is_refused(
    make_model: MakeModel, make_engine: MakeEngine
) -> None:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}
    with pytest.raises(UndecodableModel, match="16 tokens, fewer than max_model_len=128"):
        make_engine(make_model(**window))
    make_engine(make_model(**window), max_model_len=16)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sliding_window": 16}, id="one dict for all layers"),
        pytest.param([{}, {"sliding_window": 16}, {}], id="a dict per layer"),
    ],
)
def test_options_of_the_cache_are_read_in_each_form_that_transformers_has(options: Any) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert find_undecodable_layer(types, options, 16) is None
    problem, fix = find_undecodable_layer(types, options, 17) or ("", "")
    assert problem == "layer 1 is sliding_attention over 16 tokens, fewer than max_model_len=17"
    assert fix.startswith("Set generator.max_model_len to 16 or less")


@pytest.mark.plugins
def test_a_window_of_other_layers_makes_no_state_space_layer_decodable() -> None:
    found = find_undecodable_layer(["sliding_attention", "mamba"], {"sliding_window": 64}, 16)
    assert found == ("layer 1 is mamba", "Use generator.backend=vllm")


@pytest.mark.plugins
def test_layers_without_a_cache_are_served_behind_all_others_only() -> None:
    shared = ["full_attention", "full_attention", "dummy", "dummy"]
    assert find_undecodable_layer(shared, [{}] * 4, 128) is None
    problem, fix = find_undecodable_layer(["full_attention", "dummy"] * 2, [{}] * 4, 128) or (
        "",
        "",
    )
    assert problem == "layer 1 keeps no keys and values, but later layers do"
    assert fix == "Use generator.backend=vllm"


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path, make_model: MakeModel) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float64, "cpu", trust_remote_code=False)
    assert loaded.dtype == torch.float64
    assert not loaded.training
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter.double())
