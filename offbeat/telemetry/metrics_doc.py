"""Generates ``docs/metrics.md`` from the metric table.

Usage: ``python -m offbeat.telemetry.metrics_doc``.
"""

from argparse import ArgumentParser
from itertools import groupby
from pathlib import Path
from typing import Final

from offbeat.telemetry.metric_table import METRICS, MetricSpec

_HEAD: Final = """\
# Metrics

Generated from `offbeat/telemetry/metric_table.py` by `python -m offbeat.telemetry.metrics_doc`; do not edit.

`metrics.jsonl` and every other sink get one record per step and one per evaluation:
`{"step": .., "version": .., "time_s": .., <metrics>}`. `version` is the trainer version after the step, `time_s` is
Unix time. For an evaluation `step` and `version` are the version that was scored, 0 for the initial weights. Its line
follows later steps, because training continues meanwhile; charts and exports show it at that version. Values that are
not finite are `"NaN"`, `"Infinity"` or `"-Infinity"`. A step that is trained again after a rewind has a second line,
which replaces the first. If a controller is killed after a step, the line may be missing; `offbeat export` and `report`
then use the journal.

The second column has the unit, and how the values within a step become one number. In `staleness/`, names end with an
age in versions: `2_3` is 2 or 3, `4_up` is 4 or more. If a step has no tokens of some age, the metrics for that age are
absent.
"""


def document() -> str:
    """Return the whole page."""
    sections = groupby(METRICS.values(), key=lambda metric: metric.name.partition("/")[0])
    return _HEAD + "".join(_section(prefix, list(metrics)) for prefix, metrics in sections)


def _section(prefix: str, metrics: list[MetricSpec]) -> str:
    rows = groupby(metrics, key=lambda m: (m.unit, m.reduction, m.meaning, m.when_it_rises))
    lines = [
        f"\n## {prefix}/\n",
        "| metric | unit, reduction | meaning | when it rises |",
        "|---|---|---|---|",
        *(
            f"| {', '.join(f'`{m.name}`' for m in same)} | {unit}, {how} | {meaning} | {rises} |"
            for (unit, how, meaning, rises), same in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page; refuse arguments."""
    ArgumentParser(description=__doc__).parse_args()
    Path("docs/metrics.md").write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
