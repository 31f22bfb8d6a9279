"""Checks of the run directory, the prompts and files on the hub."""

import math
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from offbeat.config.base import is_uri
from offbeat.config.environment_traits import find_traits
from offbeat.config.run import RunConfig
from offbeat.environments.factory import (
    BadEnvironment,
    make_evaluation_sets,
    make_prompts,
)
from offbeat.environments.held_out import overlaps
from offbeat.environments.hub_files import NO_COMMITS, fetch_commits
from offbeat.environments.inputs import DATA, eval_key
from offbeat.environments.prompt_files import FilePrompts, PromptFileError
from offbeat.environments.prompts import PromptSource
from offbeat.launch.bounded_call import run_bounded
from offbeat.launch.checks.model_files import ModelFiles
from offbeat.messages.finding import Finding, error, ok, size, warning
from offbeat.messages.fixed_times import READ_PROMPTS_S
from offbeat.weight_sync.dtypes import ITEMSIZE

_SIGNS_OF_A_RUN: Final = ("config.yaml", "journal", "metrics.jsonl", "summary.json")
_LOGS_BYTES: Final = 256 * 2**20
_CHECKPOINT_COPIES: Final = 3  # weights and two moments of AdamW
_LEAST_ITEMSIZE: Final = 4  # bytes: the state has float32 masters of 16-bit weights


def check_not_a_uri(run_dir: Path | None) -> Iterator[Finding]:
    """Check that the requested directory is a local path, not a URI."""
    if run_dir is not None and is_uri(str(run_dir)):
        seen = f"{run_dir} is a URI, but a run writes into a directory"
        yield error("run directory", seen, "Name a directory; copy it afterwards, or mount it.")


def check_run_dir(
    run_dir: Path,
    model: ModelFiles | None,
    *,
    requested: bool,
    checkpoints: int = 1,
    dtype: str = "float32",
    adapter_parameters: int | None = None,
) -> Iterator[Finding]:
    """Check that the directory can be written and has enough free space.

    A directory given on the command line (``requested``) must also be empty. ``checkpoints`` is the
    maximum number of trainer states on disk at once. ``dtype`` is the recipe's dtype, because the
    model's files may have a different one. ``adapter_parameters`` is the number of parameters of
    trained adapters, or None if the model is trained. With adapters, the states hold the adapters
    instead of the model.
    """
    signs = [name for name in _SIGNS_OF_A_RUN if (run_dir / name).exists()]
    there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not there.is_dir():
        yield error("run directory", f"{there} is a file", "Choose another with run_dir=...")
    elif not os.access(there, os.W_OK | os.X_OK):
        yield error(
            "run directory", f"{there} cannot be written", "Choose another with run_dir=..."
        )
    elif signs and requested:
        seen = f"{run_dir} holds another run ({', '.join(signs)})"
        fix = f"Choose another with --run-dir, or resume it: offbeat train --resume {run_dir}"
        call = f"Choose another with run_dir=..., or resume it: offbeat.resume({str(run_dir)!r})"
        yield error("run directory", seen, fix, call)
    elif signs:
        yield ok("run directory", f"{run_dir} holds another run: the next free number is taken")
    else:
        yield ok("run directory", f"{run_dir} can be written")
    folder = there if there.is_dir() else there.parent
    whole = model.parameters if model else 0
    trained = whole if adapter_parameters is None else adapter_parameters
    exported = whole + (adapter_parameters or 0)  # the model at the end, and the adapters
    state = _CHECKPOINT_COPIES * max(_LEAST_ITEMSIZE, ITEMSIZE[dtype]) * trained
    yield from _check_disk(folder, checkpoints, state, exported * ITEMSIZE[dtype])


def _check_disk(folder: Path, checkpoints: int, state: int, export: int) -> Iterator[Finding]:
    free = shutil.disk_usage(folder).free
    wanted = _LOGS_BYTES + checkpoints * state + export
    what = f"{checkpoints} checkpoints, the trained model and logs"
    seen = f"{size(free)} free at {folder}; {what} take about {size(wanted)}"
    if free < wanted:
        yield warning("disk", seen, "Free some space, or choose another disk with run_dir=...")
    else:
        yield ok("disk", seen)


