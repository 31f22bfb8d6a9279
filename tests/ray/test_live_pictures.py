"""A run on files of pictures, in a buffer with room for half of its groups, whose controller dies."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from PIL import Image

from offbeat.config.limits import max_group_bytes
from offbeat.config.loader import load_recipe
from offbeat.controller.events import (
    AnyEvent,
    Committed,
    Dispatched,
    Dropped,
    Returned,
    StepApplied,
)
from offbeat.plugins.images.digits import picture
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RECIPE = ROOT / "recipes" / "quickstart.yaml"
STEPS, GROUPS = 40, 8  # many and short: the controller dies in the middle
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
    capacity = 1.2 * GROUPS * group / 2**20  # MiB; two steps may be outstanding
    with start("pictures", RECIPE, *settings, f"buffer.capacity_mib={capacity}", cwd=cwd) as run:
        run.trained_steps(2, within_s=300)
        run.actor("ControllerActor").kill()
        assert run.exit_code(within_s=300) == 0
        run.nothing_is_left()
        records = RunRecords.read(run.run_dir)
    records.agree()
    assert records.summary.groups.trained == STEPS * GROUPS
    assert records.summary.groups.dropped == {"picture_unusable": 1}
    assert max(line["queue/bytes"] for line in records.metrics) > 4 * 3 * 32 * 32
    # Staleness admits 16 groups, so a controller that does not wait for room is beyond the limit.
    most = max(promised_bytes(records.events, group))
    assert capacity * 2**20 - group < most <= capacity * 2**20
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


def promised_bytes(events: list[AnyEvent], group_bytes: int) -> list[int]:
    """What the buffer holds and has to keep room for, after each dispatch of the journal.

    A group in flight may come back with ``group_bytes``; one that came back has its own bytes until
    it is trained, dropped or rolled out again.
    """
    in_flight, held, promised = set[int](), dict[int, int](), list[int]()
    for event in events:
        match event:
            case Dispatched():
                in_flight.add(event.prompt_index)
                promised.append(sum(held.values()) + len(in_flight) * group_bytes)
            case Committed():
                in_flight.remove(event.receipt.prompt_index)
                held[event.receipt.prompt_index] = event.receipt.payload_bytes
            case Returned() | Dropped():
                in_flight.discard(event.prompt_index)
                held.pop(event.prompt_index, None)
            case StepApplied():
                for prompt_index in event.prompt_indices:
                    del held[prompt_index]
            case _:
                pass
    return promised
