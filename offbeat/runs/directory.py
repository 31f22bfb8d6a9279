"""Chooses and creates the directory of one run, which is never shared with another run.

If a path is not a run, the module finds the run that contains it or the runs below it, so that a
message can name them.
"""

import contextlib
import fcntl
import itertools
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import yaml

from offbeat.config.base import is_uri
from offbeat.config.by_value import is_by_value
from offbeat.config.mixture import (
    SECTION,
    environment_views,
    evaluation_paths,
    key_in,
    prompt_paths,
)
from offbeat.config.run import RunConfig
from offbeat.config.secrets import find_redacted_keys
from offbeat.config.trainer_parts import list_fixed_keys
from offbeat.config.yaml_text import to_yaml
from offbeat.environments.hub_files import NO_COMMITS
from offbeat.environments.inputs import DATA, source_digest
from offbeat.messages.failures import FixableError
from offbeat.run_files.limits import SUMMARY_BYTES, UNREADABLE, read_json
from offbeat.runs.inputs import (
    MODEL,
    WORKING_DIR,
    all_inputs,
    input_digests,
    keep_tokenizer,
    read_inputs,
    replace_inputs,
    targets,
)
from offbeat.telemetry.summary import write_atomically

CONFIG: Final = "config.yaml"
SUMMARY: Final = "summary.json"
JOURNAL: Final = "journal"
_LATEST: Final = Path("checkpoints/LATEST")
RETRAINED: Final = "retrain.json"
"""File that marks a directory of ``offbeat retrain``. It has a run's journal, but is not a run."""


class RunDirUnusable(FixableError):
    """The run directory cannot be used.

    Fix: use another ``--run-dir``, restore ``journal/``, or resume with the old keys.
    """

    form = "run directory {}: {}. {}"

    fix_in_python: str = ""  # if a call fixes it and not a command

    def in_python(self) -> str:
        """Return the text for a caller in Python, which names calls instead of commands."""
        return self.form.format(self.subject, self.problem, self.fix_in_python or self.fix)


_NAME_ANOTHER: Final = ("Name another one with --run-dir", "Name another one with run_dir=...")
"""Fix on the command line, and in Python."""


def _resume_call(directory: Path, *arguments: str) -> str:
    return f"offbeat.resume({', '.join([repr(str(directory)), *arguments])})"


def make_run_dir(
    config: RunConfig, requested: Path | None, commits: Mapping[str, str] = NO_COMMITS
) -> Path:
    """Create the run's directory and write the resolved config into it.

    A directory passed as ``requested`` must not be in use. The recipe's ``run_dir`` gets the first
    free number as suffix, so that the same recipe can be run again. ``commits`` are the commits of
    the recipe's paths on the hub.

    Raises:
        RunDirUnusable: The directory contains a run already, cannot be written, or is a URI.
    """
    if requested is not None and is_uri(str(requested)):
        fix = "Name a directory; copy it afterwards, or mount the storage"
        raise RunDirUnusable(str(requested), "it is a URI, but a run writes into a directory", fix)
    wanted = Path(str(requested or config.run_dir).replace("{name}", config.name)).absolute()
    numbered = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    candidates = itertools.chain([wanted], () if requested else numbered)
    for candidate in candidates:
        ours: Path | None = None
        try:
            candidate.mkdir(parents=True, exist_ok=True)
            # Creating the config claims the directory, and decides a race between two runs.
            with (candidate / CONFIG).open("x", encoding="utf-8") as file:
                ours = candidate / CONFIG
                file.write(to_yaml(config, os.environ))
            replace_inputs(candidate, all_inputs(config, Path.cwd(), commits))
            keep_tokenizer(Path(config.model.path), candidate)
        except FileExistsError:
            continue
        except OSError as error:
            if ours is not None:  # a full disk: a partial config would look like a run's
                ours.unlink()
            raise RunDirUnusable(
                str(candidate), error.strerror or str(error), *_NAME_ANOTHER
            ) from error
        return candidate
    if not wanted.is_dir():
        raise RunDirUnusable(str(wanted), "it is a file", *_NAME_ANOTHER)
    command, call = _NAME_ANOTHER
    raise RunDirUnusable(
        str(wanted),
        "it holds another run",
        f"{command}, or resume it: offbeat train --resume {wanted}",
        f"{call}, or resume it: {_resume_call(wanted)}",
    )


