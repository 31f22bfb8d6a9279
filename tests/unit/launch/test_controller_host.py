"""What the host of a controller leaves on disk, however the run ends."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from offbeat.controller.controller import Controller
from offbeat.controller.events import Checkpointed
from offbeat.controller.journal import FileJournal, open_journal, read_journal
from offbeat.launch.controller_host import ControllerHost
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.telemetry.evaluation_files import EvaluationFiles
from offbeat.telemetry.logs import Redactor
from offbeat.telemetry.summary import Summary
from tests.support.virtual_time import InlineLoop, run
from tests.support.world import World


class BrokenController(Controller):
    """A controller with a bug outside of its pumps."""

    async def run(self, on_ended: Any = None) -> None:
        raise KeyError("a bug")


class Closed:
    """A file of the run that notes that it was closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def start(self) -> None:
        pass

    def close(self, *_: object) -> None:
        self.is_closed = True


async def at_once(work: Callable[[], int]) -> int:
    return work()


def journal_in(directory: Path, world: World) -> FileJournal:
    ledger, journal = open_journal(directory / "journal", at_once, snapshot_records=10_000)
    world.ledger, world.journal = ledger, cast("Any", journal)
    return journal


def hosted(directory: Path, world: World, files: Closed) -> ControllerHost:
    journal, every = journal_in(directory, world), cast("Any", files)
    return ControllerHost(
        world.controller(),
        run_id="run",
        run_dir=directory,
        journal=journal,
        telemetry=every,
        trace=every,
        spool=every,
        scores=EvaluationFiles(directory),
        redactor=Redactor([]),
    )


def test_a_controller_that_a_newer_one_replaces_writes_nothing_over_the_live_run(
    tmp_path: Path,
) -> None:
    files, world, newer = Closed(), World(), World()

    async def story() -> bytes:
        host = hosted(tmp_path, world, files)
        asyncio.get_running_loop().call_later(5, journal_in, tmp_path, newer)
        return await host.run()

    ended = Summary.from_json(run(story()))
    assert (ended.outcome, "belongs to another controller" in str(ended.error)) == ("failed", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal"]
    assert not files.is_closed
    assert not world.trainer.closed


def test_a_run_that_is_aborted_after_a_newer_controller_began_writes_nothing_either(
    tmp_path: Path,
) -> None:
    files, world, newer = Closed(), World(), World()

    async def story() -> None:
        host = hosted(tmp_path, world, files)
        ended = asyncio.ensure_future(host.run())
        await asyncio.sleep(5)
        journal_in(tmp_path, newer)
        host.abort("its driver is silent")
        await ended

    run(story())
    assert not (tmp_path / "summary.json").exists()
    assert not (files.is_closed or world.trainer.closed)


def test_a_bug_of_the_controller_closes_the_files_of_the_run_and_is_raised(tmp_path: Path) -> None:
    files, world = Closed(), World()

    async def story() -> None:
        host = hosted(tmp_path, world, files)
        host.controller.__class__ = BrokenController
        await host.run()

    with (
        asyncio.Runner(loop_factory=InlineLoop) as runner,
        pytest.raises(KeyError, match="a bug"),
    ):
        runner.run(story())
    assert files.is_closed


def test_the_last_checkpoint_of_an_aborted_run_is_in_its_journal(tmp_path: Path) -> None:
    world = World()

    async def main() -> bytes:
        host = hosted(tmp_path, world, Closed())
        asyncio.get_running_loop().call_later(12, host.abort, "SIGINT")
        return await host.run()

    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        summary = Summary.from_json(runner.run(main()))
    assert (summary.outcome, summary.ended_by) == ("aborted", "SIGINT")
    made = [each for each in read_journal(tmp_path / "journal") if isinstance(each, Checkpointed)]
    assert [each.version for each in made] == [summary.trainer_version]


@pytest.mark.parametrize(
    ("failure", "is_of_user_code"),
    [
        (RolloutFailed(FailureKind.DATA, 2, 1, "reward_raised", "it raised"), True),
        (RolloutFailed(FailureKind.BUG, 2, 1, "environment_wrong_type", "it is a list"), True),
        (RolloutFailed(FailureKind.DATA, 2, 1, "prompt_too_long", "9 tokens"), False),
        (RolloutFailed(FailureKind.INFRASTRUCTURE, 2, 1, "engine_lost", "it is gone"), False),
    ],
    ids=lambda each: each.reason if isinstance(each, RolloutFailed) else "",
)
def test_the_summary_says_whether_code_of_the_user_ended_the_run(
    tmp_path: Path, failure: RolloutFailed, is_of_user_code: bool
) -> None:
    limits = {"data_retries": 0, "infrastructure_retries": 0}
    world = World({"rollout": limits})
    world.rollouts.faults = {2: [failure]}

    async def main() -> bytes:
        return await hosted(tmp_path, world, Closed()).run()

    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        summary = Summary.from_json(runner.run(main()))
    assert summary.outcome == "failed"
    assert summary.failed_in_user_code is is_of_user_code
