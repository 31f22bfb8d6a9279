"""A run whose trainer has two ranks, one of which is killed."""

import random

from offbeat.controller.events import Rewound
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start


def test_a_run_whose_second_rank_is_killed_rewinds_and_ends_with_its_ledger_in_order(
    start: Start,
) -> None:
    limits = ("steps=24", "groups_per_step=4", "samples_per_group=4", "checkpoint.interval=4")
    recipe = ROOT / "recipes" / "quickstart.yaml"
    teacher = f"algorithm.loss.teacher={ROOT / 'models' / 'tiny-addition'}"
    with start("gang", recipe, "trainer.data_parallel=2", teacher, *limits) as run:
        run.logged("trainer.ready", within_s=360)
        run.trained_steps(random.Random(17).randrange(7, 11))
        run.holding("trainer-rank1.log").kill()
        assert run.exit_code() == 0
        records = RunRecords.read(run.run_dir)
        records.agree()
        records.no_token_is_from_the_future()
        run.nothing_is_left()
        run.talks_to_people()
    assert records.summary.outcome == "finished"
    assert records.summary.trainer_version == 24
    assert records.summary.groups.trained == records.summary.groups.drawn == 96
    scored = ["train/teacher_kl" in line for line in records.metrics]
    assert all(scored), "every rank has the teacher, the new ones too"
    rewound = [event for event in records.events if isinstance(event, Rewound)]
    assert len(rewound) == 1 and rewound[0].to_version % 4 == 0 < rewound[0].to_version
