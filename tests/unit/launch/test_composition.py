"""What the controller's process checks and sets before it builds a run."""

import os
from pathlib import Path

import pytest

from offbeat.config.run import RunConfig
from offbeat.launch.composition import Actors, build_run
from offbeat.launch.run_parts import RunSpec
from offbeat.run_files.shared_directory import RunDirNotShared, new_token
from offbeat.run_files.sharing import Sharing
from tests.support.virtual_time import run

SECRET = "OFFBEAT_TEST_SECRET_OF_THE_COMPOSITION"


def test_a_controller_that_does_not_see_the_drivers_directory_does_not_begin(
    tmp_path: Path,
) -> None:
    driver, here = tmp_path / "driver", tmp_path / "here"
    driver.mkdir()
    here.mkdir()
    with new_token(driver) as token:
        sharing = Sharing(token, node="other", files="files", secrets={SECRET: "value"})
        config = RunConfig.model_validate({"steps": 1, "model": {"path": "m"}})
        spec = RunSpec(config, "r", here, tmp_path, driver="driver", sharing=sharing)
        try:
            with pytest.raises(RunDirNotShared) as refused:
                run(build_run(spec, Actors([], {}, [])))
            assert os.environ[SECRET] == "value", "for the sinks that need it"
        finally:
            os.environ.pop(SECRET, None)
    assert refused.value.process == "controller"
    assert list(here.iterdir()) == [], "nothing was written"
