# pyright: basic
# wandb is not fully typed.
"""Weights & Biases sink next to ``metrics.jsonl``: online, or offline to be synced later."""

import contextlib
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import structlog

from offbeat.plugins.wandb.section import WandbConfig
from offbeat.telemetry.records import MetricRecord, is_evaluation
from offbeat.telemetry.tracker import SinkUnusable, not_installed

if TYPE_CHECKING:
    from wandb import Run, Settings

log = structlog.stdlib.get_logger()
_CONNECT_S: Final = 20.0  # maximum seconds to reach the server
_UPLOAD_S: Final = 5.0  # maximum seconds to upload the rest when the run ends

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
    """Undo the hooks that W&B sets in the block for an uncaught exception and ``sys.exit``.

    W&B never removes them, and each prints the exception again, once per run of the process.
    """
    before = sys.excepthook, sys.exit
    try:
        yield
    finally:
        sys.excepthook, sys.exit = before


class WandbSink:
    """Writes one W&B run. Its step is the trainer version. Evaluations use ``eval/version``.

    If the server cannot be reached, the run is kept offline inside the run directory, and one
    warning explains how to sync it later. An online run continues if resumed under the same
    ``run_id``.
    """

    def __init__(
        self,
        config: WandbConfig,
        *,
        mode: Mode,
        run_id: str,
        run_name: str,
        run_dir: Path,
        recipe: Mapping[str, Any],
        connect_timeout_s: float = _CONNECT_S,
        upload_timeout_s: float = _UPLOAD_S,
    ) -> None:
        """``recipe`` is shown as the run's config, so pass it redacted."""
        self._config, self._mode, self._recipe = config, mode, recipe
        self._run_id, self._run_name, self._run_dir = run_id, run_name, run_dir
        self._connect_timeout_s, self._upload_timeout_s = connect_timeout_s, upload_timeout_s
        self._run: Run | None = None

    @property
    def name(self) -> str:
        return "wandb"

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
        except Exception:
            # W&B's process has ended. The next attempt starts another process for the same run.
            self._abandon()
            raise

    def close(self) -> None:
        """Finish the run, its upload bounded by ``upload_timeout_s``, and end W&B's process."""
        if self._run is None:
            return
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
        step = record.version
        if is_evaluation(record):  # W&B discards rows older than its newest; x is eval/version
            step = max(step, self._run.step)
        self._run.log(dict(record.metrics), step=step)

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
            id=self._run_id,
            name=self._run_name,
            dir=str(self._run_dir),
            config=dict(self._recipe),
            resume="allow" if mode == "online" else None,
            reinit="create_new",
            settings=self._settings(mode),
        )
        run.define_metric("eval/version", hidden=True)
        run.define_metric("eval/*", step_metric="eval/version")
        self._directory = Path(run.settings.sync_dir)
        return run

    def _settings(self, mode: Literal["online", "offline"]) -> "Settings":
        """Return settings that are quiet, bounded, and send only metrics."""
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
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_graphql_retry_max=1,
            x_save_requirements=False,
            x_transaction_log_flush_interval=2.0,  # limits the loss if W&B's process crashes
        )

    def _log_how_to_sync(self, reason: str) -> None:
        log.warning(
            "wandb.kept_offline",
            reason=reason,
            directory=str(self._directory),
            sync_with=f"wandb sync {self._directory}",
        )
