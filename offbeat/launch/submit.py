"""``offbeat submit``: runs a command in a copy of the working directory as a Ray job."""

import hashlib
import os
import secrets
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import typer

from offbeat.config.hub_path import is_on_hub
from offbeat.config.loader import LoadedRecipe
from offbeat.config.mixture import prompt_paths
from offbeat.config.secrets import is_secret_key
from offbeat.config.yaml_text import to_yaml
from offbeat.launch.ray_token import client_environment
from offbeat.messages.exit_codes import FAILED, REFUSED
from offbeat.messages.failures import FixableError, OffbeatError
from offbeat.messages.finding import size
from offbeat.messages.text import first_line, printable_lines
from offbeat.telemetry.logs import Redactor

EXCLUDED: Final = (
    ".git",
    ".venv*",
    "__pycache__",
    "runs",
    "*.egg-info",
    ".pytest_cache",
    ".ruff_cache",
)
MAX_PACKAGE_BYTES: Final = 200 * 2**20
_ENDED_EARLY: Final = ("FAILED", "STOPPED")
"""Statuses of Ray jobs whose runs can be resumed."""


class CannotPack(OffbeatError):
    """The working directory cannot be packed in its current state.

    Fix: as the message says, start above the recipe, move models and data, or remove secrets.
    """

    working_dir: str
    problem: str

    def __str__(self) -> str:
        return f"cannot submit from {self.working_dir}: {self.problem}"


class NoDashboardAddress(FixableError):
    """No Ray dashboard can exist at the address.

    Fix: use an address such as ``http://HOST:8265``.
    """

    form = "--address {!r} {}. {}"


class NoClusterNeeded(FixableError):
    """A recipe runs in one process, so it needs no cluster.

    Fix: run ``offbeat train`` on the machine, or set ``runtime.backend`` to ``ray``.
    """

    form = "{} {}. {}."


@dataclass(frozen=True, slots=True)
class RayJob:
    """A job to submit to Ray.

    The same recipe and overrides always have the same ``submission_id``. Each resume has a new one.
    """

    submission_id: str
    entrypoint: str
    working_dir: str
    run_dir: str
    go_on: str = ""
    """Command that continues the run in another job, without the address."""

    @property
    def runtime_env(self) -> dict[str, Any]:
        return {"working_dir": self.working_dir, "excludes": list(EXCLUDED)}


class Client(Protocol):
    """The methods of ``ray.job_submission.JobSubmissionClient`` that ``send`` uses."""

    def list_jobs(self) -> Iterable[Any]: ...
    def submit_job(
        self, *, entrypoint: str, submission_id: str, runtime_env: dict[str, Any]
    ) -> str: ...


def submit_job(
    what: LoadedRecipe | Path, overrides: Sequence[str], address: str, python: str | None
) -> int:
    """Pack and submit a job, print how to follow it, and return the exit code.

    Exit code 0: the job was submitted, now or before. 1: it was submitted before, and failed or was
    stopped. 2: the address, the token or the directory is wrong.

    ``what`` is a recipe, or the directory of a run to continue.
    """
    try:
        check_address(address)
        if isinstance(what, Path):
            job = plan_resume(what, overrides, Path.cwd(), python)
        else:
            check_on_cluster(what)
            job = plan(what, overrides, Path.cwd(), python)
    except (NoClusterNeeded, NoDashboardAddress, CannotPack) as error:
        typer.echo(printable_lines(str(error)), err=True)
        return REFUSED
    for name, value in client_environment(os.environ, Path.home()).items():
        os.environ.setdefault(name, value)
    # Ray reads its variables when it is imported.
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return send(job, JobSubmissionClient(address), address, typer.echo)
    except AuthenticationError as error:
        typer.echo(
            f"the Ray cluster at {address} asks for a token: {first_line(error).rstrip('.')}. Put the "
            "cluster's into ~/.ray/auth_token, or into RAY_AUTH_TOKEN.",
            err=True,
        )
        return REFUSED
    except (ConnectionError, RuntimeError) as error:
        typer.echo(
            f"no Ray dashboard accepted the job at {address}: {first_line(error).rstrip('.')}. "
            "Start one with ray start --head, or pass --address.",
            err=True,
        )
        return REFUSED


def check_on_cluster(loaded: LoadedRecipe) -> None:
    """Raise if the recipe does not run on a cluster.

    Raises:
        NoClusterNeeded: The recipe runs in one process.
    """
    if loaded.config.runtime.backend == "local":
        problem = "runs in one process, without Ray"
        fix = "Leave it out to submit the run, or start it here with offbeat train"
        raise NoClusterNeeded("runtime.backend=local", problem, fix)


def check_address(address: str) -> None:
    """Refuse addresses for which Ray's client would search a cluster for a minute.

    Raises:
        NoDashboardAddress: The address is not a URL of a host and an optional port.
    """
    try:
        url = urlsplit(address)
        reachable = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:  # for the port, or an IPv6 address
        reachable = False
    if not reachable:
        problem = "is not the address of a Ray dashboard"
        raise NoDashboardAddress(address, problem, "Write it as http://HOST:8265")


