"""Measures the split train step beside a plain PyTorch loop on the same model and the same batch.

    OMP_NUM_THREADS=1 python -m benchmarks.trainer                  # all of it, about 4 minutes
    OMP_NUM_THREADS=1 python -m benchmarks.trainer --quick          # one round of each
    python -m benchmarks.trainer --device cuda --dtype bfloat16     # the device's peak is looked up
    python -m benchmarks.trainer --sections chunks --json OUT.json

- speed: tokens/s of the plain loop, of the split step with one padded row a sample (like against
  like) and with prompts shared in a group. Loss and gradient norm of all three must be equal, or the
  benchmark refuses to go on.
- chunks: a step of 64 groups in 1 to 64 chunks; the plain loop accumulates over the same parts.
- memory: high-water mark of each phase of a step, one process a side (``trainer_memory``).
- MFU: floating-point operations by formula (``trainer_flops``) over the device's peak, where that is
  known, and over what bare products of the model's own matrices reach on the same thread (on a CPU
  both by CPU time).

Sides in turn, several rounds; medians with lowest and highest. A ratio is taken round by round.
Ratios of CPU time are printed too: on a machine that others use as well they say more. Tokens are
prompt and response tokens over all samples, as if no prompt were shared.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers.utils import logging

from benchmarks.trainer_cases import (
    CHUNKED,
    LARGE,
    LONG,
    SHORT,
    Advantages,
    Case,
    Groups,
    make_batch,
    sampled_with,
    write_model,
)
from benchmarks.trainer_flops import bare_matmul_flop_s, known_peak_flop_s, load_of, step_flops
from benchmarks.trainer_memory import PHASES, of_a_process
from benchmarks.trainer_rounds import Spread, Step, Turn, in_turn, speedup
from benchmarks.trainer_sides import Outcome, Plain, Setting, Side, Split

PLAIN, PADDED, SHARED = SIDES = ("plain", "padded", "shared")
CHUNKS: Final = (1, 2, 4, 8, 16, 32, 64)
SECTIONS: Final = ("speed", "chunks", "memory")
BAR: Final = 0.95  # of the plain loop's speed, with padded rows
TOLERANCE: Final = {"float32": 1e-4, "bfloat16": 5e-2}  # relative, between the sides
Report = dict[str, Any]


class NotTheSame(Exception):
    """Raised when two sides computed different things: their times may not be compared."""


def main() -> None:
    """Measure and print, section by section."""
    options = _parse()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    torch_is = f"{options.device}, {options.dtype}, {options.threads} threads"
    print(f"{torch_is}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the start")
    report: Report = {}
    with tempfile.TemporaryDirectory() as directory:
        for section in options.sections:
            report[section] = RUN[section](options, Path(directory))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))


# --- speed ---------------------------------------------------------------------------------------


def speed(options: argparse.Namespace, directory: Path) -> Report:
    """Each case: the three sides beside each other."""
    return {case.name: _speed(case, options, directory) for case in (SHORT, LONG, LARGE)}


def _speed(case: Case, options: argparse.Namespace, directory: Path) -> Report:
    setting = _setting(options, case, directory)
    sides, groups, advantages = make_sides(case, setting)
    apart = difference({name: side.step(groups, advantages) for name, side in sides.items()})
    if apart > TOLERANCE[options.dtype]:
        raise NotTheSame(f"{case}: loss or gradient norm differ by {apart:.1e}, relative")
    turns = in_turn(
        {name: _step(side, groups, advantages, setting) for name, side in sides.items()},
        rounds=options.rounds,
        turn_s=options.turn_s,
    )
    print(f"\n{case}. Loss and gradient norm equal to {apart:.0e}")
    heads = ("ms a step", "tokens/s", "x plain", "x plain, CPU time", "of bare matmul", "MFU")
    print(_line("", *heads))
    report: Report = {"difference": apart}
    for name, of_rounds in turns.items():
        report[name] = figures = _figures(name, of_rounds, case, setting, sides, groups, options)
        against = [speedup(of_rounds, turns[PLAIN], cpu=cpu) for cpu in (False, True)]
        figures["speedup"], figures["speedup_cpu"] = against
        wall_s, peak = figures["wall_s"], figures["mfu"]
        print(
            _line(
                name,
                f"{Spread(*(each * 1e3 for each in wall_s)):.1f}",
                f"{case.tokens / wall_s.median:,.0f}",
                f"{against[0]:.2f}",
                f"{against[1]:.2f}",
                f"{figures['of_matmul']:.2f}",
                "not known" if peak is None else f"{peak:.3f}",
            )
        )
    reached = report[PADDED]["speedup"].median
    print(f"  {'holds' if reached >= BAR else 'MISSES'}: padded rows at {reached:.2f} >= {BAR}")
    return report


def _figures(
    name: str,
    turns: list[Turn],
    case: Case,
    setting: Setting,
    sides: Mapping[str, Side],
    groups: Groups,
    options: argparse.Namespace,
) -> Report:
    model = _model(sides[name])
    load = load_of(model, groups, setting.max_tokens, shared_prompt=name == SHARED)
    flop = step_flops(model, load)
    wall_s, cpu_s = (Spread.of([turn[place] for turn in turns]) for place in (0, 1))
    busy_s = cpu_s.median if model.device.type == "cpu" else wall_s.median
    peak = options.peak_flops or known_peak_flop_s(model.device, setting.dtype)
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens_per_s": case.tokens / wall_s.median,
        "step_flop": flop,
        "of_matmul": flop / busy_s / bare_matmul_flop_s(model, load),
        "mfu": flop / wall_s.median / peak if peak else None,
    }


# --- chunks --------------------------------------------------------------------------------------


def chunks(options: argparse.Namespace, directory: Path) -> Report:
    """Measure the same 64 groups in more and more calls."""
    setting = _setting(options, CHUNKED, directory)
    sides, groups, advantages = make_sides(CHUNKED, setting)
    steps = {
        f"{name}/{count}": _step(side, groups, advantages, setting, count)
        for name, side in sides.items()
        for count in CHUNKS
    }
    turns = in_turn(steps, rounds=options.rounds, turn_s=options.turn_s / 4)
    print(f"\n{CHUNKED}: ms a step, and ms of each chunk after the first")
    print(_line("chunks", *map(str, CHUNKS), "a chunk", "of CPU time", width=12))
    report: Report = {}
    for name in sides:
        report[name] = figures = _chunk_figures([turns[f"{name}/{count}"] for count in CHUNKS])
        medians = (f"{each.median * 1e3:.0f}" for each in figures["wall_s"])
        a_chunk = (f"{each * 1e3:.2f}" for each in figures["a_chunk_s"])
        print(_line(name, *medians, *a_chunk, width=12))
    return report


def _chunk_figures(turns: list[list[Turn]]) -> Report:
    wall_s, cpu_s = (
        [Spread.of([turn[place] for turn in of_rounds]) for of_rounds in turns] for place in (0, 1)
    )
    more = CHUNKS[-1] - CHUNKS[0]
    a_chunk_s = [(each[-1].median - each[0].median) / more for each in (wall_s, cpu_s)]
    return {"chunks": CHUNKS, "wall_s": wall_s, "cpu_s": cpu_s, "a_chunk_s": a_chunk_s}


# --- memory --------------------------------------------------------------------------------------


def memory(options: argparse.Namespace, directory: Path) -> Report:
    """High-water marks of the larger model."""
    setting = _setting(options, LARGE, directory)
    print(f"\n{LARGE}: most memory in each phase, MiB above the process without a model")
    print(_line("", *PHASES, width=13))
    report: Report = {}
    for name in SIDES:
        report[name] = peaks = of_a_process(name, LARGE, setting)
        print(_line(name, *(f"{peaks[phase]:,.0f}" for phase in PHASES), width=13))
    return report


RUN: Final[Mapping[str, Callable[[argparse.Namespace, Path], Report]]] = {
    "speed": speed,
    "chunks": chunks,
    "memory": memory,
}


# --- sides ---------------------------------------------------------------------------------------


def make_sides(case: Case, setting: Setting) -> tuple[dict[str, Side], Groups, Advantages]:
    """Create all three sides with the same weights, and the batch.

    Sampled by a policy close to theirs.
    """
    plain = Plain(setting)
    groups, advantages = make_batch(case)
    groups = sampled_with(groups, plain.logprobs(groups))
    padded, shared = (Split(setting, shared_prompt=each) for each in (False, True))
    return {PLAIN: plain, PADDED: padded, SHARED: shared}, groups, advantages


def difference(outcomes: Mapping[str, Outcome]) -> float:
    """The largest relative difference of loss or gradient norm between the plain side and another."""
    plain = outcomes[PLAIN]
    return max(
        abs(got - want) / max(abs(want), math.ulp(1.0))
        for outcome in outcomes.values()
        for got, want in zip(outcome, plain, strict=True)
    )


def _model(side: Side) -> Any:  # noqa: ANN401 -- transformers' models are not typed
    return side.trainer.module if isinstance(side, Split) else side.model  # pyright: ignore[reportAttributeAccessIssue]


def _step(
    side: Side, groups: Groups, advantages: Advantages, setting: Setting, count: int = 1
) -> Step:
    step = partial(side.step, groups, advantages, count)
    if not setting.device.startswith("cuda"):
        return step

    def synchronised() -> None:
        step()
        torch.cuda.synchronize()

    return synchronised


def _setting(options: argparse.Namespace, case: Case, directory: Path) -> Setting:
    path = directory / case.model
    if not path.exists():
        write_model(case.model, path)
    return Setting(path, options.device, options.dtype, options.max_tokens)


def _line(name: str, *cells: str, width: int = 24) -> str:
    return f"  {name:8}" + "".join(f"{cell:>{width}}" for cell in cells)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turn-s", type=float, default=0.5, help="length of a turn")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--peak-flops", type=float, help="of the device, where it is not known")
    parser.add_argument("--json", type=Path, help="write every figure here too")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.turn_s = 1, 0.0
    return options


if __name__ == "__main__":
    main()