@dataclass(slots=True)
class ResumedDirectory:
    """Directory of a run to resume, with the recipe and inputs stored at the last start."""

    path: Path
    inputs: Mapping[str, str]
    """Inputs with which the run continues."""

    _config: str
    _recorded: frozenset[str]  # keys of the inputs that were stored
    notices: tuple[str, ...] = ()
    """One sentence for each key that changes its value. ``config.yaml`` has only the last value."""

    _is_accepted: bool = False

    def accept(self) -> None:
        """Replace the stored recipe and inputs, once. Keep inputs that the run recorded meanwhile.

        Raises:
            OSError: The directory cannot be written.
        """
        if self._is_accepted:
            return
        since = {k: v for k, v in read_inputs(self.path).items() if k not in self._recorded}
        replace_inputs(self.path, {**since, **self.inputs})
        write_atomically(self.path / CONFIG, self._config.encode())
        self._is_accepted = True


def reopen_run_dir(
    config: RunConfig,
    run_dir: Path,
    *,
    changed_code: bool = False,
    commits: Mapping[str, str] = NO_COMMITS,
) -> ResumedDirectory:
    """Check the directory of a run to resume against the recipe, and return it.

    ``changed_code`` allows changes in the source of the user's modules since the run began.
    ``commits`` are the commits of paths on the hub that the run did not name before.

    The stored config stays until ``ResumedDirectory.accept``. If the run had ended, its summary is
    removed. A run that ended before its first record starts afresh.

    Raises:
        RunDirUnusable: The directory contains no run, or a run that this recipe cannot continue
            (the message names each difference); the run has finished all these steps, or its newest
            checkpoint has more; or the directory cannot be written.
    """
    directory = run_dir.absolute()
    if not (directory / CONFIG).exists():
        fix = "Name the directory that an earlier run wrote"
        raise RunDirUnusable(str(directory), "it has no run to resume", fix)
    if (directory / RETRAINED).exists():
        problem = "offbeat retrain wrote it, from the groups of another run"
        raise RunDirUnusable(str(directory), problem, f"Resume that run: {RETRAINED} names it")
    _check_secrets(config, directory)
    content = to_yaml(config, os.environ)
    try:
        before = yaml.safe_load((directory / CONFIG).read_text(encoding="utf-8"))
        recorded = read_inputs(directory)
        known = {**commits, **recorded}
        inputs = _find_changed_inputs(config, known, before, changed_code=changed_code)
        wanted = yaml.safe_load(content)
        _check_fixed(before, wanted, directory, inputs, code=targets(config))
        notices = tuple(_notices(dict(leaves(before)), dict(leaves(wanted))))
        _check_journal(directory)
        _check_unfinished(config, directory)
        _check_not_saved(config, directory)
        (directory / JOURNAL).mkdir(exist_ok=True)
        kept = {**_still_named(known, before, config), **_of_tasks(known, config)}
        now = all_inputs(config, Path.cwd(), kept)
        (directory / SUMMARY).unlink(missing_ok=True)
    except (*UNREADABLE, yaml.YAMLError) as error:
        fix = "Make it readable and writable, or start a new run"
        raise RunDirUnusable(str(directory), str(error), fix) from error
    return ResumedDirectory(directory, now, content, frozenset(recorded), notices)


def check_code_is_here(config: RunConfig, run_dir: Path, working_dir: Path) -> None:
    """Check that the user's modules that the run imported are found again.

    Raises:
        RunDirUnusable: A module is not found from ``working_dir``.
    """
    before = read_inputs(run_dir)
    missing = [
        f"{key}={target}"
        for key, target in targets(config).items()
        if key in before and source_digest(target, working_dir) is None
    ]
    if not missing:
        return
    began = Path(before.get(WORKING_DIR, ""))
    is_there = began.is_absolute() and began != working_dir and began.is_dir()
    fix = (
        f"Resume from {began}, where the run was started"
        if is_there
        else "Resume from the directory that holds the code"
    )
    problem = f"no module is found from {working_dir} for {', '.join(missing)}"
    raise RunDirUnusable(str(run_dir), problem, fix)


