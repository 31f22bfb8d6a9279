"""What a rank's trainer is made with."""

from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.trainers.ranks.assembly import trainer_of
from offbeat.trainers.ranks.peers import SingleRank
from offbeat.trainers.spec import TrainerSpec


def test_a_trainer_gets_the_schedule_of_its_recipe_in_steps() -> None:
    optimizer = {"schedule": "wsd", "warmup_samples": 9, "decay_samples": 16}
    sizes = {"steps": 20, "groups_per_step": 2, "samples_per_group": 4}
    model = {"model": {"path": "tiny"}, "trainer": {"optimizer": optimizer}}
    config = RunConfig.model_validate(sizes | model)
    assert isinstance(config.trainer, TorchTrainerConfig)

    def kind(model_path: object, *, trainer: TorchTrainerConfig, **_: object) -> TorchTrainerConfig:
        del model_path
        return trainer

    made = trainer_of(kind, TrainerSpec(config, run_dir=""), config.trainer, SingleRank())
    assert (made.optimizer.warmup_steps, made.optimizer.decay_steps) == (2, 2)
