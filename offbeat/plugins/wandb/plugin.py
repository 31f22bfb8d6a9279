"""Weights & Biases as a tracker."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from offbeat.doors import is_installed
from offbeat.messages.finding import Finding, error, ok, warning
from offbeat.plugins.wandb.section import WandbConfig
from offbeat.plugins.wandb.sink import WandbSink, resolved_mode
from offbeat.telemetry.tracker import ExportPlace, Sink, TrackedRun, Tracker


class WandbTracker(Tracker[WandbConfig]):
    """Writes one W&B run, unless the recipe or the environment disables it."""

    section = WandbConfig
    variable_prefixes = ("WANDB_",)

    def make_sink(self, section: WandbConfig, run: TrackedRun) -> Sink | None:
        """Return a sink in the mode that recipe and environment select."""
        mode = resolved_mode(section)
        if mode == "disabled":
            return None
        return WandbSink(section, run, mode=mode)

    def check(self, section: WandbConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
        """Check that W&B is available if the recipe requests it. ``auto`` works without it."""
        mode = section.mode
        resolved = resolved_mode(section, environ)
        if resolved == "disabled":
            yield ok("wandb", "disabled" if mode == "disabled" else "disabled by WANDB_MODE")
            return
        if not is_installed("wandb"):
            fix = "Install it with pip install 'offbeat[wandb]', or set wandb.mode to disabled."
            report = warning if mode == "auto" else error
            yield report("wandb", f"is not installed; wandb.mode={mode}", fix)
            return
        key = bool(environ.get("WANDB_API_KEY")) or _has_login(environ)
        if mode == "online" and not key:
            fix = "Run wandb login, set WANDB_API_KEY, or set wandb.mode to offline."
            yield error("wandb", "wandb.mode=online and no API key was found", fix)
        else:
            yield ok("wandb", f"{resolved}, project {section.project}")

    def for_dry_run(self, section: WandbConfig) -> Mapping[str, object]:
        """Keep the run on disk, where ``wandb sync`` reads it."""
        return {"mode": "disabled" if section.mode == "disabled" else "offline"}

    def for_evaluation(self, section: WandbConfig) -> Mapping[str, object]:
        """Write no run, because an evaluation trains no steps."""
        del section
        return {"mode": "disabled"}

    def export_place(self, run: TrackedRun, output: str | None) -> ExportPlace:
        """Return an offline run in ``output``, by default in the run's directory."""
        where = output or str(run.run_dir)
        sink = WandbSink(
            WandbConfig(
                project=str(run.recipe.get("wandb.project", "offbeat")),
                samples_interval=0,
                system_metrics=False,  # of another machine, long after the run
            ),
            dataclasses.replace(run, run_dir=Path(where)),
            mode="offline",
        )
        return ExportPlace(sink, where, f"wandb sync {where}/wandb/offline-run-*")


def _has_login(environ: Mapping[str, str]) -> bool:
    netrc = Path(environ.get("NETRC") or Path(environ.get("HOME", "~")).expanduser() / ".netrc")
    try:
        return "api.wandb.ai" in netrc.read_text(errors="ignore")
    except OSError:
        return False


TRACKER: Final = WandbTracker()
