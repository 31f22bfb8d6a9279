"""What the torch trainer counts of its experts, the losses of their routers, and the biases it moves."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.expert_load import normalise_scores
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.model import freeze
from offbeat.trainers.torch.routing import check_routers, find_routers
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.split_steps import Step, run_step, worst_relative_error

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
SPARSE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
BIASED = Glm4MoeConfig(**SIZES, **SPARSE, n_routed_experts=4, first_k_dense_replace=1)
LOSSES = {"load_balancing_coef": 0.5, "z_loss_coef": 0.1}
STILL = {"learning_rate": 1e-12, "max_grad_norm": None}
MakeSparse = Callable[..., TorchTrainer]


@pytest.fixture(scope="module")
def glm4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("glm4")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(BIASED)
    for router in find_routers(model):
        router.get_buffer("e_score_correction_bias").uniform_(-0.3, 0.3)
    model.save_pretrained(path)
    return path


class EagerLoader(ModelLoader):
    """Grouped experts of transformers know no float64."""

    def load(self) -> PreTrainedModel:
        model = super().load()
        model.set_experts_implementation("eager")
        return model


@pytest.fixture
def sparse(glm4: Path) -> MakeSparse:
    """A float64 trainer of a model with experts; keywords override its trainer section."""

    def make(moe: dict[str, float] | None = None, **section: Any) -> TorchTrainer:
        return TorchTrainer(
            glm4,
            parts=TorchParts(loader=EagerLoader),
            trainer=TorchTrainerConfig(
                optimizer=OptimizerConfig.model_validate(STILL),
                moe=MoeConfig.model_validate(moe or {}),
                **section,
            ),
            model=ModelConfig(path=str(glm4), dtype="float64"),
            total_steps=10,
            max_model_len=512,
        )

    return make


def biases(trainer: TorchTrainer) -> Tensor:
    weights = dict(trainer.iterate_weights())
    return torch.stack([each for name, each in weights.items() if name.endswith("_bias")])


def gradients(
    trainer: TorchTrainer, step: Step, chunks: int, attempt: int = 2
) -> dict[str, Tensor]:
    """Gradient of the routers' losses alone: without advantages nothing else is there."""
    key, groups = StepKey(2, attempt, 0), step[0]
    trainer.begin_train_step(key, LossSpec())
    for part in np.array_split(np.arange(len(groups)), chunks):
        key = key.next()
        zeros = [(0.0,) * len(step[1][i]) for i in part]
        trainer.train_microbatch(key, build_chunk([groups[i] for i in part]), zeros)
    found = {
        name: each.grad.clone()
        for name, each in trainer.module.named_parameters()
        if each.grad is not None and each.grad.any()
    }
    trainer.abort_train_step(key)
    return found


def plain_gradients(trainer: TorchTrainer, step: Step, shares_LE: Tensor) -> dict[str, Tensor]:
    """The same the slow way: one unpadded sample after another, the formulas as in the papers."""
    model, seen, total = trainer.module, list[Tensor](), torch.zeros((), dtype=torch.float64)
    hooks = [
        each.register_forward_hook(lambda _, __, output: seen.append(output[0]))
        for each in find_routers(model)
    ]
    for group in step[0]:
        offsets, first = group["response_offsets"], len(group["prompt_ids"])
        for start, end in itertools.pairwise(offsets):
            wanted = np.flatnonzero(group["loss_mask"][start:end])
            if not len(wanted):
                continue
            ids = np.concatenate([group["prompt_ids"], group["response_ids"][start:end]])
            seen.clear()
            model(input_ids=torch.tensor(ids, dtype=torch.int64)[None])
            for every, shares_E in zip(seen, shares_LE, strict=True):
                logits = every[first : first + wanted[-1]]
                scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
                total = total + 0.5 * 4 * (scores * shares_E).sum()
                total = total + 0.1 * logits.exp().sum(-1).log().square().sum()
    total.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for each in hooks:
        each.remove()
    return {name: each for name, each in found.items() if each.any()}


