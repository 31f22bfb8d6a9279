import pytest
import torch

from offbeat.actors.trainers.peers import Alone
from offbeat.actors.trainers.step_sums import StepSums
from offbeat.algorithms.losses import LossSums
from offbeat.algorithms.metrics import Metric, Reduction
from offbeat.messages.training import LossSpec


def part(loss: float, value: float) -> LossSums:
    one = torch.ones((), dtype=torch.float64)
    metrics = {str(each): Metric(each, torch.tensor(value)) for each in Reduction}
    return LossSums(torch.tensor(loss), one, one, metrics)


@pytest.mark.parametrize(("normalize", "loss"), [("tokens", 0.5), ("sequences", 3.0)])
def test_every_metric_is_divided_by_what_its_kind_says(normalize: str, loss: float) -> None:
    sums = StepSums(LossSpec(normalize=normalize), tokens=12, sequences=2)
    sums.add(part(4.0, 18.0))
    sums.add(part(2.0, 6.0))
    means = sums.totals(Alone())
    assert means.loss == loss
    assert means.metrics == {
        "tokens": 2.0,
        "sequences": 12.0,
        "none": 24.0,
        "min": 6.0,
        "max": 18.0,
    }
