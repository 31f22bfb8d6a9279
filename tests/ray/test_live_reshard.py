"""A run whose trainer has two ranks, each of which sends engines what it holds."""

import random

import pytest

from offbeat.controller.events import Rewound
from tests.ray.conftest import ROOT, Start
from tests.support.live_run import LiveRun
from tests.support.run_records import RunRecords

DETERMINISTIC = ROOT / "recipes" / "deterministic.yaml"
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
SMALL = ("groups_per_step=4", "samples_per_group=4", "trainer.data_parallel=2")
RESHARD = ("sync.transport=reshard", "sync.chunk_mib=0.1", "sync.canary_interval=1")


def _finished(run: LiveRun) -> RunRecords:
    assert run.exit_code() == 0
    records = RunRecords.read(run.run_dir)
    records.agree()
    records.no_token_is_from_the_future()
    run.nothing_is_left()
    return records


def _told(records: RunRecords) -> list[tuple[float, float]]:
    return [(line["train/loss"], line["train/grad_norm"]) for line in records.metrics]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_weights_that_each_rank_sent_are_those_that_rank_0_gathered_and_sent(start: Start) -> None:
    """Losses and gradients of a deterministic run, to the last bit, whoever sends."""
    with start("gathered", DETERMINISTIC, *SMALL, "steps=5") as run:
        gathered = _told(_finished(run))
    with start("reshard", DETERMINISTIC, *SMALL, *RESHARD, "steps=5") as run:
        records = _finished(run)
    assert all(norm for _, norm in gathered), "gradients that are zero prove nothing"
    assert _told(records) == gathered
    assert records.summary.restarts == 0, (
        "a canary that fails makes an engine sync anew, or restart"
    )


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_whose_second_rank_is_killed_sends_on_from_the_next_processes(start: Start) -> None:
    settings = ("steps=24", "checkpoint.interval=4")
    with start("killed", QUICKSTART, *SMALL, *RESHARD, *settings) as run:
        run.logged("trainer.ready", within_s=200)
        run.trained_steps(random.Random(3).randrange(7, 11))
        run.holding("trainer-rank1.log").kill()
        records = _finished(run)
    assert records.summary.trainer_version == 24
    assert len([event for event in records.events if isinstance(event, Rewound)]) == 1
