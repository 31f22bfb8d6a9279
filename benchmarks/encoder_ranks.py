"""Measures what the bridge between encoder ranks and language ranks costs in a step, and its memory.

    python -m benchmarks.encoder_ranks                  # bytes and seconds of a step, by layout and model
    python -m benchmarks.encoder_ranks --memory         # peak of an encoder rank, by trainer.encoder
    python -m benchmarks.encoder_ranks --layouts 'torch 1 + 1' --sizes tiny --steps 30

A step is ``begin_train_step``, one chunk and ``finish_train_step``; every rank is a process with one
thread. *Bytes*: what all ranks received over the bridge (``train/bridge_bytes``), beside the features
of the lanes' pictures once and their gradients once, counted from the prompts; what is left are headers.

*Inside*: seconds in ``Bridge.send`` and ``Bridge.receive`` of the rank that spent the most there.
*Waiting*: before each message both ranks exchange one byte, which ends when both are there; it is what
the slowest rank waited, and is not part of *inside*. *Share* is inside over the step, in each step by
itself. Medians over the steps; the highest share beside its median.

*Memory*: growth of an encoder rank's resident memory in a chunk over what it has after a step on one
picture (weights, gradients, moments), in a process of its own for each setting (Linux). Memory is given
back to the system at once, so that the mark is not that of an earlier pass.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.encoder_ranks_cases import LARGER, LAYOUTS, SIZES, Layout, Size, activation_bytes
from benchmarks.encoder_ranks_cases import StepSeen as Seen
from tests.parity.world import World

BAR: Final = 0.05
"""Most of a step that may be spent inside send and receive, without waiting."""
UNMEASURED: Final = 2  # first steps
BOUNDS: Final = (None, 512, 128)
"""Values of ``trainer.encoder.max_tokens_per_microbatch`` that are compared."""
_MIB: Final = 2**20
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Has glibc give freed memory back at once."""


@dataclass(frozen=True)
class Row:
    """Medians of the steps of one layout and model."""

    layout: str
    size: str
    step_s: float
    received_bytes: int
    activation_bytes: int
    inside_s: float
    waited_s: float
    share: float
    highest_share: float

    @property
    def header_bytes(self) -> int:
        """Return the bytes that are neither features nor gradients."""
        return self.received_bytes - self.activation_bytes


def main() -> None:
    """Measure what the options name; print a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=12)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if chosen.memory:
            os.environ.update(_MALLOC)
            print("\n".join(memory_table(peaks(Path(directory)))))
            return
        layouts, sizes = [LAYOUTS[n] for n in chosen.layouts], [SIZES[n] for n in chosen.sizes]
        print("\n".join(table(rows(layouts, sizes, chosen.steps, Path(directory)))))


def rows(
    layouts: Sequence[Layout], sizes: Sequence[Size], steps: int, directory: Path
) -> list[Row]:
    """Measure every size under every layout, in the same processes."""
    world, found = World(), list[Row]()
    job = "benchmarks.encoder_ranks_job"
    try:
        for size in sizes:
            path = directory / size.name
            world.run(1, f"{job}:write_model", size=size, path=path)
            for layout in layouts:
                seen: list[list[Seen]] = world.run(
                    layout.ranks,
                    f"{job}:measured",
                    layout=layout,
                    size=size,
                    path=path,
                    steps=UNMEASURED + steps,
                )
                found.append(row(layout, size, merged(seen)[UNMEASURED:]))
    finally:
        world.close()
    return found


def merged(ranks: Sequence[Sequence[Seen]]) -> list[Seen]:
    """Return each step as its slowest ranks saw it: the highest of each figure over the ranks."""
    return [
        Seen(
            wall_s=max(each.wall_s for each in step),
            inside_s=max(each.inside_s for each in step),
            waited_s=max(each.waited_s for each in step),
            received_bytes=max(each.received_bytes for each in step),
        )
        for step in zip(*ranks, strict=True)
    ]


def row(layout: Layout, size: Size, steps: Sequence[Seen]) -> Row:
    """Return the medians of steps, whose bytes have to be equal."""
    (received,) = {each.received_bytes for each in steps}
    shares = [each.inside_s / each.wall_s for each in steps]
    return Row(
        layout.name,
        size.name,
        statistics.median(each.wall_s for each in steps),
        received,
        activation_bytes(size),
        statistics.median(each.inside_s for each in steps),
        statistics.median(each.waited_s for each in steps),
        statistics.median(shares),
        max(shares),
    )


def table(found: Iterable[Row]) -> list[str]:
    """Return the lines of a Markdown table, and of the bar: which rows hold it."""
    found = list(found)
    lines = [
        "| model | ranks | step | bytes received | features + gradients | headers | inside | share | waiting |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.size} | {each.layout} | {each.step_s * 1e3:,.1f} ms | {each.received_bytes:,} | "
        f"{each.activation_bytes:,} | {each.header_bytes:,} | {each.inside_s * 1e3:.2f} ms | "
        f"{each.share:.1%} (highest {each.highest_share:.1%}) | {each.waited_s * 1e3:,.1f} ms |"
        for each in found
    ]
    over = [f"{each.size}, {each.layout}: {each.share:.1%}" for each in found if each.share > BAR]
    verdict = f"MISSES in {'; '.join(over)}" if over else "holds in every row"
    return [*lines, "", f"At most {BAR:.0%} of a step inside send and receive: {verdict}."]


def peaks(directory: Path) -> dict[int | None, float]:
    """Measure the growth of an encoder rank in bytes, by the bound of its microbatches."""
    layout, path, found = LAYOUTS["torch 1 + 1"], directory / LARGER.name, dict[int | None, float]()
    for bound in BOUNDS:
        world = World()
        try:
            if not path.exists():
                world.run(1, "benchmarks.encoder_ranks_job:write_model", size=LARGER, path=path)
            *_, found[bound] = world.run(
                layout.ranks,
                "benchmarks.encoder_ranks_job:grown",
                layout=layout,
                size=LARGER,
                path=path,
                max_tokens=bound,
            )
        finally:
            world.close()
    return found


def memory_table(found: dict[int | None, float]) -> list[str]:
    """Return the lines of a Markdown table of bytes by bound."""
    return [
        "| trainer.encoder.max_tokens_per_microbatch | growth of the encoder rank in a chunk |",
        "|---|---|",
        *(
            f"| {'unset' if bound is None else bound} | {nbytes / _MIB:,.0f} MiB |"
            for bound, nbytes in found.items()
        ),
    ]


if __name__ == "__main__":
    main()
