"""Process of one trainer rank of a sweep point: warm-up and timed steps on fabricated groups."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

import resource
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from offbeat.config.base import of_kind
from offbeat.config.limits import trainer_device
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import (
    ClippedPgLossConfig,
    CustomLossConfig,
    PolicyGradientLossConfig,
)
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.failures import OffbeatError
from offbeat.messages.fences import StepKey
from offbeat.messages.training import StepResult
from offbeat.plugins.planning.fabricated import FabricatedGroup, count_tokens
from offbeat.plugins.planning.sweep_task import (
    HOST,
    RankFailed,
    RankResult,
    RankTask,
    fabricate_step,
    receive_task,
    reply_on,
    share_of_minibatches,
)
from offbeat.trainers.backend import TrainerBackend
from offbeat.trainers.memory import RESERVED, PeakMemory, make_meter
from offbeat.trainers.ranks.peers import Peers, SingleRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.trainer_plugin import find_trainer
from offbeat.transfer_queue.schema import GENERATION_LOGPROBS, POLICY_LOGPROBS
from offbeat.transfer_queue.tensordict_codec import build_chunk

_NO_MEMORY: Final = ("DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory")
"""Substrings of CPU memory errors of torch and the C++ library, which have no class for them."""
_MIB: Final = 1 << 20
WHOLE: Final = "step"
"""Name of the whole step, next to the names of phases."""


def main() -> None:
    """Read a ``RankTask`` from standard input, measure, and reply on the given descriptor.

    Arguments: the descriptor, and the process of the sweep.
    """
    task = receive_task(int(sys.argv[2]))
    try:
        reply: RankResult | RankFailed = _measure(task)
    except MemoryError as error:
        reply = RankFailed(out_of_memory=True, error=str(error) or "MemoryError")
    except (OffbeatError, RuntimeError, ValueError, OSError) as error:
        is_memory = isinstance(error, torch.OutOfMemoryError) or any(
            words in str(error) for words in _NO_MEMORY
        )
        # Under its own limit, a thread's stack would count as refused memory.
        is_memory |= task.memory_mib is not None and "can't start new thread" in str(error)
        reply = RankFailed(out_of_memory=is_memory, error=f"{type(error).__name__}: {error}")
    reply_on(int(sys.argv[1]), reply)


def _measure(task: RankTask) -> RankResult:
    config = _with_built_in_loss(RunConfig.model_validate_json(task.config_json))
    loss = LossSpec.of(config)
    meter = make_meter(config.trainer)
    assert meter is not None  # noqa: S101 -- a stub, which has none, is refused by ``sweep``
    with ExitStack() as stack:
        make_trainer = _load_trainer(config, stack)  # its libraries are not part of the measurement
        meter.start()
        before = meter.peak()
        stack.enter_context(_limit_memory(task.memory_mib))
        trainer = make_trainer(_spec(task, config), _peers(task, config))
        made = fabricate_step(task.law, config, trainer.vocabulary)
        tokens = sum(map(count_tokens, made))
        assigned, minibatches = share_of_minibatches(made, config, task.replicas, task.rank)
        groups = [made[at] for at in assigned]
        del made  # measure memory only with this rank's groups
        rng = np.random.default_rng(config.seed)
        advantages = [
            tuple(rng.normal(size=len(each["response_offsets"]) - 1).tolist()) for each in groups
        ]
        columns = trainer.prepare_logprobs(
            build_chunk(groups), policy=True, reference=False, temperature=loss.temperature
        )
        for group, prepared in zip(groups, columns, strict=True):
            group[GENERATION_LOGPROBS] = prepared[POLICY_LOGPROBS]
        peaks, times = PeakMemory(meter), PhaseTimes()
        for _ in range(1 + task.steps):
            times.begin_step()
            one_step(trainer, groups, advantages, loss, peaks, minibatches, times)
        phases = {
            name.removeprefix("memory/peak_").removesuffix("_bytes"): (value - before) / _MIB
            for name, value in peaks.report("sweep").items()
        }
    return RankResult(
        trainer.parameters,
        times.medians()[WHOLE],
        tokens,
        max(value for name, value in phases.items() if name != RESERVED),
        phases,
        {name: value for name, value in times.medians().items() if name != WHOLE},
    )


def _with_built_in_loss(config: RunConfig) -> RunConfig:
    """Return the recipe with ``clipped_pg`` instead of the user's loss.

    The time of a pass hardly depends on the loss, and this process may lack the user's code.
    """
    loss = config.algorithm.loss
    if not isinstance(loss, CustomLossConfig):
        return config
    common = loss.model_dump(include=set(PolicyGradientLossConfig.model_fields))
    algorithm = config.algorithm.model_copy(update={"loss": ClippedPgLossConfig(**common)})
    return config.model_copy(update={"algorithm": algorithm})


class PhaseTimes:
    """Seconds of the phases of each step."""

    def __init__(self) -> None:
        self._steps = list[dict[str, float]]()

    def begin_step(self) -> None:
        """Begin the next step. Later times count to it."""
        self._steps.append({})

    @contextmanager
    def during(self, phase: str) -> Generator[None]:
        """Add the time of the block to a phase of the current step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            of_step = self._steps[-1]
            of_step[phase] = of_step.get(phase, 0.0) + time.perf_counter() - started

    def medians(self) -> dict[str, float]:
        """Return the median of each phase, and of ``WHOLE`` steps, without the first step.

        The first step allocates gradients and moments.
        """
        timed = [{**each, WHOLE: sum(each.values())} for each in self._steps[1:]]
        return {name: statistics.median(each[name] for each in timed) for name in timed[0]}