@pytest.mark.parametrize("shared_prompt", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
def test_the_losses_of_routers_are_plain_sums_over_response_tokens_in_any_chunks(
    sparse: MakeSparse, step_data: Step, shared_prompt: bool, recompute: bool
) -> None:
    trainer = sparse(
        LOSSES,
        shared_prompt=shared_prompt,
        activation_checkpointing=recompute,
        max_tokens_per_microbatch=120,
    )
    run_step(trainer, step_data, LossSpec(), 1)
    assert trainer.expert_load is not None
    shares_LE = trainer.expert_load.state().clone()
    assert not torch.allclose(shares_LE, torch.full_like(shares_LE, 0.25), atol=0.01)
    want = plain_gradients(trainer, step_data, shares_LE)
    for attempt, chunks in enumerate((1, 2, 5), start=2):
        got = gradients(trainer, step_data, chunks, attempt)
        # Routers of transformers score in float32.
        assert worst_relative_error(got, want) < 1e-6


def test_shares_metrics_and_biases_do_not_depend_on_chunks_or_rows(
    sparse: MakeSparse, step_data: Step
) -> None:
    seen = list[tuple[Tensor, Tensor, dict[str, float]]]()
    for shared_prompt, tokens, chunks in ((True, 8192, 1), (True, 100, 3), (False, 60, 2)):
        trainer = sparse(
            {"bias_update_rate": 0.01},
            shared_prompt=shared_prompt,
            max_tokens_per_microbatch=tokens,
        )
        metrics = run_step(trainer, step_data, LossSpec(), chunks).metrics
        assert trainer.expert_load is not None
        seen.append((trainer.expert_load.state(), biases(trainer), metrics))
    for shares, moved, metrics in seen[1:]:
        assert torch.equal(shares, seen[0][0])
        assert torch.equal(moved, seen[0][1])
        of_moe = {name: value for name, value in metrics.items() if name.startswith("moe/")}
        assert len(of_moe) == 6
        assert of_moe == pytest.approx({name: seen[0][2][name] for name in of_moe}, rel=1e-6)


def test_an_applied_step_moves_each_bias_towards_the_mean_load(
    sparse: MakeSparse, step_data: Step
) -> None:
    trainer = sparse({"bias_update_rate": 0.01})
    before = biases(trainer).clone()
    metrics = run_step(trainer, step_data, LossSpec(), 2).metrics
    assert trainer.expert_load is not None
    shares = trainer.expert_load.state()
    assert torch.allclose(
        biases(trainer) - before, 0.01 * (0.25 - shares).sign().to(before), atol=1e-6
    )
    assert metrics["moe/load_max"] == pytest.approx(4 * float(shares.max()))
    assert metrics["moe/load_max_mean"] == pytest.approx(4 * float(shares.amax(-1).mean()))
    assert metrics["moe/idle_experts"] == 0
    assert 0 < metrics["moe/router_entropy"] <= math.log(4)
    assert metrics["moe/load_balancing_loss"] == pytest.approx(1), "all shares are equal at first"


def test_without_a_rate_biases_stay_and_the_load_is_reported_all_the_same(
    sparse: MakeSparse, step_data: Step
) -> None:
    trainer = sparse()
    before = biases(trainer).clone()
    assert run_step(trainer, step_data, LossSpec(), 2).metrics["moe/load_max"] >= 1
    assert torch.equal(biases(trainer), before)


def test_a_frozen_router_is_counted_and_keeps_its_bias(sparse: MakeSparse, step_data: Step) -> None:
    trainer = sparse({"bias_update_rate": 0.01}, freeze=["model.layers.1.mlp.gate.weight"])
    before = biases(trainer).clone()
    metrics = run_step(trainer, step_data, LossSpec(), 2).metrics
    after = biases(trainer)
    assert torch.equal(after[0], before[0])
    assert (after[1] != before[1]).any()
    assert trainer.expert_load is not None
    assert metrics["moe/load_max_mean"] == pytest.approx(
        4 * float(trainer.expert_load.state().amax(-1).mean())
    )


def test_a_step_that_is_aborted_or_not_applied_moves_no_bias_and_no_share(
    sparse: MakeSparse, step_data: Step
) -> None:
    groups, advantages = step_data
    clean, disturbed = (sparse({"bias_update_rate": 0.01, **LOSSES}) for _ in range(2))
    run_step(clean, step_data, LossSpec(), 1)
    run_step(disturbed, step_data, LossSpec(), 1)
    poisoned = [(math.nan, *advantages[0][1:]), *advantages[1:]]
    result = run_step(disturbed, (groups, poisoned), LossSpec(), 2, number=2)
    assert not result.applied
    assert not [name for name in result.metrics if name.startswith("moe/")]
    gradients(disturbed, step_data, 2, attempt=3)  # and aborted
    assert disturbed.weights_digest() == clean.weights_digest()
    last = [trainer.train(*in_chunk(step_data), LossSpec()) for trainer in (clean, disturbed)]
    assert last[0].metrics == last[1].metrics
    assert disturbed.weights_digest() == clean.weights_digest()


def test_a_resumed_trainer_takes_the_same_steps_to_the_last_bit(
    sparse: MakeSparse, step_data: Step, tmp_path: Path
) -> None:
    first, second = (sparse({"bias_update_rate": 0.01, **LOSSES}) for _ in range(2))
    initial = first.weights_digest()
    run_step(first, step_data, LossSpec(), 2)
    first.save_state(tmp_path)
    second.load_state(tmp_path)
    for trainer in (first, second):
        run_step(trainer, step_data, LossSpec(), 2, 2)
    assert first.weights_digest() == second.weights_digest() != initial
    second.reset()
    assert second.weights_digest() == initial
    assert second.expert_load is not None
    assert (second.expert_load.state() == 0.25).all()


@pytest.mark.parametrize(
    "config",
    [
        BIASED,
        Dots1Config(**SIZES, **SPARSE, n_routed_experts=4, n_shared_experts=1, norm_topk_prob=True),
        DeepseekV3Config(
            **{name: value for name, value in SIZES.items() if name != "head_dim"},
            **SPARSE,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=None,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
        Qwen2MoeConfig(**SIZES, **SPARSE, num_experts=4),
        Qwen3MoeConfig(**SIZES, **SPARSE, num_experts=4),
        MixtralConfig(**SIZES, num_local_experts=4),
        OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    ],
    ids=lambda each: each.model_type,
)
def test_the_scores_of_each_known_router_are_those_it_weighs_experts_by(
    config: PreTrainedConfig,
) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    routers = find_routers(model)
    assert routers
    for router in routers:
        sigmoid = type(router).__name__.endswith("TopkRouter")
        hidden = torch.randn(9, model.config.hidden_size)
        torch.nn.init.normal_(router.get_parameter("weight"))
        logits, weights, chosen = router(hidden)
        own = normalise_scores(logits, sigmoid=sigmoid).gather(1, chosen)
        expected = own / own.sum(-1, keepdim=True)
        assert torch.allclose(weights / weights.sum(-1, keepdim=True), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "moe", "said"),
    [
        (
            Qwen3Config(**SIZES),
            {"load_balancing_coef": 0.01},
            "has no router that trainer.moe knows",
        ),
        (
            Qwen3MoeConfig(**SIZES, **SPARSE, num_experts=4),
            {"bias_update_rate": 0.001},
            "has routers without a bias, which trainer.moe.bias_update_rate would update",
        ),
    ],
)
def test_a_setting_that_would_do_nothing_to_the_model_is_refused(
    config: PreTrainedConfig, moe: dict[str, float], said: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_routers(model, MoeConfig())
    with pytest.raises(UntrainableModel, match=said):
        check_routers(model, MoeConfig(**moe))


def test_a_model_of_which_every_router_is_frozen_has_nothing_to_balance() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(BIASED)
    first, second = find_routers(model)
    freeze(model, ["model.layers.1.*"])
    check_routers(model, MoeConfig(bias_update_rate=0.001))
    assert not first.get_parameter("weight").requires_grad
    second.requires_grad_(requires_grad=False)
    check_routers(model, MoeConfig())
    with pytest.raises(UntrainableModel, match=r"trainer\.freeze matches all of them"):
        check_routers(model, MoeConfig(z_loss_coef=0.001))