_DONE: Final = ("rollouts", "checkpoints")
"""Directories that are written only after the journal has been written."""


def _check_journal(directory: Path) -> None:
    """Check that the journal has been written, or that the run had nothing to write yet."""
    if any(file.stat().st_size for file in (directory / JOURNAL).glob("events-*.bin")):
        return
    done = [name for name in _DONE if any(directory.glob(f"{name}/*"))]
    metrics = directory / "metrics.jsonl"
    if done or (metrics.exists() and metrics.stat().st_size):
        raise RunDirUnusable(
            str(directory),
            "its journal is empty or gone: nothing records which prompts were drawn or trained",
            "Bring journal/ back, or start a new run; a checkpoint may serve as its model",
        )


def _check_unfinished(config: RunConfig, directory: Path) -> None:
    """Check that steps are left to train. If none is, the finished run keeps its summary."""
    path = directory / SUMMARY
    summary = read_json(path, SUMMARY_BYTES, dict[str, Any]) if path.exists() else {}
    done = summary.get("steps")
    if summary.get("outcome") == "finished" and isinstance(done, int) and done >= config.steps:
        problem = f"its run has finished step {done}, but steps={config.steps}"
        steps = f"steps={done * 2}"
        raise RunDirUnusable(
            str(directory),
            problem,
            f"Ask for more: offbeat train --resume {directory} {steps}",
            f"Ask for more: {_resume_call(directory, steps)}",
        )


def _check_not_saved(config: RunConfig, directory: Path) -> None:
    """Check that the newest checkpoint does not have more steps than the recipe."""
    saved = find_saved_version(directory)
    if saved > config.steps:
        problem = f"its newest checkpoint has step {saved}, and steps={config.steps}"
        fix = f"Ask for {saved} to export that model, or for more to train on: "
        steps = f"steps={saved * 2}"
        raise RunDirUnusable(
            str(directory),
            problem,
            f"{fix}offbeat train --resume {directory} {steps}",
            f"{fix}{_resume_call(directory, steps)}",
        )


def find_saved_version(directory: Path) -> int:
    """Return the version of the newest checkpoint of the trainer's state, or 0 without one."""
    try:
        name = (directory / _LATEST).read_text(errors="replace").strip()
    except OSError:
        return 0
    number = name.removeprefix("state_")
    return int(number) if number.isdecimal() else 0


@contextmanager
def lock_directory(directory: Path) -> Generator[None]:
    """Lock the directory during the block, or until the process ends.

    On a file system without locks, no process is refused. If two controllers run there, the journal
    lets only the later one continue.

    Raises:
        RunDirUnusable: Another process has locked it, or the directory does not exist.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        fix = "Name the directory that an earlier run wrote"
        raise RunDirUnusable(str(directory), "it has no run to resume", fix) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        command = f"offbeat control {directory} stop"
        raise RunDirUnusable(
            str(directory),
            "its run is alive",
            f"End it first: {command}",
            f"End it first: stop() of the run that start() returned, or {command} in a shell",
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(handle)


_ROUNDING: Final = "trainer.optimizer.rounding"
_FIXED: Final = (
    "seed",
    "groups_per_step",
    "samples_per_group",
    "sampler.name",
    "model",
    "data",
    "environment.name",
    "environment.target",
    "environment.command",
    "environment.options",
    "environment.rewards",
    "weight",
    "algorithm.loss.teacher",
    "trainer.backend",
    "trainer.freeze",
    _ROUNDING,
)
"""Keys that a resume cannot change: they define prompts, steps, teacher and trained weights.

