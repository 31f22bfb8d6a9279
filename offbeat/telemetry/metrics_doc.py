"""Generates ``docs/metrics.md`` from the metric table.

Usage: ``python -m offbeat.telemetry.metrics_doc``.
"""

from argparse import ArgumentParser
from itertools import groupby
from pathlib import Path
from typing import Final

from offbeat.telemetry.metrics import METRICS, MetricSpec

_HEAD: Final = """\
# Metrics

Generated from `offbeat/telemetry/metric_table.py` by `python -m offbeat.telemetry.metrics_doc`; do not edit.

One record per optimizer step, in `metrics.jsonl` and in every other sink, and one per evaluation. A line
of `metrics.jsonl` is `{"step": .., "version": .., "time_s": .., <metrics>}`: `version` is the trainer
version after the step (the step of W&B), `time_s` is Unix time. Of an evaluation `step` and `version` are
the version that was scored, 0 for the initial weights: the trainer goes on meanwhile, so the line follows
those of later steps. Charts and exports have it at that version; in W&B `eval/version` is its x axis. A
value that is not finite is written as the string `"NaN"`, `"Infinity"` or `"-Infinity"`. A step trained
again after a rewind has a second line, and the later one holds. A controller that is killed after a step
was applied may leave no line of it: `offbeat export` and `report` then show what the journal knows of the
step.

*Over the step* says how the values within a step become its one number.
"""


def document() -> str:
    """Return the whole page."""
    sections = groupby(METRICS.values(), key=lambda metric: metric.name.partition("/")[0])
    return _HEAD + "".join(_section(prefix, list(metrics)) for prefix, metrics in sections)


def _section(prefix: str, metrics: list[MetricSpec]) -> str:
    lines = [
        f"\n## {prefix}/\n",
        "| metric | unit | over the step | meaning | when it rises |",
        "|---|---|---|---|---|",
        *(
            f"| `{m.name}` | {m.unit} | {m.reduction} | {m.meaning} | {m.when_it_rises} |"
            for m in metrics
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    Path("docs/metrics.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