def plan(
    loaded: LoadedRecipe, overrides: Sequence[str], working_dir: Path, python: str | None
) -> RayJob:
    """Create the job for a recipe inside ``working_dir``.

    Files that are not packed must exist on the cluster too, under the same absolute path. The same
    holds for the run directory. It must not be inside the copy, because Ray deletes the copy.

    Raises:
        CannotPack: A recipe is not packed, the directory is too large, or an override is a secret.
    """
    sources = [Path(os.path.abspath(source)) for source in loaded.sources]  # noqa: PTH100 - without `..`
    for source in sources:
        if not _is_packed(source, working_dir):
            problem = (
                f"the recipe {source} does not travel with it. Keep recipes, and what they extend, in "
                f"this directory, outside of {', '.join(EXCLUDED)}"
            )
            raise CannotPack(str(working_dir), problem)
    recipe = sources[-1].relative_to(working_dir)
    _check_packed(overrides, working_dir)
    digest = hashlib.sha256(to_yaml(loaded.config, {}).encode()).hexdigest()[:8]
    submission_id = f"{loaded.config.name}-{digest}"
    run_dir = str(Path(loaded.config.run_dir.replace("{name}", submission_id)).absolute())
    command = [*_train(python), recipe.as_posix(), *overrides]
    command += [*_paths_not_packed(loaded, working_dir), "--run-dir", run_dir]
    go_on = ["offbeat", "submit", "--resume", run_dir]
    go_on += [] if python is None else ["--python", python]
    return RayJob(submission_id, shlex.join(command), str(working_dir), run_dir, shlex.join(go_on))


def plan_resume(
    run_dir: Path, overrides: Sequence[str], working_dir: Path, python: str | None
) -> RayJob:
    """Create a job that continues the run in ``run_dir``, a directory on the cluster.

    Every call creates another job. The lock of the run directory refuses all jobs but one.

    Raises:
        CannotPack: The directory is too large, or an override is a secret.
    """
    _check_packed(overrides, working_dir)
    directory = str(run_dir.absolute())
    command = [*_train(python), "--resume", directory, *overrides]
    submission_id = f"{run_dir.name}-resume-{secrets.token_hex(4)}"
    return RayJob(submission_id, shlex.join(command), str(working_dir), directory)


def _train(python: str | None) -> list[str]:
    return [python or sys.executable, "-m", "offbeat", "train"]


def _check_packed(overrides: Sequence[str], working_dir: Path) -> None:
    _refuse_secrets(overrides, working_dir)
    nbytes = count_packed_bytes(working_dir)
    if nbytes > MAX_PACKAGE_BYTES:
        problem = (
            f"it contains {size(nbytes)}, but at most {size(MAX_PACKAGE_BYTES)} are packed "
            f"(without {', '.join(EXCLUDED)}). Keep models and data elsewhere, and name them by "
            "absolute path"
        )
        raise CannotPack(str(working_dir), problem)


def _refuse_secrets(overrides: Sequence[str], working_dir: Path) -> None:
    """Refuse secrets in the command of a job, because every user of the cluster can list it."""
    redacted = Redactor.from_environment()
    for override in overrides:
        key, _, value = override.partition("=")
        if is_secret_key(key) or redacted(value) != value:
            problem = (
                f"{key} looks like a secret, and a job's command is not the place for one. Have your "
                "code read it from an environment variable of the cluster"
            )
            raise CannotPack(str(working_dir), problem)


def _paths_not_packed(loaded: LoadedRecipe, working_dir: Path) -> list[str]:
    config = loaded.config
    paths = {"model.path": config.model.path, **prompt_paths(config)}
    if config.model.weights is not None:
        paths["model.weights"] = config.model.weights
    if (teacher := config.algorithm.loss.teacher_path) is not None:
        paths["algorithm.loss.teacher"] = teacher
    return [
        f"{key}={path}"
        for key, path in paths.items()
        if not is_on_hub(path) and not _is_packed(Path(path), working_dir)
    ]


def _is_packed(path: Path, working_dir: Path) -> bool:
    return path.is_relative_to(working_dir) and not any(
        _is_excluded(part) for part in path.relative_to(working_dir).parts
    )


def count_packed_bytes(folder: Path) -> int:
    """Return the bytes of the files that would be packed. Links are not followed."""
    total = 0
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _is_excluded(name)]
        total += sum(
            (Path(root) / name).lstat().st_size for name in files if not _is_excluded(name)
        )
    return total


def _is_excluded(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in EXCLUDED)


def send(job: RayJob, client: Client, address: str, say: Callable[[str], object]) -> int:
    """Submit the job unless it exists, print how to follow it, and return the exit code.

    A job that has failed or was stopped is not submitted again. Its run can be continued.
    """
    known = {details.submission_id: details for details in client.list_jobs()}
    status = ""
    if job.submission_id in known:
        status = str(known[job.submission_id].status)
        again = (
            "resume its run, or change name= to start over"
            if status in _ENDED_EARLY
            else "change name= to run it again"
        )
        say(f"{job.submission_id} was submitted before and is {status}; {again}")
    else:
        client.submit_job(
            entrypoint=job.entrypoint,
            submission_id=job.submission_id,
            runtime_env=job.runtime_env,
        )
        say(f"{job.submission_id} submitted to {address}")
    if status in _ENDED_EARLY:
        say(f"  resume  {job.go_on} --address {address}")
    say(f"  follow  ray job logs {job.submission_id} --follow --address {address}")
    say(f"  stop    ray job stop {job.submission_id} --address {address}")
    say(f"  results {job.run_dir}")
    return FAILED if status in _ENDED_EARLY else 0