The same holds for the sections of some trainer parts.
"""


def _find_changed_inputs(
    config: RunConfig, before: Mapping[str, str], recipe: object, *, changed_code: bool
) -> dict[str, str]:
    """Return, by recipe key, how each input of the run has changed, or "" if it has not.

    ``recipe`` is the run's previous recipe. If an input was not recorded or is not a local file,
    only its name is compared.
    """
    here = Path.cwd()
    now = input_digests(config, here, before)
    code = targets(config)
    problems = {
        key: "has different prompts from those the run has drawn from"
        + _commits(key, path, now, before, recipe)
        for key, path in prompt_paths(config).items()
    }
    problems[MODEL] = "has a different config, tokenizer or code from the one the run began with"
    problems |= dict.fromkeys(code, _other_code(before.get(WORKING_DIR, ""), here))
    scored = "has different prompts under the same name from those the run was scored on"
    problems |= dict.fromkeys(evaluation_paths(config), scored)
    same = {key: before[key] == now[key] for key in before.keys() & now.keys()}
    if changed_code:
        same |= dict.fromkeys(same.keys() & code.keys(), True)
    return {key: "" if same[key] else f"{key} {problems[key]}" for key in same}


def _commits(
    key: str, path: str, now: Mapping[str, str], before: Mapping[str, str], recipe: object
) -> str:
    """Describe the prompts' commits on the hub, now and before, if both are known."""
    was = before.get(str(dict(leaves(recipe)).get(key)))
    is_now = now.get(path)
    return f": commit {is_now}, but the run began with commit {was}" if was and is_now else ""


def _other_code(before: str, here: Path) -> str:
    problem = "leads to different source code from the one the run began with"
    if before and before != str(here):
        return f"{problem}: that was imported from {before}, but this is {here}. Resume from there"
    return problem


def _still_named(known: Mapping[str, str], before: object, config: RunConfig) -> dict[str, str]:
    """Return the recorded digests of inputs that are unreadable now and have unchanged names."""
    was, now = dict(leaves(before)), dict(leaves(config.model_dump()))
    keys = (*prompt_paths(config), MODEL, *targets(config))
    same = {key: known[key] for key in keys if key in known and was.get(key) == now.get(key)}
    paths = prompt_paths(config).values()
    return same | {path: known[path] for path in paths if path in known}


def _of_tasks(known: Mapping[str, str], config: RunConfig) -> dict[str, str]:
    """Return the digests of prompts that an environment's code makes for the controller."""
    keys = (
        key_in(name, DATA)
        for name, view in environment_views(config).items()
        if view.environment.makes_prompts
    )
    return {key: known[key] for key in keys if key in known}


def _check_fixed(
    before: object,
    now: object,
    directory: Path,
    inputs: dict[str, str],
    code: Collection[str],
) -> None:
    """Check that the fixed keys are unchanged.

    Prompts may have moved if their content is the same. Code that was passed by value may have a
    different name, because the inputs contain its digest. ``code`` has the keys of the user's code.
    """
    was, wanted = dict(leaves(before)), dict(leaves(now))
    keys = [key for key in dict.fromkeys([*wanted, *was]) if _is_fixed(key)]
    changed = [
        f"{key} is {wanted.get(key)!r}, the run has {was.get(key)!r}"
        for key in keys
        if wanted.get(key) != was.get(key)
        and not (_own_key(key) == DATA and key in inputs)
        and not (is_by_value(str(was.get(key))) and is_by_value(str(wanted.get(key))))
        and not _rounds_to_nearest_now(was, wanted, key)
        and not _has_more_epochs(was, wanted, key)
    ]
    changed += [
        problem
        for key, problem in inputs.items()
        if problem and not (_own_key(key).startswith("eval.") and was.get(key) != wanted.get(key))
    ]
    if changed:
        start_anew = "or start a new run"
        backends = {was.get("trainer.backend"), wanted.get("trainer.backend")}
        if len(backends) > 1 and "stub" not in backends:
            saved = f"{directory / 'checkpoints'}/"
            start_anew += (
                f" with its weights: model.weights={saved}state_N, or model.path={saved}step_N of an "
                "export"
            )
        command = (
            "Keep these as they were (offbeat train --resume RUN without settings does), "
            f"{start_anew}"
        )
        call = (
            f"Keep these as they were ({_resume_call(directory)} without settings does), "
            f"{start_anew}"
        )
        if any(inputs.get(key) for key in code):
            command += ". To continue with changed code, add --changed-code"
            call += ". To continue with changed code, pass changed_code=True"
        raise RunDirUnusable(str(directory), "; ".join(changed), command, call)


