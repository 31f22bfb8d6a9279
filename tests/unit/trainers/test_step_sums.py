import pytest
import torch

from offbeat.algorithms.losses import LossSums
from offbeat.algorithms.tokens import PartialMetric, PartialReduction
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.step_sums import StepSums


def part(loss: float, value: float, units: float = 2.0) -> LossSums:
    metrics = {str(each): PartialMetric(each, torch.tensor(value)) for each in PartialReduction}
    return LossSums(torch.tensor(loss), metrics, torch.tensor([units, 1.0, 4.5]))


@pytest.mark.parametrize(("step_std", "divisor"), [(False, 4.0), (True, 12 / 2**0.5)])
def test_every_metric_is_divided_by_what_its_kind_says(step_std: bool, divisor: float) -> None:
    sums = StepSums(LossSpec(ClippedPgLossConfig(step_std=step_std)), tokens=12, sequences=2)
    sums.add(part(4.0, 18.0))
    sums.add(part(2.0, 6.0))
    means = sums.totals(SingleRank())
    assert means.denominator == pytest.approx(divisor)
    assert means.loss == pytest.approx(6 / divisor)
    assert means.metrics == {
        "loss": pytest.approx(24 / divisor),
        "tokens": 2.0,
        "sequences": 12.0,
        "min": 6.0,
        "max": 18.0,
    }
    assert means.refusal == ""


def test_of_a_step_that_a_band_dropped_wholly_all_is_told_but_its_loss() -> None:
    sums = StepSums(
        LossSpec(ClippedPgLossConfig(icepop_band=(0.5, 2.0), count_dropped=False)),
        tokens=12,
        sequences=2,
    )
    sums.add(part(0.0, 6.0, units=0.0))
    means = sums.totals(SingleRank())
    assert (means.loss, means.refusal) == (0.0, "a band dropped every valid token")
    assert means.metrics == {"tokens": 0.5, "sequences": 3.0, "min": 6.0, "max": 6.0}