def check_prompts(
    config: RunConfig,
    commits: Mapping[str, str] = NO_COMMITS,
    *,
    share: float = 1.0,
    read: dict[str, FilePrompts] | None = None,
) -> Iterator[Finding]:
    """Check every line of the prompt files, with the same code as a run.

    Args:
        config: The recipe.
        commits: The commits of paths on the hub.
        share: Share of the run's prompts that come from this environment.
        read: Mapping to fill with the prompts of the files that were read, by recipe key.
    """
    read = {} if read is None else read
    prompts = yield from _read(config, make_prompts, DATA, commits)
    if isinstance(prompts, FilePrompts):
        read[DATA] = prompts
    if prompts is not None:
        yield from _check_enough(config, prompts.rows, share)
    for name, one in config.eval.named_sets.items():
        key = eval_key(name)
        if one.path is None and not config.eval.interval:
            continue
        if one.path is None and (held_out := find_traits(config.environment.name).held_out):
            yield ok("evaluation", held_out)
            continue
        if one.path is None:
            seen = f"{key} is not set: evaluations score prompts that the run trains on"
            yield warning("evaluation", seen, f"Name a file of held-out prompts in {key}.")
            continue
        # Also sets that no step evaluates: ``offbeat eval`` or a resume with an interval does.
        only = config.eval.model_copy(update={"sets": {name: one} if name else {}, "interval": 1})
        held = yield from _read(config.model_copy(update={"eval": only}), _only_set, key, commits)
        if isinstance(held, FilePrompts):
            read[key] = held
            yield ok("prompts", f"{held.rows} rows in {one.path}, for evaluation")


def check_overlap(
    config: RunConfig, trained: Mapping[str, FilePrompts], held: Mapping[str, FilePrompts]
) -> Iterator[Finding]:
    """Check that no row is both trained on and held out.

    ``trained`` and ``held`` have the prompts by the recipe keys of their files.
    """
    digests = [{key: each.digests for key, each in read.items()} for read in (trained, held)]
    for overlap in overlaps(config, *digests):
        tell = error if config.eval.interval else warning  # without an interval no step scores them
        call = "Take them out of prompts or eval_prompts, or pass eval={'allow_overlap': True}."
        yield tell("held-out prompts", overlap.problem, overlap.fix, call)


def _only_set(config: RunConfig, commits: Mapping[str, str]) -> PromptSource:
    (prompts,) = make_evaluation_sets(config, commits).values()
    return prompts


def _read(
    config: RunConfig,
    make: Callable[[RunConfig, Mapping[str, str]], PromptSource],
    key: str,
    commits: Mapping[str, str],
) -> Generator[Finding, None, PromptSource | None]:
    """Return the prompts. If they cannot be read, yield a finding and return None."""
    try:
        return make(config, commits)
    except PromptFileError as broken:
        columns = key.replace("path", "columns")
        fix = f"Point {key} at JSON Lines or Parquet, and {columns} at its columns."
        fix = f"Fix the line, or {columns}." if broken.line else fix
        section = columns.removesuffix(".columns")
        call = (
            f"Fix the row, or name every column that is used: {section}={{'columns': {{'prompt': "
            "COLUMN, 'answer': COLUMN}}."
        )
        in_python = call if broken.line and "." not in section else ""
        fix, in_python = (f"{broken.fix}.", "") if broken.fix else (fix, in_python)
        yield error("prompts", str(replace(broken, fix="")), fix, in_python)
    except BadEnvironment as wrong:
        yield error("environment", str(wrong), f"Fix {wrong.key} in the recipe.")
    return None


def _check_enough(config: RunConfig, rows: int, share: float) -> Iterator[Finding]:
    groups_per_step = config.groups_per_step * share
    epochs, needed = config.data.epochs, round(config.steps * groups_per_step)
    if epochs is not None and rows * epochs < needed:
        drawn = rows * epochs
        steps = math.ceil(drawn / groups_per_step)
        last = "" if drawn % groups_per_step == 0 else ", the last of which is smaller"
        message = (
            f"{rows} rows in {epochs} epochs end after {steps} steps{last}; steps={config.steps} with "
            f"groups_per_step={config.groups_per_step} needs {needed}"
        )
        yield warning(
            "prompts", message, "Leave data.epochs out for endless prompts, or lower steps."
        )
    elif config.data.path is None:
        yield ok("prompts", f"made by environment.name={config.environment.name}")
    else:
        yield ok("prompts", f"{rows} rows in {config.data.path}")


def list_fetched_commits(config: RunConfig, known: Mapping[str, str]) -> dict[str, str]:
    """Return the commit of each path on the hub, once its files are on this machine.

    If ``known`` has a commit for a path, the path is read at that commit.

    Raises:
        HubFilesError: A file cannot be downloaded.
        DeadlineExceeded: The hub is too slow, or has stopped answering.
    """
    fetch = partial(fetch_commits, config, known)
    return run_bounded(fetch, "download of the prompt files from the hub", READ_PROMPTS_S)
