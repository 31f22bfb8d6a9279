"""Tasks of an environment of verifiers, read by a separate process into a prompt file.

``python -m offbeat.plugins.task_libraries.verifiers_tasks FILE`` reads a ``TasksRequest`` from
standard input. It creates the environment with all its checks. It writes ``FILE`` with a JSON
object per line and task, and a report next to it.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec

from offbeat.config.run import RunConfig
from offbeat.config.user_code import describe
from offbeat.doors import is_installed
from offbeat.environments.inputs import DATA, check_same
from offbeat.environments.prompt_files import FilePrompts, PromptFileError
from offbeat.messages.text import printable
from offbeat.plugins.task_libraries.verifiers_options import VerifiersOptions

NOT_INSTALLED: Final = (
    "the package verifiers is not installed: pip install 'offbeat[verifiers]' with "
    "constraints-verifiers.txt, in a separate environment"
)
_REPORT: Final = ".report"
_ERRORS_CHARACTERS: Final = 400  # quoted end of the standard error of a dead process


class TasksRequest(msgspec.Struct, frozen=True):
    """Environment to read tasks from, and the model to name the renderer of."""

    options: VerifiersOptions
    working_dir: str  # searched first for the modules that the environment names
    tokenizer: str = ""  # directory of the model; empty: no renderer is created
    renderer: dict[str, Any] = {}  # environment.renderer


class TasksReport(msgspec.Struct, frozen=True):
    """Result of a reading. ``problem`` is empty unless the environment cannot be used."""

    problem: str = ""
    renderer: str = ""  # name of the class that renders messages, if one was created


def read_tasks(request: TasksRequest, file: Path, within_s: float) -> TasksReport:
    """Write the tasks to ``file`` in another process. Kill it after ``within_s``.

    Raises:
        PromptFileError: The environment cannot be created, or its tasks cannot be read.
    """
    name = f"verifiers taskset {request.options.taskset}"
    try:
        done = subprocess.run(  # noqa: S603 - this program
            [sys.executable, "-m", __name__, str(file)],
            input=msgspec.json.encode(request),
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            cwd=request.working_dir,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        problem = f"not read within environment.reward_start_s={within_s:g}; raise it"
        raise PromptFileError(name, 0, problem) from late
    if done.returncode:
        said = printable(done.stderr.decode(errors="replace")[-_ERRORS_CHARACTERS:])
        problem = f"the process that reads it ended with code {done.returncode}: {said}"
        raise PromptFileError(name, 0, problem)
    report = msgspec.json.decode(_make_report_path(file).read_bytes(), type=TasksReport)
    if report.problem:
        raise PromptFileError(name, 0, report.problem)
    return report


def task_prompts(
    config: RunConfig,
    options: VerifiersOptions,
    began_with: Mapping[str, str],
    working_dir: Path,
) -> FilePrompts:
    """Return the tasks as prompts, each with the data to create its task again.

    Raises:
        InputChanged: They have changed since the run began.
        PromptFileError: As ``read_tasks``; of the rows as for any file.
    """
    with TemporaryDirectory(prefix="offbeat-tasks-") as folder:
        file = Path(folder) / "tasks.jsonl"
        request = TasksRequest(options, str(working_dir.absolute()))
        read_tasks(request, file, config.environment.reward_start_s)
        prompts = FilePrompts(
            [file],
            shuffle=config.data.shuffle,
            seed=config.seed,
            epochs=config.data.epochs,
            problem_of=lambda _: None,
        )
    check_same(DATA, f"the tasks of {options.taskset}", prompts.digest, began_with)
    return prompts


def main() -> None:
    """Serve one request."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TasksRequest)
    sys.path.insert(0, request.working_dir)
    file = Path(sys.argv[1])
    try:
        report = _written(request, file)
    except Exception as error:  # noqa: BLE001 - whatever a taskset raises, the report says it
        report = TasksReport(problem=describe(error, Path(request.working_dir)))
    _make_report_path(file).write_bytes(msgspec.json.encode(report))


def _written(request: TasksRequest, file: Path) -> TasksReport:
    if not is_installed("verifiers"):
        return TasksReport(problem=NOT_INSTALLED)
    from offbeat.plugins.task_libraries.verifiers_library import (  # noqa: PLC0415 - the extra, and seconds
        made_environment,
        renderer_name,
    )

    options = request.options
    environment = made_environment(options)
    if not environment.taskset.bounded and options.tasks is None:
        return TasksReport(
            problem="it is endless: set environment.options.tasks to how many to use"
        )
    tasks: Any = itertools.islice(environment.taskset, options.tasks)
    with file.open("wb") as rows:
        for task in tasks:
            row = task.data.model_dump(mode="json", exclude_none=True)
            rows.write(msgspec.json.encode(row) + b"\n")
    return TasksReport(renderer=renderer_name(request.renderer, request.tokenizer))


def _make_report_path(file: Path) -> Path:
    return file.with_suffix(_REPORT)


if __name__ == "__main__":
    main()
