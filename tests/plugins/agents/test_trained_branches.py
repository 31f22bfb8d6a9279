"""Branches from the endpoint to the gradient: each call of the model is trained once."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.failures import RolloutFailed
from offbeat.messages.fences import StepKey
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.plugins.agents.factory import make_agent
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.trainers.torch import TorchTrainer
from offbeat.transfer_queue import schema
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.agent_endpoint import (
    END,
    STRIPS_EARLIER_THINKING,
    VOCABULARY,
    DrawnBytes,
    started_groups,
    template,
)

HERE = Path(__file__).parent
ADVANTAGES = (1.0, -0.5)
TURNS = 3


def thinking(turns: int) -> DrawnBytes:
    """An engine whose answers begin with a thought, which the template strips off earlier turns."""
    return DrawnBytes([f"{'h' * (3 + n)}m</think>{n}<|im_end|>" for n in range(turns)])


def rolled_out(
    engine: DrawnBytes,
    branches: Literal["train", "mask"],
    *,
    samples: int = len(ADVANTAGES),
    evaluation: bool = False,
) -> tuple[Receipt, Columns]:
    async def main() -> tuple[Receipt, Columns]:
        recipe = EnvironmentConfig(
            name="agent", target="user_agents:converses", options={"turns": TURNS}, reward_workers=2
        )
        made = template(STRIPS_EARLIER_THINKING)
        bridge = TemplateBridge(made, made.end_texts((END,)))
        agent = make_agent(recipe, HERE)
        async with started_groups(agent, bridge, branches=branches) as groups:
            row = {"question": "how many"}
            of = RolloutTask(
                Prompt(7, 0, 7, row), 1, samples, "engine-0", 3, 60.0, evaluation=evaluation
            )
            client = EngineClient(of, engine.generate, SamplingParams(max_new_tokens=40), 4000)
            return await groups.run_group(client, SampleFailurePolicy("retry"))

    return asyncio.run(main())


def trainer_in(directory: Path) -> TorchTrainer:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256}
    GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)).save_pretrained(directory)
    return TorchTrainer(
        directory,
        trainer=TorchTrainerConfig(optimizer=OptimizerConfig(), max_tokens_per_microbatch=100),
        model=ModelConfig(path=str(directory), dtype="float64"),
        total_steps=2,
        max_model_len=256,
    )


def plain_loss(model: Any, engine: DrawnBytes, normalize: str) -> Tensor:
    """The loss over the calls that the engine answered, each alone; branches play no part in it."""
    logprobs: dict[int, list[Tensor]] = {sample: [] for sample in range(len(ADVANTAGES))}
    for request, drawn, _ in engine.calls:
        ids = torch.tensor([*request.prompt_ids, *drawn])
        at = torch.arange(len(request.prompt_ids), len(ids))
        sample = int(request.request_id.split("-")[2])
        logprobs[sample].append(
            model(input_ids=ids[None]).logits[0].log_softmax(-1)[at - 1, ids[at]]
        )
    of_samples = [torch.cat(each) for each in logprobs.values()]
    if normalize == "sequences":
        sums = [-a * each.mean() for a, each in zip(ADVANTAGES, of_samples, strict=True)]
        return torch.stack(sums).sum()
    return torch.stack([-a * e.sum() for a, e in zip(ADVANTAGES, of_samples, strict=True)]).sum()


@pytest.mark.parametrize("normalize", ["tokens", "sequences"])
def test_a_template_that_rewrites_history_trains_every_call_once_as_it_was_drawn(
    tmp_path: Path, normalize: Literal["tokens", "sequences"]
) -> None:
    engine = thinking(TURNS * len(ADVANTAGES))
    receipt, columns = rolled_out(engine, "train")
    assert receipt.branches == (TURNS, TURNS) and receipt.turns == (TURNS, TURNS)
    assert columns[schema.BRANCH_SAMPLES].tolist() == [0] * TURNS + [1] * TURNS
    assert sum(receipt.valid_tokens) == sum(len(drawn) for _, drawn, _ in engine.calls)
    assert len(receipt.rewards) == len(columns[schema.REWARDS]) == len(ADVANTAGES)

    trainer = trainer_in(tmp_path)
    plain_loss(trainer.module, engine, normalize).backward()
    want = {n: p.grad.clone() for n, p in trainer.module.named_parameters() if p.grad is not None}
    trainer.module.zero_grad()
    loss = LossSpec(ClippedPgLossConfig(normalize=normalize, old_logprobs="current"))
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, loss)
    trainer.train_microbatch(key.next(), build_chunk([columns]), [ADVANTAGES])
    got = {n: p.grad for n, p in trainer.module.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


def test_branches_are_masked_and_not_drawn_again_where_the_recipe_says_so() -> None:
    engine = thinking(TURNS)
    with pytest.raises(RolloutFailed) as caught:
        rolled_out(engine, "mask", samples=1)
    drawn = sum(len(said) for _, said, _ in engine.calls)
    assert (
        f"3 turns with {drawn} tokens drawn are 3 branches (1 opening, 2 template_rewrites_history)"
        in caught.value.detail
    )
    assert len(engine.calls) == TURNS


@pytest.mark.parametrize("branches", ["train", "mask"])
def test_an_evaluation_counts_a_sample_with_branches(branches: Literal["train", "mask"]) -> None:
    receipt, _ = rolled_out(thinking(TURNS), branches, samples=1, evaluation=True)
    assert (receipt.rewards, receipt.statuses) == ((2.0 * TURNS,), ())
