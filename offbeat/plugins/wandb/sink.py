# pyright: basic
# wandb is not fully typed.
"""Weights & Biases sink next to ``metrics.jsonl``: online, or offline to be synced later."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from offbeat.plugins.wandb.sample_tables import COLUMNS, SampleTable, tables_of
from offbeat.plugins.wandb.section import WandbConfig
from offbeat.telemetry.metric_table import METRICS
from offbeat.telemetry.records import EVALUATION, MetricRecord, is_evaluation
from offbeat.telemetry.step_samples import Histogram, StepSamples
from offbeat.telemetry.tracker import SinkUnusable, TrackedRun, not_installed

if TYPE_CHECKING:
    from wandb import Run, Settings

log = structlog.stdlib.get_logger()
_CONNECT_S: Final = 20.0  # maximum seconds to reach the server
_UPLOAD_S: Final = 5.0  # maximum seconds to upload the rest when the run ends
_GIT_S: Final = 5.0
STEP: Final = "step"
"""Name of the x axis of all metrics but evaluations: the trainer version, as W&B's own step."""
_DATA_DIR: Final = "WANDB_DATA_DIR"  # where W&B copies tables before it sends them

Mode = Literal["online", "offline", "disabled"]


def resolved_mode(config: WandbConfig, environ: Mapping[str, str] = os.environ) -> Mode:
    """Resolve ``auto``: ``WANDB_MODE`` if set, else online with an API key, else offline."""
    if config.mode != "auto":
        return config.mode
    match environ.get("WANDB_MODE"):
        case "online" | "offline" | "disabled" as asked:
            return asked
        case _:
            return "online" if environ.get("WANDB_API_KEY") else "offline"


@contextlib.contextmanager
def _without_exit_hooks() -> Generator[None]:
    """Undo the hooks for uncaught exceptions and ``sys.exit`` that W&B sets in the block.

    W&B never removes them, and each prints the exception again, once per run of the process.
    """
    before = sys.excepthook, sys.exit
    try:
        yield
    finally:
        sys.excepthook, sys.exit = before


def git_commit(folder: Path | None) -> str | None:
    """Return the commit of the checkout that holds ``folder``, or None if there is none."""
    if folder is None:
        return None
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=True)  # noqa: S603 -- no shell
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a slow disk
        return None
    return found.stdout.decode().strip()


@contextlib.contextmanager
def _copies_in(folder: Path) -> Generator[None]:
    """Let W&B copy tables into ``folder`` in the block, unless the user names a different folder."""
    if _DATA_DIR in os.environ:
        yield
        return
    os.environ[_DATA_DIR] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(_DATA_DIR, None)


