"""A run as a Python object: reads its results, and waits for or stops a live run."""

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import yaml

from offbeat.config.hub_path import name_of_copy
from offbeat.config.run import RunConfig
from offbeat.config.secrets import without_secrets
from offbeat.config.yaml_text import RecipeDumper
from offbeat.controller.commands import Stop
from offbeat.doors import find_only
from offbeat.launch.process_environment import import_progress_bars
from offbeat.messages.delayed_interrupt import delay_interrupt
from offbeat.messages.exit_codes import FAILED
from offbeat.messages.failures import FixableError, OffbeatError, ShortInNotebooks
from offbeat.messages.missing_package import name_missing_package
from offbeat.messages.redaction import of_environment
from offbeat.runs import results
from offbeat.runs.directory import CONFIG, RunDirUnusable, what_to_name
from offbeat.runs.past_run import run_directory
from offbeat.runs.unfinished import describe_unsaved_steps
from offbeat.runs.why import GroupHistory, why

if TYPE_CHECKING:
    from offbeat.launch.preview import Preview
    from offbeat.launch.program import Rewards
    from offbeat.launch.session import RunEnd, Session

Row = results.Row
_codes_at_exit: Final = list[int]()
_REWARD: Final = "train/reward"
_STOPPED: Final = "run.stop()"
_OF_LIVE_RUNS: Final = ("is_alive", "stop", "wait")


class NoRunInDirectory(ShortInNotebooks, FixableError):
    """A directory holds no run.

    Fix: pass one of the suggested directories.
    """

    form = "{}: {}. {}"


class NothingExported(ShortInNotebooks, FixableError):
    """A run has written no model yet.

    Fix: wait for the end of the run, or resume it. The end writes the model.
    """

    form = "{}: {}. {}"


class RunRefused(ShortInNotebooks, OffbeatError):
    """A run was refused. ``problems`` lists all problems that were found.

    Fix: fix the listed problems.
    """

    problems: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.problems)


class TrainingFailed(ShortInNotebooks, OffbeatError):
    """A run ended with an error. ``run`` gives access to its files.

    Fix: fix the named error, then resume the run.
    """

    error: str
    run_dir: str
    go_on: str  # the call that resumes the run

    def __str__(self) -> str:
        return f"{self.error}\nlogs: {self.run_dir}/logs; to resume: {self.go_on}"

    @property
    def run(self) -> "Run":
        return open_run(self.run_dir)


class RunInterrupted(ShortInNotebooks, KeyboardInterrupt):
    """A run was interrupted and can be resumed. The message names steps that are in no checkpoint.

    Fix: resume the run. To save more steps, raise ``supervision.signal_grace_s``, or set
    ``checkpoint.interval``.
    """

    def __init__(self, run_dir: str, go_on: str, unsaved: str = "") -> None:
        super().__init__(run_dir, go_on, unsaved)
        self.run_dir = run_dir
        self.go_on = go_on  # the call that resumes the run
        self.unsaved = unsaved  # a sentence on steps that no checkpoint has, or ""

    def __str__(self) -> str:
        saves = (
            "A run saves its last step if checkpoint.interval is above 0 and the step and its "
            "checkpoint fit into supervision.signal_grace_s"
        )
        end = f"{self.unsaved}. {saves}" if self.unsaved else "the run ended cleanly"
        return f"{end}; to resume: {self.go_on}"

    @property
    def run(self) -> "Run":
        return open_run(self.run_dir)


class WritePage(Protocol):
    """Function that writes one page on runs."""

    def __call__(self, run_dirs: Sequence[Path], output: Path | None) -> Path:
        """Write the page to ``output``, by default next to the first run, and return its path."""
        ...


class Report(NamedTuple):
    """The page of a run."""

    path: Path

    def _repr_html_(self) -> str:
        """Return the page in a frame."""
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:600px;border:0"></iframe>'


