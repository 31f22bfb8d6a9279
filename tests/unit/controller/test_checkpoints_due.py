from types import SimpleNamespace
from typing import cast

import pytest

from offbeat.config.run import RunConfig
from offbeat.controller.checkpoints import Checkpoints
from offbeat.controller.state import RunState
from offbeat.controller.trainer_client import TrainerClient


@pytest.mark.parametrize(
    ("made", "version", "is_due"),
    [
        ([], 3, False),
        ([], 4, True),
        ([4], 4, False),
        ([4], 7, False),
        ([4], 8, True),
        ([4], 9, True),  # the controller that was to make it at 8 has died
        ([6], 8, True),  # of a run that was stopped
        ([4, 9], 9, False),
    ],
)
def test_a_checkpoint_is_due_once_a_multiple_of_the_interval_has_passed_since_the_newest(
    made: list[int], version: int, *, is_due: bool
) -> None:
    recipe = {"steps": 10, "model": {"path": "none"}, "checkpoint": {"interval": 4}}
    config = RunConfig.model_validate(recipe)
    state = SimpleNamespace(config=config, ledger=SimpleNamespace(checkpoints=made))
    client = cast("TrainerClient", None)
    assert Checkpoints(cast("RunState", state), client).is_due(version) == is_due
