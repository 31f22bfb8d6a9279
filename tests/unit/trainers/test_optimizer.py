import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.messages.failures import WeightsUnmoved
from offbeat.trainers.model_trainer import learning_rate
from offbeat.trainers.movement import Movement, MovementProbe, check_moved
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.logprobs import token_logprobs
from offbeat.trainers.torch.optimizer import Optimizer
from tests.support.chunks import in_chunk

MakeTrainer = Callable[..., TorchTrainer]
Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]


def linear(dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=dtype)


def test_one_step_is_adamw_by_hand() -> None:
    layer = linear()
    config = OptimizerConfig(
        learning_rate=0.1, weight_decay=0.5, max_grad_norm=0.25, betas=(0.8, 0.9)
    )
    optimizer, before = Optimizer(layer, config), layer.weight.detach().clone()
    raw = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    layer.weight.grad, layer.bias.grad = raw.clone(), torch.zeros(2, dtype=torch.float64)
    update = optimizer.step(denominator=4.0, learning_rate=0.1)
    norm = float((raw / 4).norm())
    gradient = raw / 4 * min(1, 0.25 / (norm + 1e-6))
    moved = gradient / ((gradient**2).sqrt() + config.eps)
    assert update.applied
    assert update.grad_norm == pytest.approx(norm)
    assert torch.allclose(layer.weight, before * (1 - 0.1 * 0.5) - 0.1 * moved, rtol=1e-12)
    assert layer.weight.grad is None


def test_weight_decay_spares_biases() -> None:
    layer = linear()
    bias = layer.bias.detach().clone()
    optimizer = Optimizer(layer, OptimizerConfig(weight_decay=0.5))
    layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.zeros_like(layer.bias)
    optimizer.step(1.0, 0.1)
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_moves_nothing(bad: float) -> None:
    layer = linear()
    before, optimizer = layer.weight.detach().clone(), Optimizer(layer, OptimizerConfig())
    layer.weight.grad = torch.full_like(layer.weight, bad)
    assert not optimizer.step(1.0, 0.1).applied
    assert torch.equal(layer.weight, before)
    assert optimizer.moments() == {}
    assert not optimizer.steps().any()


