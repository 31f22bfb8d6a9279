"""What the Ray actor of a trainer rank adds to the rank."""

from pathlib import Path

import structlog

from offbeat.actors.trainer_actor import StubTrainerActor
from offbeat.config.run import RunConfig
from offbeat.trainers.spec import TrainerSpec


def test_a_trainer_actor_logs_under_the_name_of_its_rank(tmp_path: Path) -> None:
    settings = {"steps": 5, "model": {"path": "m"}, "trainer": {"backend": "stub"}}
    actor = StubTrainerActor(TrainerSpec(RunConfig.model_validate(settings), str(tmp_path)))
    structlog.get_logger().info("said")
    actor.close()
    assert '"process":"trainer-rank0"' in (tmp_path / "logs" / "trainer-rank0.log").read_text()
