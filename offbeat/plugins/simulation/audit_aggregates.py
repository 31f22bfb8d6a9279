"""Audit of the sums that a journal keeps of its records: I22.

The journal writes sums beside each snapshot, and page, ``watch``, ``export`` and ``why`` read those
in place of the records. Here the product's own sums, cut into parts and carried over restarts as a
journal does it, are held against a plain count of the same records.
"""

import math
import random
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from offbeat.controller.events import AnyEvent, Opened
from offbeat.controller.run_stats import RunStats
from offbeat.controller.stats_records import STEP_FIELDS, Aggregates, CarriedState
from offbeat.plugins.simulation.audit_findings import Findings, Violation
from offbeat.plugins.simulation.plain_sums import PlainPart, PlainSums
from offbeat.runs.applied_steps import AppliedSteps

_EPOCH_S: Final = 1e9
_PART_RECORDS: Final = (3, 40, 300)
_TOLERANCE: Final = 1e-3  # of seconds in float32 bins, in parts of the whole
_ENCODER: Final = msgspec.msgpack.Encoder()


def audit_aggregates(
    journal: Sequence[AnyEvent], fold: type[RunStats] = RunStats
) -> list[Violation]:
    """Return where the sums of a journal differ from a plain count of its records.

    The records of an episode have no times: they get some, in which the clock is also set back. A
    test may substitute another ``fold``.
    """
    findings = Findings()
    findings.source = "parts"
    rng = random.Random(len(journal))
    written = _with_times(journal, rng)
    cuts = _cuts(written, rng)
    parts = list(_written_parts(written, cuts, fold))
    plain = PlainSums()
    counted = [plain.part(written[start:stop]) for start, stop in cuts]
    for findings.index, (part, expected) in enumerate(zip(parts, counted, strict=True)):
        findings.current = part
        for problem in _differences(part, expected):
            findings.add("I22", problem)
    findings.index = len(parts)
    for problem in _differing_steps(AppliedSteps(parts), plain):
        findings.add("I22", problem)
    return findings.violations


def _with_times(journal: Iterable[AnyEvent], rng: random.Random) -> list[AnyEvent]:
    """Return the records with a time of day each."""
    now, timed = _EPOCH_S, list[AnyEvent]()
    for event in journal:
        now += rng.choice((0.0, 0.001, 0.05, 0.3, 0.3, 2.5))
        back = 5.0 if rng.random() < 0.01 else 0.0  # noqa: PLR2004
        timed.append(msgspec.structs.replace(event, unix_s=now - back))
    return timed


def _cuts(events: Sequence[AnyEvent], rng: random.Random) -> list[tuple[int, int]]:
    """Return where the parts begin and end: between any two records."""
    cuts, start = list[tuple[int, int]](), 0
    while start < len(events):
        stop = min(len(events), start + rng.randint(1, rng.choice(_PART_RECORDS)))
        cuts.append((start, stop))
        start = stop
    return cuts


def _written_parts(
    events: Sequence[AnyEvent], cuts: Iterable[tuple[int, int]], fold: type[RunStats]
) -> Iterable[Aggregates]:
    """Yield what the product makes of each part, as it would be read of its file.

    A controller that takes over reads the state beside the last snapshot, and the records since.
    """
    sums, saved = fold(), b""
    for start, stop in cuts:
        for place in range(start, stop):
            if place and isinstance(events[place], Opened):
                sums = fold(
                    carried=msgspec.msgpack.decode(saved, type=CarriedState) if saved else None
                )
                for event in events[start:place]:
                    sums.add(event)
            sums.add(events[place])
        part = sums.end_part(1)
        saved = _ENCODER.encode(sums.carried)
        yield msgspec.msgpack.decode(_ENCODER.encode(part), type=Aggregates)


def _differences(part: Aggregates, expected: PlainPart) -> Iterable[str]:
    """Yield a sentence on each sum of a part that is not that of its records."""
    sums = {
        "records": (part.records, expected.records),
        "times": ((part.began_unix_s, part.ended_unix_s), (expected.began_s, expected.ended_s)),
        "groups": ((part.lowest_group, part.highest_group), (expected.lowest, expected.highest)),
        "undone_to": (part.undone_to, expected.undone_to),
        "engines": (part.engines, expected.engines),
        "rare": (tuple(type(each.event).__name__ for each in part.rare), expected.rare),
    }
    for name, (written, counted) in sums.items():
        if written != counted:
            yield f"{name} of the part are {written}; its records have {counted}"
    for name, written_s, counted_s in (
        ("trainer_busy", _seconds(part.trainer_busy), expected.trainer_busy_s),
        ("sync_busy", _seconds(part.sync_busy), expected.sync_busy_s),
        *_by_name("engine_busy", part.engine_busy, expected.engine_busy_s),
        *_by_name("trainer_s", part.trainer_s, expected.trainer_s),
        *_by_name("engine_s", part.engine_s, expected.engine_s),
    ):
        if not math.isclose(written_s, counted_s, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
            yield f"{name} of the part is {written_s:g} s; its records have {counted_s:g} s"


def _by_name(
    name: str, written: dict[str, bytes], counted: dict[str, float]
) -> Iterable[tuple[str, float, float]]:
    for key in sorted({*written, *counted}):
        yield f"{name} of {key}", _seconds(written.get(key, b"")), counted.get(key, 0.0)


def _seconds(bins: bytes) -> float:
    return math.fsum(memoryview(bins).cast("f"))


def _differing_steps(steps: AppliedSteps, plain: PlainSums) -> Iterable[str]:
    """Yield a sentence on each column of the steps, as a page reads them, that is another one."""
    counted = [plain.steps[version] for version in sorted(plain.steps)]
    columns = {name: steps.field(name).tolist() for name in STEP_FIELDS}
    read = steps.columns()
    columns |= {
        name: read[f"off_policy/{name}"].tolist() for name in ("staleness_mean", "staleness_max")
    }
    for name, written in columns.items():
        expected = [step[name] for step in counted]
        if len(written) != len(expected):
            yield f"{len(written)} steps stand by the parts; by the records {len(expected)}"
            return
        for step, one, other in zip(counted, written, expected, strict=True):
            if not (
                math.isclose(one, other, abs_tol=1e-9) or (math.isnan(one) and math.isnan(other))
            ):
                yield f"{name} of version {step['version']:g} is {one:g}; its records have {other:g}"
