"""Definition of a metric. ``metric_table`` declares all of them."""

import difflib
import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from offbeat.messages.failures import OffbeatError
from offbeat.telemetry.metric_table import ROWS


class MetricReduction(enum.StrEnum):
    """Reduction of the values within one step to the step's one number."""

    LAST = "last"  # the value at the end of the step
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    POOLED = "pooled"  # computed once, from sums or counts over the whole step


class MetricSpec(msgspec.Struct, frozen=True):
    """One row of the metric table."""

    name: str
    unit: str
    reduction: MetricReduction  # over the values of a step
    meaning: str
    when_it_rises: str


class UndeclaredMetric(OffbeatError):
    """A metric name that is not in the table."""

    name: str
    nearest: str

    def __str__(self) -> str:
        return (
            f"metric {self.name!r} is not declared; the nearest is {self.nearest!r}. "
            "Use that, or add a row to offbeat/telemetry/metric_table.py"
        )


def _table() -> Mapping[str, MetricSpec]:
    metrics = [
        MetricSpec(name, unit, MetricReduction(how), *texts) for name, unit, how, *texts in ROWS
    ]
    return MappingProxyType({metric.name: metric for metric in metrics})


METRICS: Final[Mapping[str, MetricSpec]] = _table()
"""Metrics by name, in the order of the table."""


_OF_SET: Final = re.compile(r"eval/(?:[A-Za-z0-9][A-Za-z0-9_-]*/)?([a-z_]+)(?:@\d+)?")


_NAMED_BY_USER: Final = ("rewards/", "loss/")
_OF_ENVIRONMENT: Final = re.compile(r"environment/[^/]+/([a-z_]+)")


def declared_name(name: str) -> str:
    """Return the name under which a metric stands in the table: ``eval/pass@K`` of a set's pass@4."""
    for prefix in _NAMED_BY_USER:
        if name.startswith(prefix):
            return f"{prefix}NAME"
    if own := _OF_ENVIRONMENT.fullmatch(name):
        return f"environment/{own[1]}"
    found = _OF_SET.fullmatch(name)
    if found is None:
        return name
    return f"eval/{found[1]}@K" if "@" in name else f"eval/{found[1]}"


def undeclared(name: str) -> UndeclaredMetric:
    """Return the error for a name that is not in the table."""
    (nearest,) = difflib.get_close_matches(name, METRICS, n=1, cutoff=0.0)
    return UndeclaredMetric(name, nearest)
