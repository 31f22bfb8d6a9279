"""Creates the telemetry of a run from its config."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.config.sections.wandb import WandbConfig
from offbeat.telemetry.hub import Telemetry
from offbeat.telemetry.jsonl_sink import JsonlSink
from offbeat.telemetry.sinks import Sink
from offbeat.telemetry.wandb_sink import WandbSink, resolved_mode

METRICS_FILE: Final = "metrics.jsonl"


def run_telemetry(
    wandb: WandbConfig,
    *,
    run_dir: Path,
    run_id: str,
    run_name: str,
    recipe: Mapping[str, Any],
) -> Telemetry:
    """Create the telemetry of a run: ``metrics.jsonl`` and, unless disabled, W&B. Not started yet.

    ``recipe`` is shown in W&B: pass it redacted.
    """
    sinks: list[Sink] = [JsonlSink(run_dir / METRICS_FILE)]
    mode = resolved_mode(wandb)
    if mode != "disabled":
        sinks.append(
            WandbSink(
                wandb, mode=mode, run_id=run_id, run_name=run_name, run_dir=run_dir, recipe=recipe
            )
        )
    return Telemetry(sinks)
