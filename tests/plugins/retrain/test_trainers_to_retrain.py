"""`offbeat retrain` refuses trainers that it cannot run in one process, by name."""

from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.config.run import RunConfig
from offbeat.plugins.retrain.errors import CannotRetrain
from offbeat.plugins.retrain.settings import check_trainer
from tests.support.starting import ROOT, STUB

RUN = Path("runs/some")


def quickstart(*overrides: str) -> RunConfig:
    return load_recipe(ROOT / "recipes" / "quickstart.yaml", overrides).config


def with_loss(target: str) -> RunConfig:
    return quickstart(f"algorithm.loss={{name: custom, target: '{target}'}}")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (quickstart("trainer.data_parallel=2"), "its trainer has 2 ranks, but one is supported"),
        (quickstart("trainer.backend=megatron"), "trainer.backend=megatron is not supported"),
        (load_recipe(STUB).config, "it is a dry run"),
        (with_loss("offbeat.by_value:mine-0123"), "mine-0123 was passed by value"),
        (quickstart("algorithm.advantage=offbeat.by_value:own-4"), "own-4 was passed by value"),
    ],
)
def test_a_trainer_that_one_process_cannot_repeat_is_refused(
    config: RunConfig, problem: str
) -> None:
    with pytest.raises(CannotRetrain, match=f"runs/some: .*{problem}"):
        check_trainer(RUN, config)


def test_a_torch_trainer_of_one_rank_is_accepted_with_a_loss_of_a_module() -> None:
    check_trainer(RUN, quickstart())
    check_trainer(RUN, with_loss("my_losses:bounded"))
