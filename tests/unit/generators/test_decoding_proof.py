import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.errors import UndecodableModel
from tests.support.generator_fixtures import Finish, MakeEngine, MakeRequest, SamplesOf
from tests.support.model_families import FAMILIES, LONG_ROPES, family_model

EXACT = 2e-3  # nat, of any token
SERVED = {"Llama", "GPT2", "Qwen2", "Qwen3", "Qwen3Moe", "Gemma", "Phi3", "Olmo2", "Granite", "OPT"}
IN_EVERY_SUITE = {
    "Llama",
    "GPT2",
    "Gemma2",
    "Qwen3Moe",
    "Llama4Text:tuned",
    "Jamba",
    "Bloom",
    "Falcon:alibi",
}
TABLE = [
    pytest.param(name, marks=[] if name in IN_EVERY_SUITE else pytest.mark.long)
    for name in FAMILIES
]


def alone(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Log-probabilities of tokens behind a prompt, by transformers alone."""
    row = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logprobs = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logprobs.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def attending_eagerly(model: PreTrainedModel) -> PreTrainedModel:
    """The model made anew: not every class can be switched."""
    config = copy.deepcopy(model.config)
    other = type(model)._from_config(config, attn_implementation="eager")  # noqa: SLF001
    other.load_state_dict(model.state_dict())
    return other.eval()


def engine_or_refusal(make_engine: MakeEngine, family: str) -> EmbeddedEngine | UndecodableModel:
    try:
        return make_engine(family_model(family))
    except UndecodableModel as refused:
        return refused


def expect_exact(
    model: PreTrainedModel,
    engine: EmbeddedEngine,
    request_of: MakeRequest,
    finish: Finish,
    samples_of: SamplesOf,
) -> None:
    """Requests of several lengths, one of them late, get the log-probabilities that each has alone."""
    prompts = {"long": tuple(range(3, 43)), "short": (5, 9), "late": (4, 8, 15, 16)}
    for name in ("long", "short"):
        engine.submit(request_of(name, prompts[name], samples=2, max_new_tokens=40))
    for _ in range(5):
        engine.step()
    engine.submit(request_of("late", prompts["late"], max_new_tokens=30))
    for name, result in finish(engine).items():
        for tokens, logprobs in samples_of(result):
            want = alone(model, [*prompts[name]], tokens)
            assert (want - torch.from_numpy(logprobs)).abs().max() < EXACT


@pytest.mark.plugins
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # some families' own
@pytest.mark.parametrize("family", TABLE)
def test_every_family_is_decoded_as_it_computes_or_refused(
    family: str,
    make_engine: MakeEngine,
    request_of: MakeRequest,
    finish: Finish,
    samples_of: SamplesOf,
) -> None:
    engine = engine_or_refusal(make_engine, family)
    assert isinstance(engine, EmbeddedEngine) or family not in SERVED
    if isinstance(engine, UndecodableModel):
        assert "generator.backend=vllm" in engine.fix
        return
    expect_exact(attending_eagerly(family_model(family)), engine, request_of, finish, samples_of)


def test_capped_attention_scores_are_decoded_with_the_cap(
    make_engine: MakeEngine, request_of: MakeRequest, finish: Finish, samples_of: SamplesOf
) -> None:
    changes = {"sliding_window": 128}
    engine = make_engine(family_model("Gemma2", **changes))
    expect_exact(
        attending_eagerly(family_model("Gemma2", **changes)), engine, request_of, finish, samples_of
    )


def test_a_position_that_the_model_does_not_have_is_refused(make_engine: MakeEngine) -> None:
    make_engine(family_model("GPT2"), max_model_len=128)
    with pytest.raises(UndecodableModel, match="it has no position 128"):
        make_engine(family_model("GPT2"), max_model_len=129)


class Recurrent(LlamaForCausalLM):
    """A family that nobody knows: each token also sees the mean of all tokens before it in its pass."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(_add_mean_so_far)


def _add_mean_so_far(_: nn.Module, __: object, embedded_RTH: torch.Tensor) -> torch.Tensor:
    count_T = torch.arange(1, embedded_RTH.shape[1] + 1)
    return embedded_RTH + embedded_RTH.cumsum(1) / count_T[:, None]


def test_a_family_that_nobody_knows_is_refused_by_what_it_decodes(make_engine: MakeEngine) -> None:
    with pytest.raises(UndecodableModel, match="decoding differs from its plain forward pass"):
        make_engine(Recurrent(LlamaConfig(**FAMILIES["Llama"])).eval())


def test_weights_that_are_decoded_otherwise_than_their_class_promises_are_refused(
    make_engine: MakeEngine,
) -> None:
    model = family_model("Llama")
    model.model.embed_tokens.register_forward_hook(_add_mean_so_far)
    with pytest.raises(UndecodableModel, match="against its plain forward pass, are off by"):
        make_engine(model)


def _add_a_little(_: nn.Module, __: object, embedded_RTH: torch.Tensor) -> torch.Tensor:
    return embedded_RTH + 0.1 * embedded_RTH.cumsum(1)


def test_weights_in_16_bits_are_refused_for_a_mistake_that_their_rounding_would_hide(
    make_engine: MakeEngine,
) -> None:
    model = family_model("Llama")
    nn.Module.to(model, torch.bfloat16)  # in place
    make_engine(copy.deepcopy(model))
    model.model.embed_tokens.register_forward_hook(_add_a_little)
    with pytest.raises(UndecodableModel, match="against its plain forward pass, are off by"):
        make_engine(model)


def test_a_model_of_the_shortest_sequences_is_decoded_in_16_bits(make_engine: MakeEngine) -> None:
    for family in SERVED:
        model = family_model(family)
        nn.Module.to(model, torch.bfloat16)  # in place
        make_engine(model, max_model_len=2)


@pytest.mark.parametrize("rope", LONG_ROPES)
def test_a_sample_does_not_depend_on_the_length_of_the_samples_beside_it(
    rope: str,
    make_engine: MakeEngine,
    request_of: MakeRequest,
    finish: Finish,
    samples_of: SamplesOf,
) -> None:
    changes = {"rope_parameters": LONG_ROPES[rope], "max_position_embeddings": 32}
    options = {"seed": 1, "max_new_tokens": 8}

    def logprobs(*others: int) -> list[float]:
        engine = make_engine(family_model("Llama", **changes), max_model_len=100)
        engine.submit(request_of("it", (5, 9), **options))
        for other in others:
            engine.submit(request_of(f"of {other}", tuple(range(3, 3 + other)), max_new_tokens=40))
        return samples_of(finish(engine)["it"])[0][1].tolist()

    assert logprobs(20, 50) == pytest.approx(logprobs(), abs=1e-5)
