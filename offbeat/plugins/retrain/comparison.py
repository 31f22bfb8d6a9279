"""Compares a retrained step with the recorded step, and formats both for people. Loads no torch."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from offbeat.messages.training import StepResult

_OF_THIS_MACHINE: Final = ("memory/", "cpu/", "throughput/")
_SHOWN: Final = 3
"""Metrics that the summary names."""


def comparable(result: StepResult) -> dict[str, float]:
    """Return the metrics of a step that do not depend on time or memory."""
    named = {
        "train/loss": result.loss,
        "train/grad_norm": result.grad_norm,
        "train/learning_rate": result.learning_rate,
        "train/tokens": float(result.tokens),
        "train/sequences": float(result.sequences),
        "train/chunks": float(result.chunks),
        **result.metrics,
    }
    return {
        name: float(value)
        for name, value in named.items()
        if not name.startswith(_OF_THIS_MACHINE) and not name.endswith("_s")
    }


class Compared(NamedTuple):
    """One compared quantity. Without a difference, it is equal to the last bit."""

    what: str
    difference: str = ""

    @classmethod
    def digests(cls, what: str, recorded: str, got: str) -> "Compared":
        """Compare two digests."""
        return cls(what, "" if got == recorded else f"recorded {recorded}, retrained {got}")


def metric_difference(
    recorded: Mapping[str, float], retrained: Mapping[str, float]
) -> Iterator[Compared]:
    """Yield each metric that both have, compared bit for bit. Two NaN are equal."""
    for name, got in retrained.items():
        want = recorded.get(name)
        if want is None:
            continue
        is_equal = got == want or (math.isnan(got) and math.isnan(want))
        yield Compared(
            name, "" if is_equal else f"recorded {want!r}, retrained {got!r}{_hint(name)}"
        )


def _hint(name: str) -> str:
    if name != "train/learning_rate":
        return ""
    return (
        " (a resume with different steps or optimizer settings changes the rate: add the former "
        "settings, or name a later --from)"
    )


@dataclass(slots=True)
class Reproduced:
    """Number of compared values by quantity. All are equal to the record."""

    counts: Counter[str] = field(default_factory=Counter[str])

    def add(self, compared: Compared) -> None:
        self.counts[compared.what] += 1

    def __str__(self) -> str:
        metrics = [name for name in self.counts if "/" in name]
        steps = max((self.counts[name] for name in metrics), default=0)
        shown = ", ".join(metrics[:_SHOWN])
        unit = "step" if steps == 1 else "steps"
        parts = [f"{len(metrics)} metrics of {steps} {unit} ({shown}, ...)"] if metrics else []
        parts += [f"{n} x {what}" for what, n in self.counts.items() if "/" not in what]
        return f"equal bit for bit: {'; '.join(parts) or 'nothing was recorded to compare with'}"


class _Column(NamedTuple):
    title: str
    names: tuple[tuple[str, ...], ...]  # alternatives; the metrics of one are added


_COLUMNS: Final = (
    _Column("loss", (("train/loss",),)),
    _Column("grad norm", (("train/grad_norm",),)),
    _Column("KL", (("train/kl_reference",), ("train/kl_reward",), ("off_policy/behaviour_kl",))),
    _Column("entropy", (("train/entropy",),)),
    _Column("clipped", (("train/clip_fraction_low", "train/clip_fraction_high"),)),
)
_WIDTH: Final = 10
_STEP: Final = 6


def header() -> str:
    """Return the two lines above the rows of ``table_row``."""
    titles = "".join(each.title.center(2 * _WIDTH) for each in _COLUMNS)
    pairs = "".join("recorded".rjust(_WIDTH) + "now".rjust(_WIDTH) for _ in _COLUMNS)
    return f"{'':>{_STEP}}{titles}".rstrip() + f"\n{'step':>{_STEP}}{pairs}"


def table_row(
    step: int, recorded: Mapping[str, float], retrained: Mapping[str, float], reason: str
) -> str:
    """Return one line with recorded and retrained values next to each other.

    Without a penalty, the KL is between the policy that sampled and the policy that is trained.
    """
    cells = ""
    for column in _COLUMNS:
        names = next(
            (each for each in column.names if each[0] in recorded or each[0] in retrained),
            column.names[-1],
        )
        cells += _cell(recorded, names) + _cell(retrained, names)
    refused = f"  not applied: {reason}" if reason else ""
    return f"{step:>{_STEP}}{cells}{refused}"


def _cell(metrics: Mapping[str, float], names: tuple[str, ...]) -> str:
    values = [metrics[name] for name in names if name in metrics]
    return (f"{sum(values):.4g}" if values else "-").rjust(_WIDTH)