def _has_more_epochs(was: Mapping[str, object], wanted: Mapping[str, object], key: str) -> bool:
    """Return whether a change of ``key`` only adds epochs. Prompts so far then stay the same."""
    had, has = was.get(key), wanted.get(key)
    is_more = isinstance(had, int) and (not isinstance(has, int) or has > had)
    return _own_key(key) == "data.epochs" and is_more


def _rounds_to_nearest_now(
    was: Mapping[str, object], wanted: Mapping[str, object], key: str
) -> bool:
    """Return whether ``key`` ends random rounding. The checkpoint has float32 masters for both."""
    return key == _ROUNDING and (was.get(key), wanted.get(key)) == ("stochastic", "nearest")


def _notices(was: Mapping[str, object], wanted: Mapping[str, object]) -> Iterator[str]:
    for key in dict.fromkeys([*wanted, *was]):
        if key != _ROUNDING and was.get(key) != wanted.get(key):
            yield f"{key} is {wanted.get(key)!r} from now on, it was {was.get(key)!r}"
    if _rounds_to_nearest_now(was, wanted, _ROUNDING):
        yield (
            f"{_ROUNDING} is 'nearest', the run has 'stochastic': all weights, including the "
            "checkpoint's, are rounded to the nearest bfloat16 from now on"
        )


def _check_secrets(config: RunConfig, directory: Path) -> None:
    """Check that no secret that the stored config omits is a literal value in the recipe now."""
    missing = list(find_redacted_keys(config.model_dump()))
    if missing:
        problem = f"{CONFIG} has no secrets, so {', '.join(missing)} is not known"
        raise RunDirUnusable(str(directory), problem, f"Give it again: {missing[0]}=...")


def _is_fixed(key: str) -> bool:
    return any(
        f"{_own_key(key)}.".startswith(f"{fixed}.") for fixed in (*_FIXED, *list_fixed_keys())
    )


def _own_key(key: str) -> str:
    """Return a key of one of several environments in the form it has with only that environment."""
    section, _, below = key.partition(".")
    return below.partition(".")[2] if section == SECTION and below else key


def leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield every value with its dotted key."""
    if isinstance(tree, dict):
        for key, value in cast("dict[str, object]", tree).items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, tree


_LISTED: Final = 2  # runs below a directory that a message names
_LOOKED_AT: Final = 200  # entries of a directory, so that a message about / is fast


def run_around(path: Path) -> Path | None:
    """Return the run that contains a file or a folder, or None if no run does."""
    with contextlib.suppress(OSError):
        return next((each for each in path.resolve().parents if (each / JOURNAL).is_dir()), None)
    return None


def runs_below(directory: Path) -> list[Path]:
    """Return some runs directly below a directory, or if there are none, some one level deeper."""
    children = list(_folders(directory))
    levels = children, (each for child in children for each in _folders(child))
    for level in levels:
        runs = (each for each in level if (each / JOURNAL).is_dir())
        if found := list(islice(runs, _LISTED)):
            return found
    return []


def what_to_name(path: Path) -> str:
    """Suggest a run directory to pass instead of ``path``, in one sentence."""
    around = run_around(path)
    if around is not None:
        return f"Name the run that contains it, {around}"
    below = runs_below(path) if path.is_dir() else []
    if below:
        return f"Name a run, as in {' or '.join(map(str, below))}"
    return (
        "Name a run directory, as in runs/gsm8k (it has config.yaml and journal once the run began)"
    )


def _folders(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):  # another user's
        for child in islice(sorted(directory.iterdir()), _LOOKED_AT):
            if child.is_dir() and not child.is_symlink():
                yield child