class Run:
    """Results of a run, read from its directory. The run may be live, ended or another user's."""

    def __init__(self, directory: Path) -> None:
        """Read nothing yet."""
        self.directory = directory

    def __repr__(self) -> str:
        summary = self.summary if self.directory.is_dir() else {}
        end = f", {summary['outcome']} after step {summary['steps']}" if summary else ""
        return f"Run({str(self.directory)!r}{end})"

    if not TYPE_CHECKING:  # a type checker knows which class has them

        def __getattr__(self, name: str) -> Any:
            """Explain which object has an attribute that only the result of ``start`` has."""
            if name in _OF_LIVE_RUNS:
                problem = (
                    f"this Run has only results; {name} belongs to the Run that offbeat.start() "
                    "returned"
                )
                fix = f"in a shell: offbeat control {self.directory} stop"
                raise AttributeError(f"{problem}; {fix}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def config(self) -> RunConfig:
        """The recipe, with defaults filled in."""
        return results.read_config(self.directory)

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``, empty until the run has ended."""
        path = run_directory(self.directory) / "summary.json"
        return yaml.safe_load(path.read_bytes()) if path.exists() else {}

    def metrics(self) -> Any:
        """Return one row per step: ``step``, ``version``, ``time_s`` and a column per metric.

        The result is a ``DataFrame``, or a list of dicts if pandas is not installed.
        """
        return _table(results.metric_rows(self.directory))

    def evaluations(self) -> Any:
        """Return one row per evaluation. ``version`` is the scored version."""
        return _table(results.evaluation_rows(self.directory))

    def failures(self) -> Any:
        """Return one row per failed sample or group that the run has recorded."""
        return _table(results.failure_rows(self.directory))

    def samples(self, step: int | None = None) -> Any:
        """Return one row per sample that a step has trained, by default the last step.

        Columns: ``prompt``, ``response``, ``reward``, ``advantage``, ``group``, ``sample``, ``tokens``,
        ``branches``, ``finish_reason``, ``oldest_version`` and ``newest_version``. ``response`` has
        all branches of an agent's sample, each with a heading. For a live run, the log of rollouts
        is some seconds late. Texts that it does not have yet are None.

        Raises:
            NoSuchStep: The step was not trained.
        """
        return _table(results.sample_rows(self.directory, step))

    def why(self, group: int | str) -> GroupHistory:
        """Return the history of a group, as ``offbeat why`` does."""
        return why(self.directory, str(group))

    def report(self, path: Path | str | None = None) -> "Report":
        """Write the page of ``offbeat report`` and return it. A notebook shows the page inline.

        ``path`` is ``report.html`` in the run's directory by default.
        """
        write = cast("WritePage", find_only("page"))
        return Report(write([self.directory], None if path is None else Path(path)))

    def preview(self, *, reward: "Rewards | None" = None, agent: Any = None) -> "Preview":
        """Sample and reward the first prompts with the newest exported model, else the initial one.

        Args:
            reward: As in ``offbeat.train``. In another process, pass it again if it was passed by
                value.
            agent: The same for an agent.

        Raises:
            PreviewFailed: The preview ended with an error.
            RunRefused: This machine or an input does not allow the run.
        """
        from offbeat.config.loader import load_recipe
        from offbeat.launch.preview import preview_recipe
        from offbeat.launch.program import compose_object_overrides

        import_progress_bars()
        overrides = compose_object_overrides(reward, agent)
        try:
            overrides += [f"model.path={self.model_path}", "model.weights=null"]
            note = ""
        except NothingExported:
            note = "the initial model: the run has exported none yet"
        return preview_recipe(load_recipe(self.directory / CONFIG, overrides), note=note)

    def plot(self, *names: str, axes: Any = None) -> Any:
        """Draw metrics by step, and evaluations as points. Return the ``Axes``.

        Args:
            names: Metrics, as in ``metrics``. Default: the reward.
            axes: Where to draw. None creates a new figure.

        Raises:
            NoSuchMetric: No metric has such a name.
            PartPackageMissing: matplotlib is not installed.
        """
        with name_missing_package():
            from matplotlib import pyplot as plt

        curves = [results.read_curve(self.directory, name) for name in names or (_REWARD,)]
        axes = plt.subplots()[1] if axes is None else axes
        for curve in curves:
            style = "o-" if curve.is_of_evaluations else "-"
            axes.plot(curve.versions, curve.values, style, label=curve.name)
        axes.set_xlabel("step")
        axes.legend()
        return axes

    @property
    def model_path(self) -> Path:
        """Directory of the newest exported model, in the format of transformers.

        Raises:
            NothingExported: No model is exported.
        """
        exported = sorted(
            (run_directory(self.directory) / "checkpoints").glob("step_*/config.json"),
            key=lambda path: int(path.parent.name.removeprefix("step_")),
        )
        if not exported:
            raise NothingExported(
                str(self.directory), "it has no exported model", self._export_fix()
            )
        return exported[-1].parent

    def _export_fix(self) -> str:
        steps = self.summary.get("steps")
        if steps is None:
            return "A run writes its model at its end"
        if not steps:
            return "It has trained no step"
        call = f"offbeat.resume({str(self.directory)!r}, steps={steps})"
        return f"It ended early, after step {steps}: {call} writes its model"

    def load(self, **options: Any) -> tuple[Any, Any]:
        """Load the newest exported model and return it with its tokenizer.

        ``options`` are passed to ``from_pretrained`` of the model.

        Raises:
            NothingExported: No model is exported.
            PartPackageMissing: transformers or torch is not installed.
        """
        import_progress_bars()
        with delay_interrupt(), name_missing_package():
            from transformers import (  # imports torch
                AutoModelForCausalLM,
                AutoTokenizer,
            )

        model: Any = AutoModelForCausalLM
        tokenizer: Any = AutoTokenizer
        path = self.model_path
        return model.from_pretrained(path, **options), tokenizer.from_pretrained(path)

    def save_recipe(self, path: Path | str, *, overwrite: bool = False) -> None:
        """Write a recipe for ``offbeat train`` with the keys that differ from the defaults.

        Raises:
            FileExistsError: The file exists, and ``overwrite`` is not set.
        """
        if Path(path).exists() and not overwrite:
            raise FileExistsError(f"{path} exists: name another file, or pass overwrite=True")
        config = self.config
        values = without_secrets(
            config.model_dump(exclude_defaults=True), of_environment(os.environ)
        )
        values["model"]["path"] = name_of_copy(config.model.path) or config.model.path
        text = yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True)
        Path(path).write_text(text, encoding="utf-8")


class LiveRun(Run):
    """A run that executes in the background of this process."""

    def __init__(self, session: "Session", execute: Callable[[], "RunEnd"]) -> None:
        """Start the run. Return once it has a directory.

        Raises:
            RunRefused: The run was refused.
        """
        self._session = session
        self._end: RunEnd | BaseException | None = None
        self._over = threading.Event()  # a join that is interrupted forgets its thread
        threading.Thread(target=self._run, args=(execute,), name="offbeat-run").start()
        try:
            session.opened.wait()
        except KeyboardInterrupt:
            session.signals.stop()
            raise
        directory = session.directory
        super().__init__(self._wait_for_end().directory if directory is None else directory)
        _call_at_program_end(self._outlive_program)

    def _run(self, execute: Callable[[], "RunEnd"]) -> None:
        try:
            self._end = execute()
        except BaseException as error:  # noqa: BLE001 -- not handled here: ``wait`` raises it
            self._end = error
        finally:
            self._over.set()
            self._session.opened.set()

    def _outlive_program(self) -> None:
        """Keep the process alive until the run has ended. Signals act as in ``offbeat train``."""
        from offbeat.launch.session import Interrupted  # imported already: it is slow

        if self._over.is_set():
            return
        with contextlib.suppress(Interrupted), self._session.signals.install():
            _tell(
                f"the program has ended, but the run in {self.directory} continues (Ctrl-C ends it)"
            )
            self._over.wait()
        try:
            self._wait_for_end(is_asked=False)
        except RunInterrupted as interrupted:
            _tell(str(interrupted))
            _codes_at_exit.append(128 + (self._session.signals.received or signal.SIGINT))
        except Exception:  # noqa: BLE001 -- nobody is left to raise it to
            traceback.print_exc()
            _codes_at_exit.append(FAILED)

    def _wait_for_end(self, *, is_asked: bool = True) -> Run:
        """Wait for the end and return the run."""
        self._over.wait()
        if isinstance(self._end, BaseException):
            raise self._end
        return make_ended_run(self._end, is_asked=is_asked)

    @property
    def is_alive(self) -> bool:
        """Return whether the run is still executing."""
        return not self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for the end of the run and return it. Ctrl-C ends the run cleanly.

        Raises:
            TrainingFailed: The run ended with an error.
            RunInterrupted: The run was interrupted.
            TimeoutError: The run has not ended after ``timeout_s``.
        """
        try:
            is_over = self._over.wait(timeout_s)
        except KeyboardInterrupt:
            self._session.signals.stop()
            return self._wait_for_end(is_asked=False)
        if not is_over:
            raise TimeoutError(f"the run in {self.directory} has not ended after {timeout_s:g} s")
        return self._wait_for_end()

    def stop(self) -> None:
        """Ask the run to end after its step in progress. Return at once.

        The run writes a checkpoint and its model, and can be resumed. If it has not begun yet, it
        ends at once.
        """
        from offbeat.launch.control import leave  # imported already: it is slow

        has_begun = self._session.signals.begun or results.metric_rows(self.directory)
        if not has_begun:  # rows may be there before the run has said so
            self._session.signals.stop(_STOPPED)
        elif self.is_alive:
            with contextlib.suppress(RunDirUnusable):  # it is about to end
                leave(self.directory, Stop(_STOPPED))


@atexit.register
def _exit_with_code() -> None:
    """Exit with the code of the runs that the program waited for.

    The program cannot set this exit code in another way. This is registered first, so Python calls
    it after the handlers of modules that are imported later.
    """
    if _codes_at_exit:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(max(_codes_at_exit))


def _tell(what: str) -> None:
    sys.stderr.write(f"offbeat: {what}\n")
    sys.stderr.flush()


def _call_at_program_end(call: Callable[[], None]) -> None:
    """Call a function when the main thread has ended, while thread pools still accept work.

    ``atexit`` would be too late, because Python shuts its thread pools down before it waits for
    other threads. Python has no public hook for that moment, but every version since 3.9 has this
    private one. The hook that was registered last is called first, so the pools' module must be
    imported before.
    """
    import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]

    threading._register_atexit(call)  # type: ignore[attr-defined]  # noqa: SLF001