class WandbSink:
    """Writes one W&B run. Its step is the trainer version. Evaluations use ``eval/version``.

    It also writes histograms and tables of samples, which it reads from ``rollouts/``.

    If the server cannot be reached, the run is kept offline inside the run directory, and one
    warning explains how to sync it later. An online run continues if resumed under the same
    ``run_id``.
    """

    def __init__(
        self,
        config: WandbConfig,
        run: TrackedRun,
        *,
        mode: Mode,
        connect_timeout_s: float = _CONNECT_S,
        upload_timeout_s: float = _UPLOAD_S,
    ) -> None:
        self._config, self._mode, self._tracked = config, mode, run
        self._run_dir = run.run_dir
        self._connect_timeout_s, self._upload_timeout_s = connect_timeout_s, upload_timeout_s
        self._run: Run | None = None
        self._tables = tables_of(run, config.samples_interval, config.samples_rows)

    @property
    def name(self) -> str:
        return "wandb"

    @property
    def wants_samples(self) -> bool:
        return self._config.histograms or self._tables is not None

    def open(self) -> None:
        """Begin the run.

        Raises:
            SinkUnusable: wandb is not installed.
        """
        if self._mode == "disabled":
            raise SinkUnusable("wandb", "wandb.mode is disabled", "Set it to offline or online")
        try:
            import wandb  # noqa: PLC0415  seconds, and an optional extra: only in the sink's thread
        except ImportError as error:
            raise not_installed("wandb", error, ", or set wandb.mode=disabled") from error
        self._wandb: Any = wandb
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if self._mode == "online":
            try:
                self._run = self._begin("online")
            except wandb.Error as error:
                wandb.teardown()  # forget the failed connection
                self._run = self._begin("offline")
                self._log_how_to_sync(" ".join(str(error).split())[:300])
        else:
            self._run = self._begin("offline")

    def write(self, record: MetricRecord) -> None:
        if self._run is None:
            self.open()
        try:
            self._log(record)
            if self._tables is not None:
                self._tables.add(record)
                self._log_tables()
        except Exception:
            # W&B's process has ended. The next attempt starts another process for the same run.
            self._abandon()
            raise

    def close(self) -> None:
        """Finish the run, its upload bounded by ``upload_timeout_s``, and end W&B's process."""
        if self._run is None:
            return
        try:
            self._log_tables(is_last=True)
        except Exception as error:  # noqa: BLE001  the metrics are written: finish the run
            log.warning("wandb.no_samples", error=repr(error))
        run, self._run = self._run, None
        try:
            run.finish()
            self._wandb.teardown()
        except Exception as error:  # noqa: BLE001  too slow, or its process is gone: no more to do
            self._log_how_to_sync(
                f"not all was uploaded within {self._upload_timeout_s:g} s: {error!r}"
            )
            self._abandon()

    def _log(self, record: MetricRecord) -> None:
        if self._run is None:
            raise ValueError("the W&B run is not open")
        step, values = record.version, dict[str, Any](record.metrics)
        if is_evaluation(record):  # W&B discards rows older than its newest; x is eval/version
            step = max(step, self._run.step)
        else:
            values[STEP] = record.version
        if record.samples is not None and self._config.histograms:
            values |= self._histograms(record.samples)
        self._run.log(values, step=step)

    def _histograms(self, samples: StepSamples) -> dict[str, Any]:
        named = {
            "train/reward_histogram": samples.rewards,
            "rollout/response_tokens_histogram": samples.response_tokens,
        }
        return {name: self._histogram(each) for name, each in named.items() if each is not None}

    def _histogram(self, counted: Histogram) -> Any:  # noqa: ANN401 -- of wandb
        pair = ([*counted.counts], [*counted.edges])
        return self._wandb.Histogram(np_histogram=pair)

    def _log_tables(self, *, is_last: bool = False) -> None:
        """Log the samples whose texts are found. They come late, so they have their own step.

        A table that cannot be read or written is left out: it must not stop the metrics.
        """
        if self._tables is None or self._run is None:
            return
        try:
            if (table := self._tables.take(is_last=is_last)) is not None:
                self._log_table(table)
        except Exception as error:  # noqa: BLE001  pyarrow, tokenizers, a full disk
            self._tables = None
            log.warning("wandb.no_samples", error=repr(error))

    def _log_table(self, table: SampleTable) -> None:
        if self._run is None:
            return
        shown = self._wandb.Table(columns=[*COLUMNS], data=[[*row] for row in table.rows])
        values = {"samples/table": shown, "samples/step": table.step}
        with _copies_in(self._run_dir / "wandb"):
            self._run.log(values, step=self._run.step)

    def _abandon(self) -> None:
        self._run = None
        with contextlib.suppress(Exception):  # an earlier failure was reported
            self._wandb.teardown()

    @_without_exit_hooks()
    def _begin(self, mode: Literal["online", "offline"]) -> "Run":
        # W&B's telemetry follows these settings, not the run's settings. Offline, it makes no call.
        self._wandb.setup(self._wandb.Settings(mode=mode, silent=True))
        run = self._wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            id=self._tracked.run_id,
            name=self._tracked.name,
            dir=str(self._run_dir),
            config=dict(self._tracked.recipe),
            group=self._config.group,
            tags=[*self._config.tags] or None,
            notes=self._config.notes,
            job_type="train",
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            settings=self._settings(mode),
        )
        _define_axes(run)
        self._directory = Path(run.settings.sync_dir)
        return run

    def _settings(self, mode: Literal["online", "offline"]) -> "Settings":
        """Return settings that are quiet and bounded.

        They send metrics and, if the recipe wants them, those of the machine. W&B's own search for
        git would also send the address of the repository.
        """
        is_measured = self._config.system_metrics
        commit = git_commit(self._tracked.working_dir)
        return self._wandb.Settings(
            mode=mode,
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=self._connect_timeout_s,
            login_timeout=self._connect_timeout_s,
            finish_timeout=self._upload_timeout_s,
            finish_timeout_raises=True,
            x_disable_meta=True,
            x_disable_machine_info=not is_measured,
            x_disable_stats=not is_measured,
            x_graphql_retry_max=1,
            x_save_requirements=False,
            x_transaction_log_flush_interval=2.0,  # limits the loss if W&B's process crashes
            **({"git_commit": commit} if commit else {}),
        )

    def _log_how_to_sync(self, reason: str) -> None:
        log.warning(
            "wandb.kept_offline",
            reason=reason,
            directory=str(self._directory),
            sync_with=f"wandb sync {self._directory}",
        )


def _define_axes(run: "Run") -> None:
    """Set the x axis of each group of metrics: the step, or the version or step of its data."""
    axes = {name.partition("/")[0]: STEP for name in METRICS} | {
        EVALUATION.rstrip("/"): "eval/version",
        "samples": "samples/step",
    }
    for axis in sorted({*axes.values()}):
        run.define_metric(axis, hidden=True)
    for group, axis in sorted(axes.items()):
        run.define_metric(f"{group}/*", step_metric=axis)
