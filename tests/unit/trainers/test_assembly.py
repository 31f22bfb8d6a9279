"""What a rank's trainer is made with."""

from typing import Any

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.assembly import in_steps
from offbeat.trainers.spec import TrainerSpec
from tests.support.recipes import make_config


def test_a_trainer_gets_the_schedule_of_its_recipe_in_steps() -> None:
    optimizer = {"schedule": "wsd", "warmup_samples": 9, "decay_samples": 16}
    sizes: dict[str, Any] = {"steps": 20, "groups_per_step": 2, "samples_per_group": 4}
    config = make_config(**sizes, trainer={"optimizer": optimizer})
    assert isinstance(config.trainer, TorchTrainerConfig)

    made = in_steps(TrainerSpec(config, run_dir=""), config.trainer)
    assert (made.optimizer.warmup_steps, made.optimizer.decay_steps) == (2, 2)
