import pytest
import torch
from torch import Tensor, nn

from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.trainers.torch.optimizer import Optimizer, round_stochastically
from tests.support.default_dtype import sixteen_bit_default

STEP = 2.0**-7
"""Between bfloat16 numbers from 1 to 2."""


def rounded(masters: Tensor, name: str = "w", updates: int = 1) -> Tensor:
    weights = torch.full_like(masters, torch.nan, dtype=torch.bfloat16)
    round_stochastically(weights, masters, name, updates)
    return weights.float()


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_weight_goes_to_a_neighbour_as_often_as_it_is_near_it(share: float, sign: int) -> None:
    low, high = sign * 1.5, sign * (1.5 + STEP)
    got = rounded(torch.full((400, 500), sign * (1.5 + share * STEP)))
    assert set(got.unique().tolist()) == {low, high}
    assert float((got == high).double().mean()) == pytest.approx(share, abs=0.005)


def test_what_bfloat16_has_is_kept() -> None:
    exact = torch.randn(3, 7).bfloat16().float()
    exact[0, 0], exact[0, 1] = 0.0, -0.0
    assert torch.equal(rounded(exact), exact)
    assert rounded(exact).signbit()[0, 1]


def test_noise_follows_from_name_and_updates() -> None:
    masters = torch.full((64, 64), 1 + STEP / 2)
    assert torch.equal(rounded(masters), rounded(masters))
    assert not torch.equal(rounded(masters), rounded(masters, updates=2))
    assert not torch.equal(rounded(masters), rounded(masters, name="v"))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 4), (3, 1_500_000)])
def test_every_shape_is_rounded_whole(shape: tuple[int, ...]) -> None:
    masters = torch.full(shape, 1 + STEP / 2)
    got = rounded(masters)
    assert bool(((got == 1) | (got == 1 + STEP)).all())
    if masters.dim() == 2 and masters.numel():
        assert not torch.equal(got[0], got[2])


def test_a_weight_moves_on_average_with_updates_below_its_precision() -> None:
    moved = {}
    for rounding in ("nearest", "stochastic"):
        layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        nn.init.constant_(layer.weight, 1.0)
        config = OptimizerConfig(max_grad_norm=None, rounding=rounding)
        optimizer = Optimizer(layer, config)
        layer(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1.0, STEP / 8)
        moved[rounding] = float((1 - layer.weight.detach().double()).mean())
    assert moved["nearest"] == 0
    assert moved["stochastic"] == pytest.approx(STEP / 8, rel=0.1)


def test_weights_that_are_restored_are_those_that_were_rounded() -> None:
    layer = nn.Linear(16, 16, dtype=torch.bfloat16)
    config = OptimizerConfig(max_grad_norm=None, rounding="stochastic")
    optimizer = Optimizer(layer, config)
    for _ in range(3):
        layer(torch.ones(1, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(1.0, 1e-4)
    other = nn.Linear(16, 16, dtype=torch.bfloat16)
    restored = Optimizer(other, config)
    with sixteen_bit_default():
        restored.make_room(optimizer.moments())
    assert restored.steps().dtype == torch.float32, "bfloat16 counts no further than 256"
    for name, master in restored.masters().items():
        master.detach().copy_(optimizer.masters()[name].detach())
    restored.resume_filled(optimizer.steps())
    assert torch.equal(other.weight, layer.weight)
    assert torch.equal(other.bias, layer.bias)
