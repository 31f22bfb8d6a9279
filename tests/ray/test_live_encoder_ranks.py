"""A run whose vision tower has a rank of its own, of which either rank is killed."""

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from offbeat.controller.events import Rewound
from tests.ray.conftest import ROOT, Start
from tests.support.run_records import RunRecords

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 30
SMALL = (
    f"steps={STEPS}",
    "groups_per_step=4",
    "checkpoint.interval=2",
    "trainer.optimizer.schedule=constant",
    "trainer.optimizer.decay_steps=null",
    "sync.canary_interval=1",  # engines compare the tower of each release with the encoder rank
)


@pytest.mark.parametrize("rank", [0, 1], ids=["language", "encoder"])
def test_a_run_of_which_a_rank_is_killed_rewinds_and_trains_all_its_groups(
    start: Start, rank: int
) -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    with start(f"grid{rank}", recipe, "trainer.encoder.data_parallel=1", *SMALL) as run:
        run.logged("trainer.ready", within_s=400)
        run.trained_steps(5)
        run.holding(f"trainer-rank{rank}.log").kill()
        assert run.exit_code(within_s=300) == 0
        records = RunRecords.read(run.run_dir)
        records.agree()
        records.no_token_is_from_the_future()
        run.nothing_is_left()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.trained == STEPS * 4
    (rewound,) = [event for event in records.events if isinstance(event, Rewound)]
    assert 0 < rewound.to_version < STEPS
    assert all("train/bridge_bytes" in line for line in records.metrics)
