"""Logprobs of an engine that computes in bfloat16, against the trainer's: within what rounding explains."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from releases import CHUNK_BYTES, Weights, released
from sharded_trainer import ShardedTrainer, factor
from shared_engine import (
    PROMPT,
    Engine,
    Shared,
    ask,
    endless_model,
    fetch,
    layout_of,
    load,
    spec_in,
)
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.messages.generation import GenerateResult
from offbeat.messages.weights import WeightRelease
from tests.support.plain_modules import ModuleSource

APART: Final = 2.0**-8
"""Share of a value by which two roundings of it to bfloat16 differ at most: each is half of that off."""
DRAWS: Final = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return endless_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        shared = Shared(spec_in(tmp_path_factory.mktemp("engine"), model, "bfloat16"), runner)
        yield shared
        shared.close()


def rounded(model: Path, version: int) -> Any:
    """What the trainer publishes: its weights of a version, rounded to bfloat16."""
    module: Any = AutoModelForCausalLM.from_pretrained(
        model, local_files_only=True, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor(version))
    return module.to(torch.bfloat16).eval()


def errors(module: PreTrainedModel, result: GenerateResult) -> np.ndarray[Any, np.dtype[Any]]:
    """Engine minus model, for each token."""
    served = Weights(module, None)  # type: ignore[arg-type]  # no release is needed of it
    return np.concatenate(served.errors(PROMPT, result))


def allowed(module: PreTrainedModel, result: GenerateResult) -> float:
    """Nats that engine and trainer may differ by on these tokens, if both compute with these weights.

    Their kernels round the same values in another order. So each value that a module of the model
    returns is moved by as much as two roundings of it may be apart, in arithmetic of float32, and the
    largest effect on a logprob of some draws is taken; engine and trainer are one such draw apart
    from exact arithmetic each.
    """
    exact, dice, worst = module.float(), torch.Generator().manual_seed(0), 0.0

    def moved(module: nn.Module, arguments: object, output: object) -> object:
        del module, arguments
        if not isinstance(output, Tensor):
            return output  # sines and cosines, which both compute in float32
        return output * (1 + APART * (2 * torch.rand(output.shape, generator=dice) - 1))

    plain = errors(exact, result)
    leaves = [each for each in exact.modules() if not list(each.children())]
    hooks = [each.register_forward_hook(moved) for each in leaves]
    for _ in range(DRAWS):
        worst = max(worst, float(np.abs(errors(exact, result) - plain).max()))
    for each in hooks:
        each.remove()
    return 2 * worst


def release_of(version: int, module: PreTrainedModel) -> WeightRelease:
    source = ModuleSource(module, CHUNK_BYTES)
    return released(version, source.manifest, [chunk.copy() for chunk, _ in source.chunks()])


def with_two_matrices_swapped(module: PreTrainedModel) -> PreTrainedModel:
    first, second = (
        module.get_parameter(f"model.layers.{at}.self_attn.q_proj.weight") for at in (0, 1)
    )
    with torch.no_grad():
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
    return module


@pytest.mark.timeout(900)
def test_after_each_reshard_logprobs_differ_from_the_trainers_by_roundings_alone(
    engine: Shared, model: Path
) -> None:
    async def story(actor: Engine) -> None:
        layout = await layout_of(actor)
        trainer = ShardedTrainer(model, model.parent, "bfloat16")
        try:
            for version, planned in ((1, None), (2, layout)):
                release = await asyncio.to_thread(trainer.publish, version, planned)
                await fetch(actor, 2 * version, version, release)
                result = await ask(actor, f"rounded {version}")
                gap = float(np.abs(errors(rounded(model, version), result)).max())
                bound = allowed(rounded(model, version), result)
                assert gap < bound
                wrong = with_two_matrices_swapped(rounded(model, version))
                await load(actor, 2 * version + 1, release_of(version, wrong))
                served = await ask(actor, f"swapped {version}")
                seen = float(np.abs(errors(rounded(model, version), served)).max())
                engine.note(f"version {version}: {gap=:.4f} {bound=:.4f} {seen=:.4f} nats")
                assert seen > 3 * allowed(rounded(model, version), served)
        finally:
            trainer.close()

    engine.play(story)
