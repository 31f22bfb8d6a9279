"""A run on files of pictures, in a buffer with room for half of its groups, whose controller dies."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image

from offbeat.config.limits import max_group_bytes
from offbeat.config.loader import load_recipe
from offbeat.environments.digit_pictures import picture
from tests.ray.conftest import ROOT, Start
from tests.support.run_records import RunRecords

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEPS, GROUPS = 6, 8
REWARD = """
def reward(prompt, response):
    return float(response == str(prompt["answer"]))
"""


def test_pictures_of_files_fill_the_buffer_and_survive_the_death_of_the_controller(
    start: Start, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cwd = tmp_path_factory.mktemp("pictures")
    (cwd / "read_digit.py").write_text(REWARD)
    (cwd / "data").mkdir()
    rows = [{"prompt": "<image>=", "image": "missing.png", "answer": 0}]
    for index in range(STEPS * GROUPS):
        digit = picture(0, index)
        Image.fromarray(digit.pixels).save(cwd / "data" / f"{index}.png")
        rows.append({"prompt": "<image>=", "image": f"{index}.png", "answer": digit.digit})
    (cwd / "data" / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = [
        f"steps={STEPS}",
        f"groups_per_step={GROUPS}",
        "samples_per_group=4",
        f"model.path={ROOT / 'models' / 'tiny-digits'}",
        f"data.path={cwd / 'data' / 'rows.jsonl'}",
        "data.shuffle=false",
        "environment.name=function",
        "environment.target=read_digit:reward",
        "environment.options={}",
        "environment.images={max_mib: 0.012}",  # a picture takes 0.01173
        "generator.max_model_len=16",
        "rollout.data_retries=0",
        "rollout.drop_budget=1",
    ]
    group = max_group_bytes(load_recipe(RECIPE, settings).config)
    capacity = 1.2 * GROUPS * group / 2**20  # two steps may be outstanding
    with start("pictures", RECIPE, *settings, f"buffer.capacity_mib={capacity}", cwd=cwd) as run:
        run.trained_steps(2, within_s=300)
        run.actor("ControllerActor").kill()
        assert run.exit_code(within_s=300) == 0
        run.nothing_is_left()
        records = RunRecords.read(run.run_dir)
    records.agree()
    assert records.summary.groups.trained == STEPS * GROUPS
    assert records.summary.groups.dropped == {"picture_unusable": 1}
    held = max(line["queue/bytes"] for line in records.metrics)
    assert 4 * 3 * 32 * 32 < held <= capacity * 2**20
    shown = [
        logged
        for path in (run.run_dir / "rollouts").glob("*.parquet")
        for logged in pq.read_table(path).to_pylist()
        if logged["pictures"]
    ]
    assert len(shown) >= STEPS * GROUPS
    first = next(each for each in shown if each["row"] == 1)["pictures"][0]
    seen = np.frombuffer(first["rgb"], np.uint8).reshape(32, 32, 3)
    np.testing.assert_array_equal(seen[..., 0], picture(0, 0).pixels)
