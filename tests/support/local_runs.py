"""Runs of the local runtime inside of the test's process, with parts that fail on purpose."""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from offbeat.config.loader import load_recipe
from offbeat.launch.opened_run import open_run
from offbeat.launch.run_parts import RunSpec
from offbeat.local.parts import Makers
from offbeat.local.run import LocalController
from offbeat.telemetry.summary import Summary
from tests.support.run_records import RunRecords
from tests.support.starting import STUB

LIMIT_S = 100


def run_locally(run_dir: Path, makers: Makers, overrides: Sequence[str] = ()) -> RunRecords:
    """Run the recipe of stubs to its end and return what it left on disk."""
    loaded = load_recipe(STUB, ["runtime=local", "wandb.mode=disabled", *overrides])
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
        summary = Summary.from_json(LocalController(spec, makers).ended.result(LIMIT_S))
    records = RunRecords.read(run_dir)
    assert records.summary == summary
    return records
