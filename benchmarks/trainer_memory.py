"""Measures the most memory that a side of the trainer benchmark holds in each phase of a step.

    python -m benchmarks.trainer_memory --side plain --model MODEL_DIRECTORY

One side a process, so that nobody sees what another has left behind. On a CPU it is the high-water
mark of the process's resident memory (Linux), less what the process held before it loaded the
model; on CUDA what torch has allocated. Prints JSON: MiB by phase, in order.

Both sides take one step before, so that gradients' and moments' memory has been there. *publish* is
what the process itself needs to hand its weights on: the split step packs them chunk by chunk, each
of which the object store or the receivers take over; a plain loop copies its ``state_dict``.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from transformers.utils import logging

from benchmarks.trainer_cases import (
    CHUNKED,
    LARGE,
    LONG,
    SHORT,
    Case,
    Groups,
    make_batch,
    sampled_with,
)
from benchmarks.trainer_sides import LOSS, Plain, Setting, Split
from offbeat.config.sections.sync import ObjectStoreSyncConfig
from offbeat.trainers.backend import LogprobColumns
from offbeat.trainers.memory import CudaMeter, ResidentMeter
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.plain_modules import ModuleSource

SIDES: Final = ("plain", "padded", "shared")
CASES: Final = {case.name: case for case in (SHORT, LONG, LARGE, CHUNKED)}
PHASES: Final = ("load", "begin", "microbatches", "finish", "logprobs", "publish")
_MIB: Final = 2**20
Phases = list[tuple[str, Callable[[], object]]]


def main() -> None:
    """Measure one side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--case", choices=CASES, default=LARGE.name)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    setting = Setting(options.model, options.device, options.dtype, options.max_tokens)
    json.dump(peaks_mib(options.side, CASES[options.case], setting), sys.stdout)


def of_a_process(side: str, case: Case, setting: Setting) -> dict[str, float]:
    """``peaks_mib`` of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.trainer_memory", "--side", side]
    command += ["--case", case.name, "--model", str(setting.path), "--device", setting.device]
    command += ["--dtype", setting.dtype, "--max-tokens", str(setting.max_tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # behind what the trainer logs


def peaks_mib(side: str, case: Case, setting: Setting) -> dict[str, float]:
    """MiB by phase; of the plain loop *begin* is nothing."""
    meter = CudaMeter() if setting.device.startswith("cuda") else ResidentMeter()
    meter.start()
    before, peaks = meter.peak(), dict[str, float]()

    def phase(name: str, work: Callable[[], object]) -> None:
        meter.start()
        work()
        peaks[name] = (meter.peak() - before) / _MIB

    phases = Phases()
    phase("load", lambda: phases.extend(_phases(side, case, setting)))
    for measured in (False, True):
        for name, work in phases:
            phase(name, work) if measured else work()
    return peaks


def _phases(side: str, case: Case, setting: Setting) -> Phases:
    groups, advantages = make_batch(case)
    if side == "plain":
        plain = Plain(setting)
        groups = sampled_with(groups, plain.logprobs(groups))
        return [
            ("begin", lambda: None),
            ("microbatches", lambda: plain.backward(groups, advantages)),
            ("finish", plain.update),
            ("logprobs", lambda: plain.logprobs(groups)),
            ("publish", lambda: {k: v.clone() for k, v in plain.model.state_dict().items()}),
        ]
    split = Split(setting, shared_prompt=side == "shared")
    groups = _resampled(split, groups)
    chunk_bytes = int(ObjectStoreSyncConfig().chunk_mib * _MIB)
    source = ModuleSource(split.trainer.module, chunk_bytes)
    return [
        ("begin", split.begin),
        ("microbatches", lambda: split.microbatches(groups, advantages)),
        ("finish", split.finish),
        ("logprobs", lambda: _logprobs(split, groups)),
        ("publish", lambda: sum(1 for _ in source.chunks())),
    ]


def _logprobs(split: Split, groups: Groups) -> list[LogprobColumns]:
    return split.trainer.prepare_logprobs(
        build_chunk(groups), policy=True, reference=False, temperature=LOSS.temperature
    )


def _resampled(split: Split, groups: Groups) -> Groups:
    columns = _logprobs(split, groups)
    return sampled_with(groups, np.stack([each["policy_logprobs"] for each in columns]))


if __name__ == "__main__":
    main()
