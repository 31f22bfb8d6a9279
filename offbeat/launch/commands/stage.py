"""Runs ``offbeat stage`` and chooses its exit code."""

import os
from pathlib import Path

import typer

from offbeat.config.hub_path import MODEL_FORM, hub_model
from offbeat.launch.commands.arguments import refuse
from offbeat.launch.hub_snapshot import CannotStage, HubSnapshot, list_snapshot
from offbeat.messages.exit_codes import FAILED
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable_lines


def stage_or_exit(what: str, others: list[str], target: Path, stall_timeout_s: float) -> None:
    """Download a model and print a line per node.

    Raises:
        typer.Exit: With code 1 if a node lacks the model, with code 2 if nothing was downloaded.
    """
    try:
        snapshot = _snapshot(what, others, target)
        files = len(snapshot.bytes_by_file)
        _say(f"{files} files, {snapshot.nbytes:,} bytes, commit {snapshot.commit}")
        failures = _stage(snapshot, target, stall_timeout_s)
    except OffbeatError as error:
        refuse(error)
    if failures:
        refuse("\n".join(f"{node}: {failure}" for node, failure in failures.items()), FAILED)
    typer.echo(f"Every node has the model. In a recipe: model.path={target}")


def _snapshot(what: str, others: list[str], target: Path) -> HubSnapshot:
    named = hub_model(what)
    if named is None or others or Path(what).exists():
        problem = f"`offbeat stage` downloads one model of the hub, named {MODEL_FORM}"
        fix = f"Copy a directory to each machine with: rsync -a DIRECTORY/ MACHINE:{target}/"
        raise CannotStage(" ".join([what, *others]), problem, fix)
    if not target.is_absolute():
        fix = "Write it from / on: each node has a different working directory"
        raise CannotStage(f"--to {target}", "it is relative", fix)
    return list_snapshot(*named)


def _stage(snapshot: HubSnapshot, target: Path, stall_s: float) -> dict[str, OffbeatError]:
    """Download on all nodes of the cluster at ``RAY_ADDRESS``, or else here. Return failures."""
    from offbeat.launch.process_environment import set_environment

    set_environment({})
    if os.environ.get("RAY_ADDRESS"):
        # Ray reads its variables when it is imported.
        from offbeat.launch.stage_nodes import stage_on_cluster

        return stage_on_cluster(snapshot, target, stall_s, _say)
    from offbeat.launch.stage import stage_model

    try:
        for line in stage_model(snapshot, target, stall_s):
            _say(line)
    except OffbeatError as error:
        return {"this machine": error}
    return {}


def _say(line: str) -> None:
    typer.echo(printable_lines(line))
