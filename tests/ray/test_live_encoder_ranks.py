"""A run whose vision tower has a rank of its own, of which a rank is killed or hangs."""

import pytest

pytest.importorskip("PIL", reason="the extra vision is not installed")

from offbeat.controller.events import Rewound, TrainerReplaced
from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 30
SMALL = (
    f"steps={STEPS}",
    "groups_per_step=4",
    "checkpoint.interval=2",
    "trainer.optimizer.schedule=constant",
    "trainer.optimizer.decay_steps=null",
    "sync.canary_interval=1",  # engines compare the tower of each release with the encoder rank
)


def rewinds_and_trains_all_its_groups(run: LiveRun, rank: int) -> None:
    """The run names the lost rank, ends with the steps of its recipe, and its accounts agree."""
    assert run.exit_code(within_s=400) == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    run.nothing_is_left()
    assert records.summary.outcome == "finished"
    assert records.summary.groups.trained == STEPS * 4
    (rewound,) = [event for event in records.events if isinstance(event, Rewound)]
    (replaced,) = [event for event in records.events if isinstance(event, TrainerReplaced)]
    assert f"trainer rank {rank} was lost" in replaced.reason
    assert 0 < rewound.to_version < STEPS
    assert all("train/bridge_bytes" in line for line in records.metrics)


@pytest.mark.parametrize(
    ("backend", "rank"),
    [("torch", 0), ("torch", 1), ("megatron", 0), ("megatron", 1)],
    ids=["language", "encoder", "language rank of megatron", "encoder beside megatron"],
)
def test_a_run_of_which_a_rank_is_killed_rewinds_and_trains_all_its_groups(
    start: Start, backend: str, rank: int
) -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    grid = (f"trainer.backend={backend}", "trainer.encoder.data_parallel=1")
    with start(f"grid{backend}{rank}", recipe, *grid, *SMALL) as run:
        run.logged("trainer.ready", within_s=400)
        run.trained_steps(5)
        run.holding(f"trainer-rank{rank}.log").kill()
        rewinds_and_trains_all_its_groups(run, rank)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_run_whose_sides_are_divided_by_two_ranks_each_loses_one_and_trains_all_its_groups(
    start: Start, backend: str
) -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    axes = ("trainer.tensor_parallel=2", "trainer.encoder.tensor_parallel=2")
    with start(f"divided{backend}", recipe, f"trainer.backend={backend}", *axes, *SMALL) as run:
        run.logged("trainer.ready", within_s=400)
        run.trained_steps(5)
        run.holding("trainer-rank3.log").kill()
        rewinds_and_trains_all_its_groups(run, 3)


def test_a_run_whose_encoder_rank_hangs_rewinds_and_trains_all_its_groups(start: Start) -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    short = ("trainer.encoder.data_parallel=1", "trainer.step_deadline_s=40")
    with start("hung", recipe, *short, *SMALL) as run:
        run.logged("trainer.ready", within_s=400)
        run.trained_steps(5)
        run.holding("trainer-rank1.log").suspend()
        rewinds_and_trains_all_its_groups(run, 1)
