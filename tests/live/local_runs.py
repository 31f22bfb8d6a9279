"""Runs of the local runtime inside of the test's process, with parts that fail on purpose."""

import secrets
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.launch.opened_run import open_run
from offbeat.launch.run_parts import RunSpec
from offbeat.launch.session import Runtime, drive
from offbeat.local.parts import Makers
from offbeat.local.run import LocalController, run_local
from offbeat.telemetry.summary import Summary
from tests.support.run_records import RunRecords
from tests.support.starting import STUB

LIMIT_S = 100


def load_stubs(overrides: Sequence[str]) -> LoadedRecipe:
    return load_recipe(STUB, ["runtime=local", "wandb.mode=disabled", *overrides])


@contextmanager
def started(
    run_dir: Path, makers: Makers, overrides: Sequence[str] = ()
) -> Generator[LocalController]:
    """Start the recipe of stubs."""
    loaded = load_stubs(overrides)
    with ExitStack() as ours:
        opened = open_run(loaded.config, run_dir, None, ours, {}, changed_code=False)
        spec = RunSpec(
            loaded.config,
            opened.run_id,
            opened.directory,
            Path.cwd(),
            driver=secrets.token_hex(4),
            inputs=opened.inputs,
        )
        yield LocalController(spec, makers)


def run_locally(run_dir: Path, makers: Makers, overrides: Sequence[str] = ()) -> RunRecords:
    """Run the recipe of stubs to its end and return what it left on disk."""
    with started(run_dir, makers, overrides) as controller:
        summary = Summary.from_json(controller.ended.result(LIMIT_S))
    records = RunRecords.read(run_dir)
    assert records.summary == summary
    return records


def drive_locally(
    run_dir: Path, makers: Makers, overrides: Sequence[str] = (), *, resume: bool = False
) -> int:
    """Run or resume the recipe of stubs as the command does, and return the exit code."""
    runtime = Runtime(partial(run_local, makers))
    if resume:
        loaded = load_recipe(run_dir / "config.yaml", [])
        return drive(runtime, loaded, None, dry_run=False, resume=run_dir).code
    return drive(runtime, load_stubs(overrides), run_dir, dry_run=False).code