def one_step(
    trainer: TrainerBackend,
    groups: list[FabricatedGroup],
    advantages: list[tuple[float, ...]],
    loss: LossSpec,
    peaks: PeakMemory,
    minibatches: Sequence[int],
    times: PhaseTimes,
) -> StepResult:
    """Train the groups as one chunk of a step. Add its phases to ``peaks`` and ``times``.

    Raises:
        ValueError: The step was not applied.
    """
    number = trainer.steps_applied + 1
    key = StepKey(number, number, 0)
    needed = loss.config
    if needed.needs_policy_logprobs or needed.needs_reference_logprobs or needed.teacher_path:
        with peaks.during("prepare_logprobs"), times.during("logprobs"):
            columns = trainer.prepare_logprobs(
                build_chunk(groups),
                policy=needed.needs_policy_logprobs,
                reference=needed.needs_reference_logprobs,
                temperature=loss.temperature,
                teacher=needed.teacher_path,
            )
        groups = [group | made for group, made in zip(groups, columns, strict=True)]
    with peaks.during("microbatch"), times.during("train"):
        trainer.begin_train_step(key, loss)
        trainer.train_microbatch(key.next(), build_chunk(groups), advantages, minibatches)
    with peaks.during("finish"), times.during("finish"):
        result = trainer.finish_train_step(key.next().next())
    if not result.applied:
        raise ValueError(f"a step was not applied: {result.reason}")
    return result


def _peers(task: RankTask, config: RunConfig) -> Peers:
    if task.at is None:
        return SingleRank()
    from offbeat.trainers.ranks.process_group import join  # noqa: PLC0415 -- several ranks only

    return join(task.at, task.rank, trainer_device(config.trainer), HOST)


_Make = Callable[[TrainerSpec, Peers], Any]  # a trainer, of a class by backend


def _load_trainer(config: RunConfig, stack: ExitStack) -> _Make:
    """Import the backend's trainer and return a function that creates a rank of it."""
    trainer = config.trainer
    if (plugin := find_trainer(trainer.backend)) is not None:
        plugin.prepare_process(config, stack)
        return plugin.make_trainer
    from offbeat.trainers.torch.torch_trainer import build_torch_trainer  # noqa: PLC0415 -- if it is chosen

    torch.set_num_threads(of_kind(TorchTrainerConfig, trainer).threads)
    return build_torch_trainer


def _spec(task: RankTask, config: RunConfig) -> TrainerSpec:
    return TrainerSpec(config, str(Path.cwd()), task.rank, task.replicas.ranks)


@contextmanager
def _limit_memory(memory_mib: int | None) -> Generator[None]:
    """Limit the additional private memory that this process may allocate inside the block.

    An allocation beyond the limit fails at once with a memory error, as on a full device.
    """
    if memory_mib is None:
        yield
        return
    status = Path("/proc/self/status").read_text()
    data = next(line for line in status.splitlines() if line.startswith("VmData:"))
    most = int(data.split()[1]) * 1024 + memory_mib * _MIB
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


if __name__ == "__main__":
    main()