def make_ended_run(end: "RunEnd | None", *, is_asked: bool = False) -> Run:
    """Return a run that has ended.

    With ``is_asked``, ``stop`` requested the end, so it does not count as an interruption.

    Raises:
        RunRefused: The run was refused.
        TrainingFailed: The run ended with an error.
        RunInterrupted: The run was interrupted, and has ended cleanly.
        KeyboardInterrupt: The run was interrupted before it began.
    """
    if end is not None and end.problems:
        raise RunRefused(end.problems)
    if end is None or end.directory is None or end.summary is None:
        raise KeyboardInterrupt("before the run began")
    if end.summary.outcome == "failed":
        raise TrainingFailed(end.summary.error or "", str(end.directory), end.go_on)
    if end.summary.outcome == "aborted" and not is_asked:
        unsaved = describe_unsaved_steps(end.directory, end.summary.trainer_version)
        raise RunInterrupted(str(end.directory), end.go_on, unsaved)
    return Run(end.directory)


def open_run(run_dir: Path | str) -> Run:
    """Return the live or ended run of a directory, for reading its results.

    Raises:
        NoRunInDirectory: The directory holds no run.
    """
    directory = Path(run_dir).absolute()
    if not (directory / CONFIG).exists():
        raise NoRunInDirectory(str(directory), "it holds no run", what_to_name(directory))
    return Run(directory)


def _table(rows: list[Row]) -> Any:
    try:
        import pandas as pd  # pyright: ignore[reportMissingTypeStubs] -- optional
    except ImportError:
        return rows
    return pd.DataFrame(rows)
