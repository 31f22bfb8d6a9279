"""Code inside a run directory is found before a command that looks at the run imports it."""

from pathlib import Path

import pytest

from offbeat.config.run import RunConfig
from offbeat.runs.inputs import find_shipped_code

PLAIN = RunConfig.model_validate({"steps": 1, "model": {"path": "models/tiny-addition"}})
SAMPLER = {"name": "custom", "target": "a.b:C", "max_staleness": 1}
OWN = RunConfig.model_validate({**PLAIN.model_dump(exclude_unset=True), "sampler": SAMPLER})


@pytest.mark.parametrize(
    ("working_dir", "problem"),
    [
        ("run", "which is not absolute"),
        (".", "which is not absolute"),
        ("{tmp}/project/a", "inside the run directory"),
        ("{tmp}/link", "inside the run directory"),
        ("{tmp}/project", "sampler.target=a.b:C is inside the run directory"),
        ("{tmp}", ""),
        ("{tmp}/elsewhere", ""),
    ],
)
def test_code_that_a_run_directory_contains_is_found(
    tmp_path: Path, working_dir: str, problem: str
) -> None:
    run_dir = tmp_path / "project" / "a"
    run_dir.mkdir(parents=True)
    (tmp_path / "link").symlink_to(run_dir)
    place = Path(working_dir.format(tmp=tmp_path))
    found = find_shipped_code(run_dir, place, OWN)
    assert problem in found if problem else not found
    assert find_shipped_code(run_dir, place, PLAIN) == ""