def test_a_norm_whose_square_exceeds_float32_is_clipped_on_one_rank_as_on_several() -> None:
    layer = linear(torch.float32)
    optimizer = Optimizer(layer, OptimizerConfig(max_grad_norm=1.0))
    layer.weight.grad = torch.full_like(layer.weight, 1e30)
    update = optimizer.step(1.0, 0.1)
    assert update.applied
    assert update.grad_norm == pytest.approx(1e30 * math.sqrt(6))
    assert optimizer.moments()["exp_avg/weight"].norm() == pytest.approx(0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_too_small_to_move_any_float32_weight_is_refused_by_name(
    trainer_of: MakeTrainer, step_data: Step, dtype: str
) -> None:
    trainer = trainer_of(dtype=dtype, optimizer={"learning_rate": 1e-30})
    with pytest.raises(
        WeightsUnmoved, match=r"learning rate 1e-30 .* none of [\d,]+ sampled"
    ) as got:
        trainer.train(*in_chunk(step_data), LossSpec())
    assert (got.value.step, trainer.steps_applied) == (1, 0)
    assert got.value.grad_norm > 0


def test_an_optimizer_that_updates_copies_of_the_weights_is_seen() -> None:
    layer = linear(torch.float32)
    copies = [each.detach().clone().requires_grad_() for each in layer.parameters()]
    optimizer, probe = torch.optim.SGD(copies, lr=0.1), MovementProbe(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    gradients = [each.grad for each in layer.parameters()]
    for copy, gradient in zip(copies, gradients, strict=True):
        copy.grad = gradient
    optimizer.step()
    assert probe.after(gradients) == Movement(moved=False, expected=8)


def test_a_step_without_a_learning_rate_or_a_gradient_may_leave_the_weights_alone() -> None:
    still, no_gradient = Movement(moved=False, expected=5), Movement(moved=False, expected=0)
    for movement, rate, norm in ((still, 0.0, 1.0), (still, 1e-3, 0.0), (no_gradient, 1e-3, 1.0)):
        check_moved(SingleRank(), movement, step=1, learning_rate=rate, grad_norm=norm)


def test_one_rank_whose_weights_moved_vouches_for_the_others() -> None:
    class OtherRankMoved(SingleRank):
        def all_gather(self, value: Any, decoder: Any) -> Any:
            del decoder
            return [value, (True, 0)]

    still = Movement(moved=False, expected=5)
    check_moved(OtherRankMoved(), still, step=1, learning_rate=1e-3, grad_norm=1.0)
    with pytest.raises(WeightsUnmoved):
        check_moved(SingleRank(), still, step=1, learning_rate=1e-3, grad_norm=1.0)


def test_small_steps_in_bfloat16_add_up_in_the_masters() -> None:
    layer = linear(torch.bfloat16)
    before = layer.weight.detach().clone()
    optimizer = Optimizer(layer, OptimizerConfig(max_grad_norm=None))
    for _ in range(400):
        layer(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.grad is None
        optimizer.step(1.0, 1e-5)
    moved = (before - layer.weight.detach()).float()
    assert layer.weight.dtype == torch.bfloat16
    assert moved.mean().item() == pytest.approx(400e-5, rel=0.3)


def test_gradients_of_bfloat16_weights_accumulate_in_float32() -> None:
    layer = linear(torch.bfloat16)
    optimizer = Optimizer(layer, OptimizerConfig(max_grad_norm=None))
    for scale in (256.0, *[0.5] * 100):
        (layer(torch.ones(1, 3, dtype=torch.bfloat16)).sum() * scale).backward()
    assert optimizer.step(1.0, 1e-5).grad_norm == pytest.approx((256 + 50) * math.sqrt(8))


def rates(config: OptimizerConfig, steps: int = 10) -> list[float]:
    return [learning_rate(config, applied, steps) for applied in range(steps + 1)]


def test_the_rate_warms_up_and_falls_to_zero_when_the_last_step_is_done() -> None:
    warm = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert rates(warm)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(warm)[-1] == 1.0
    line = rates(OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule="linear"))
    assert line == pytest.approx([0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    cosine = rates(OptimizerConfig(learning_rate=1.0, schedule="cosine"))
    assert cosine[0] == 1
    assert cosine[5] == pytest.approx(0.5)
    assert cosine[10] == pytest.approx(0)


def test_a_minimum_is_where_the_rate_ends() -> None:
    cosine = OptimizerConfig(learning_rate=3.0, min_learning_rate=1.0, schedule="cosine")
    assert rates(cosine) == pytest.approx([2 + math.cos(math.pi * i / 10) for i in range(11)])
    line = OptimizerConfig(learning_rate=3.0, min_learning_rate=1.0, schedule="linear")
    assert rates(line) == pytest.approx([3 - 2 * i / 10 for i in range(11)])


def test_wsd_stays_at_the_peak_and_falls_by_the_root_over_its_last_steps() -> None:
    config = OptimizerConfig(
        learning_rate=2.0, min_learning_rate=0.5, schedule="wsd", warmup_steps=2, decay_steps=4
    )
    falling = [0.5 + 1.5 * (1 - math.sqrt(i / 4)) for i in range(5)]
    assert rates(config) == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0, *falling])


def test_a_step_reports_the_rate_it_was_taken_with(
    trainer_of: MakeTrainer, step_data: Step
) -> None:
    options = {"learning_rate": 1.0, "schedule": "linear"}
    trainer = trainer_of(optimizer=options, total_steps=4)
    seen = [trainer.train(*in_chunk(step_data), LossSpec()).learning_rate for _ in range(4)]
    assert seen == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_are_log_softmax_forward_and_backward(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    which, target = torch.tensor([0, 0, 0, 2, 3]), torch.tensor([1, 1, 6, 0, 5])
    want = torch.log_softmax(logits / temperature, -1)[which, target]
    assert torch.allclose(token_logprobs(logits, which, target, temperature), want)
    assert torch.autograd.gradcheck(
        lambda values: token_logprobs(values, which, target, temperature), (logits,)
    )


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits = torch.zeros(1, 1000, dtype=torch.bfloat16, requires_grad=True)
    first = torch.zeros(1, dtype=torch.int64)
    logprobs = token_logprobs(logits, first, first, 1.0)
    assert logprobs.dtype == torch.float32
    assert logprobs.item() == pytest.approx(-math.log(1000), rel=1e-6)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(("limit", "applied"), [(None, False), (1.0, True)])
def test_a_gradient_whose_square_overflows_is_applied_only_if_it_is_clipped(
    limit: float | None, applied: bool
) -> None:
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    optimizer = Optimizer(layer, OptimizerConfig(max_grad_norm=limit))
    layer.weight.grad = torch.full((1, 2), 1e25)
    assert optimizer.step(1.0, 0.1).applied is applied
    assert torch.equal(layer.weight, before) is not applied
