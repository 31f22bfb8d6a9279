"""Tiny random models and an engine over them."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams

MakeModel = Callable[..., PreTrainedModel]
MakeEngine = Callable[..., EmbeddedEngine]
MakeRequest = Callable[..., GenerateRequest]
Finish = Callable[[EmbeddedEngine], dict[str, GenerateResult]]
SamplesOf = Callable[[GenerateResult], list[tuple[list[int], NDArray[np.floating]]]]
RunAsync = Callable[[Coroutine[Any, Any, Any]], Any]

_SHAPE = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> MakeModel:
    """A model of a family with fixed random weights, sharp enough that logprobs differ."""

    def make(
        family: str = "qwen3", dtype: torch.dtype = torch.float32, **changes: Any
    ) -> PreTrainedModel:
        torch.manual_seed(7)
        if family == "qwen3":
            config = Qwen3Config(**{**_SHAPE, "num_key_value_heads": 2, "head_dim": 32, **changes})
            model: PreTrainedModel = Qwen3ForCausalLM(config)
        else:
            config = LlamaConfig(**{**_SHAPE, "num_key_value_heads": 4, **changes})
            model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        torch.nn.Module.to(model, dtype)  # in place
        return model.eval()

    return make


@pytest.fixture
def make_engine(make_model: MakeModel) -> MakeEngine:
    """An engine over a fresh tiny model, with whatever differs from the usual."""

    def make(
        model: PreTrainedModel | None = None,
        kind: type[EmbeddedEngine] = EmbeddedEngine,
        **changes: Any,
    ) -> EmbeddedEngine:
        options: dict[str, Any] = {
            "name": "engine-0",
            "incarnation": "first",
            "eos_token_ids": (),
            "max_sequences": 32,
            "max_model_len": 128,
            "deterministic": False,
            "seed": 0,
            "device": "cpu",
        }
        return kind(model or make_model(), **{**options, **changes})

    return make


@pytest.fixture
def request_of() -> MakeRequest:
    """A request with few words."""

    def make(
        id_: str, prompt: tuple[int, ...] = (1, 2, 3), samples: int = 1, **sampling: Any
    ) -> GenerateRequest:
        return GenerateRequest(id_, prompt, samples, SamplingParams(**sampling))

    return make


@pytest.fixture
def finish() -> Finish:
    """Steps until nothing is open; the results by request id."""

    def run(engine: EmbeddedEngine) -> dict[str, GenerateResult]:
        results: dict[str, GenerateResult] = {}
        while engine.has_work:
            results |= {result.request_id: result for result in engine.step()}
        return results

    return run


@pytest.fixture
def samples_of() -> SamplesOf:
    """The (tokens, logprobs) of each sample."""

    def split(result: GenerateResult) -> list[tuple[list[int], NDArray[np.floating]]]:
        bounds = list(zip(result.offsets, result.offsets[1:], strict=False))
        return [(result.token_ids[a:b].tolist(), result.logprobs[a:b]) for a, b in bounds]

    return split


@pytest.fixture
def run_async() -> RunAsync:
    """Runs one coroutine on a fresh event loop."""
    return asyncio.run
