"""Measures a trainer at several settings, each in separate processes: ``offbeat sweep``.

A point is the recipe's real trainer on fabricated groups, without engines. It runs a warm-up step
and a few timed ones. If it runs out of memory, crashes or hangs, only its own processes are lost.

Estimates the memory of a rank of a sweep point, from declared bytes and counted activations,
without processes.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from offbeat import __version__
from offbeat.config.limits import find_encoder, trainer_ranks
from offbeat.config.loader import LoadedRecipe, load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.launch.checks.model_proof import estimate_activations
from offbeat.launch.checks.torch_ranks import held_by_torch_rank
from offbeat.messages.failures import OffbeatError
from offbeat.plugins.planning.declared import placement
from offbeat.plugins.planning.fabricated import FabricatedGroup, LengthLaw, count_tokens
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.plugins.planning.sweep_points import (
    SweepFile,
    SweepPoint,
    UnusableSweep,
    combinations,
)
from offbeat.plugins.planning.sweep_task import (
    HOST,
    REPLY,
    RankFailed,
    RankResult,
    RankTask,
    fabricate_step,
    share_of_minibatches,
)
from offbeat.plugins.planning.sync_plan import TRAINER_KEYS, count_divided_ranks, sender_grid
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.spec import WorldRendezvous
from offbeat.trainers.trainer_plugin import find_trainer
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.rendezvous.frames import SharedKey, StoreAddress
from offbeat.weight_sync.rendezvous.store_server import StoreServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Memory of the rank that holds most, in MiB."""

    held_mib: float | None  # weights, gradients, optimizer; None: not known
    activations_mib: float | None  # of the largest microbatch; None: not known


NO_ESTIMATE: Final = MemoryEstimate(None, None)


def estimate(config: RunConfig, law: LengthLaw) -> MemoryEstimate:
    """Estimate the memory of a rank of a recipe's trainer, before one is started.

    Activations are known only for one rank of the torch trainer, as far as
    ``estimate_activations`` counts them. It does not count that several ranks gather weights and
    divide matrices.

    Args:
        config: The recipe of the point. Its sizes fit the model.
        law: Lengths of its samples.
    """
    trainer = config.trainer
    try:
        if (plugin := find_trainer(trainer.backend)) is not None:
            of_plugin = plugin.held_by_rank(config)
            return (
                NO_ESTIMATE if of_plugin is None else MemoryEstimate(of_plugin.total / _MIB, None)
            )
        if not isinstance(trainer, TorchTrainerConfig):
            return NO_ESTIMATE
        from offbeat.models.loading import (  # noqa: PLC0415 -- it loads torch
            model_without_memory,
        )

        trust = config.model.trust_remote_code
        model = model_without_memory(Path(config.model.path), trust_remote_code=trust)
        counted = None
        if trainer_ranks(config) == 1:
            counted = estimate_activations(config, _largest_minibatch(config, law, model))
        held = held_by_torch_rank(config, trainer, model)
    except (OffbeatError, OSError, ValueError, KeyError):
        return NO_ESTIMATE  # the rank gets the same error, and reports it
    return MemoryEstimate(held.total / _MIB, None if counted is None else counted[0] / _MIB)


def _largest_minibatch(
    config: RunConfig, law: LengthLaw, model: "PreTrainedModel"
) -> Sequence[FabricatedGroup]:
    """Return the groups of the minibatch with the most tokens, as a single rank gets them."""
    from offbeat.trainers.torch.model import vocabulary  # noqa: PLC0415 -- it loads torch

    made = fabricate_step(law, config, vocabulary(model))
    assigned, minibatches = share_of_minibatches(made, config, Replicas.of(config.trainer), 0)
    parts = dict[int, list[FabricatedGroup]]()
    for at, minibatch in zip(assigned, minibatches, strict=True):
        parts.setdefault(minibatch, []).append(made[at])
    return max(parts.values(), key=lambda each: sum(map(count_tokens, each)))


_COLLECTIVE_S: Final = 120.0
_END_S: Final = 10.0
_READ_BYTES: Final = 1 << 16
_RANK: Final = (sys.executable, "-m", "offbeat.plugins.planning.sweep_rank")
_UNDER_A_LIMIT: Final = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "HF_DEACTIVATE_ASYNC_LOAD": "1"}
"""With these variables, it is repeatable whether a point fits. glibc then returns freed blocks of
64 KiB and more, just as a device reuses its memory. By default, the order of frees decides which
blocks glibc keeps. transformers loads in one thread. Otherwise each of its threads leaves a stack
of 8 MiB, and the number of threads depends on the speed of the first. Set only under a memory
limit. Other points use the allocator of a run, even if fetching pages again costs time."""
TOKENS: Final = "trainer.max_tokens_per_microbatch"
_ENCODER: Final = "trainer.encoder"
_DEVICE: Final = "trainer.device="


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The points to measure, and how to measure them."""

    recipe: Path
    overrides: tuple[str, ...]
    over: tuple[str, ...]  # KEY=VALUE,VALUE
    law: LengthLaw
    steps: int
    memory_mib: int | None
    deadline_s: float  # of one point
    largest: bool  # also search the largest token budget of each point

    def identity(self, config: RunConfig) -> str:
        """Return a digest of everything that affects the figures, except the varied settings."""
        parts = (
            config.model_dump_json(),
            self.law,
            self.steps,
            self.memory_mib,
            self.deadline_s,
            __version__,
        )
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(parts))


Said = Callable[[SweepPoint], None]


def sweep(request: SweepRequest, loaded: LoadedRecipe, out: Path, said: Said) -> list[SweepPoint]:
    """Measure every point that the file does not hold yet; return all points of this sweep.

    Args:
        request: The points to measure.
        loaded: The recipe with its overrides. Every point is applied on top of it.
        out: File of results. An interrupted sweep continues with it.
        said: Called with each newly measured point.

    Raises:
        UnusableSweep: The request contradicts itself, or the file holds a different sweep.
        UnusableLengths: Samples exceed the model's length.
    """
    if loaded.config.trainer.backend == "stub":
        raise UnusableSweep("trainer.backend is stub: nothing can be measured")
    lays_encoder = any(each.startswith(_ENCODER) for each in request.over)
    if lays_encoder or find_encoder(loaded.config.trainer) is not None:
        raise UnusableSweep(
            "trainer.encoder is set, but fabricated groups have no pictures: encoder ranks would compute "
            "nothing. Leave trainer.encoder out"
        )
    request.law.check_fits(loaded.config.generator.max_model_len)
    check_gpus(loaded.config, request.over)
    if request.largest and any(each.startswith(f"{TOKENS}=") for each in request.over):
        raise UnusableSweep(f"--largest searches {TOKENS}: leave it out of --over")
    file = SweepFile(out, request.identity(loaded.config))

    def measure_point(settings: tuple[str, ...]) -> SweepPoint:
        found = file.get(settings)
        if found is None:
            found = measure(request, settings, out.with_suffix(".log"))
            file.add(found)
            said(found)
        return found

    points = list[SweepPoint]()
    for settings in combinations(request.over):
        if request.largest:
            points += largest_budget(
                settings, loaded.config.trainer.max_tokens_per_microbatch, measure_point
            )
        else:
            points.append(measure_point(settings))
    return points


def check_gpus(
    config: RunConfig, over: Sequence[str], count: Callable[[], int] | None = None
) -> None:
    """Check that a GPU exists if a point would train on one. The ranks would crash without.

    Args:
        config: The recipe.
        over: The varied settings, ``KEY=VALUE,VALUE``.
        count: Counts the GPUs of this machine. Default: torch.

    Raises:
        UnusableSweep: There is no GPU.
    """
    varied = [axis.partition("=")[2] for axis in over if axis.startswith(_DEVICE)]
    devices = varied[0] if varied else str(getattr(config.trainer, "device", ""))
    if "cuda" not in devices:
        return
    import torch  # noqa: PLC0415 -- its import takes seconds

    if not (count or torch.cuda.device_count)():
        raise UnusableSweep(
            f"{_DEVICE}{devices}, and torch finds no GPU on this machine. Set trainer.device=cpu "
            "and trainer.gpus=0, or sweep on a machine with a GPU and a CUDA build of torch"
        )


def largest_budget(
    settings: tuple[str, ...], first: int, measured: Callable[[tuple[str, ...]], SweepPoint]
) -> list[SweepPoint]:
    """Bracket the largest token budget that fits: double it until one does not fit, then bisect.

    The budgets are multiples of a quarter of ``first``. The answer is exact to one such multiple,
    unless even the smallest does not fit. The search ends at a budget that holds all groups of a
    step, because a larger one changes nothing.

    Args:
        settings: The other settings of the point.
        first: First budget to try, in tokens of a microbatch.
        measured: Measures one point, or remembers it.

    Returns:
        All measured points, in the order of measurement.
    """
    unit, points = max(1, first // 4), list[SweepPoint]()

    def fits(units: int) -> bool:
        points.append(measured((*settings, f"{TOKENS}={units * unit}")))
        return points[-1].outcome == "ok"

    low, high = 0, 4
    while fits(high):
        low = high
        if high * unit >= points[-1].tokens:
            return points
        high *= 2
    if points[-1].outcome not in ("out_of_memory", "killed"):
        return points  # another number of tokens does not help
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return points


def measure(request: SweepRequest, settings: tuple[str, ...], log: Path) -> SweepPoint:
    """Measure one point in separate processes. Their failure is also an outcome.

    Args:
        request: The request of the sweep.
        settings: The settings of the point, applied on top of the recipe.
        log: File to which the processes append their output.
    """
    try:
        config = load_recipe(request.recipe, [*request.overrides, *settings]).config
        _check_layout(config)
    except ConfigError as error:
        problem = error.problems[0]
        return SweepPoint(settings, "invalid", f"{problem.key}: {problem.message}")
    except OffbeatError as error:
        return SweepPoint(settings, "invalid", str(error))
    # Before the ranks start, so that points that do not fit have an estimate too.
    memory, replicas = estimate(config, request.law), Replicas.of(config.trainer)
    with _rendezvous(replicas.ranks) as at:
        tasks = [
            RankTask(
                config.model_dump_json(),
                request.law,
                request.steps,
                request.memory_mib,
                rank,
                replicas,
                at,
            )
            for rank in range(replicas.ranks)
        ]
        replies = run_ranks(tasks, request.deadline_s, log)
    return msgspec.structs.replace(
        combine_replies(settings, replies, request.deadline_s),
        held_mib=memory.held_mib,
        activations_mib=memory.activations_mib,
    )


def _check_layout(config: RunConfig) -> None:
    """Refuse sizes that do not divide the model, before any process starts for them."""
    try:
        grid = sender_grid(config)
        tensors, sizes = model_tensors(
            Path(config.model.path), WirePolicy(), tensor_ranks=count_divided_ranks(grid)
        )
        for each in tensors:
            placement(each, sizes, grid)
    except LayoutRefused as refused:
        raise refused.name_key(TRAINER_KEYS) from refused


@contextlib.contextmanager
def _rendezvous(ranks: int) -> Generator[WorldRendezvous | None]:
    """Serve the rendezvous of the ranks of one point. A single rank needs none."""
    if ranks == 1:
        yield None
        return
    key = SharedKey.random()
    with contextlib.closing(StoreServer(HOST, key)) as server:
        address = StoreAddress(HOST, server.port, key)
        yield WorldRendezvous("sweep", address, ranks, _COLLECTIVE_S)


Reply = RankResult | RankFailed | int | None
"""Measurements, an error, the exit code of a silent process, or None if it hung."""


def run_ranks(
    tasks: Sequence[RankTask], deadline_s: float, log: Path, command: Sequence[str] = _RANK
) -> list[Reply]:
    """Run the ranks of one point until all have replied, one has failed, or the time is over.

    No process is left afterwards.

    Args:
        tasks: One for each rank.
        deadline_s: Time for all of them, including their start.
        log: File to which they append their output.
        command: Program of a rank. The reply descriptor and this process's id are appended.
    """
    ranks = list[tuple[subprocess.Popen[bytes], int]]()
    replies = list[Reply]()
    try:
        with log.open("ab") as output:
            for task in tasks:
                ours, theirs = os.pipe()
                try:
                    process = subprocess.Popen(  # noqa: S603 -- this package, or a test
                        [*command, str(theirs), str(os.getpid())],
                        stdin=subprocess.PIPE,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=os.environ | ({} if task.memory_mib is None else _UNDER_A_LIMIT),
                        pass_fds=[theirs],
                        start_new_session=True,
                    )
                finally:
                    os.close(theirs)  # so that the end of the process ends the pipe
                ranks.append((process, ours))
                assert process.stdin is not None  # noqa: S101 -- it was asked for
                # The reply shows whether a process has ended.
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                    pipe.write(msgspec.msgpack.encode(task))
        replies = _replies(ranks, time.monotonic() + deadline_s)
        return replies
    finally:
        are_well = replies and all(isinstance(reply, RankResult) for reply in replies)
        for process, pipe in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if are_well:
                    process.wait(_END_S)  # lets libraries release their named resources
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(pipe)


def _replies(ranks: Sequence[tuple[subprocess.Popen[bytes], int]], until: float) -> list[Reply]:
    replies: list[Reply] = [None] * len(ranks)
    said = [b""] * len(ranks)
    with selectors.DefaultSelector() as selector:
        for at, (_, pipe) in enumerate(ranks):
            selector.register(pipe, selectors.EVENT_READ, at)
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                at: int = key.data
                part = os.read(ranks[at][1], _READ_BYTES)
                said[at] += part
                if part:
                    continue
                selector.unregister(key.fileobj)
                replies[at] = _reply(ranks[at][0], said[at])
                if not isinstance(replies[at], RankResult):
                    return replies  # the others wait for this rank in a collective
    return replies


def _reply(process: subprocess.Popen[bytes], said: bytes) -> Reply:
    """Return the reply of a rank, or its exit code if it ended in the middle of the reply."""
    try:
        return REPLY.decode(said)
    except msgspec.DecodeError:
        try:
            return process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return None


def combine_replies(
    settings: tuple[str, ...], replies: Sequence[Reply], deadline_s: float
) -> SweepPoint:
    """Combine the replies of a point's ranks into the point."""
    results = [each for each in replies if isinstance(each, RankResult)]
    if len(results) == len(replies):
        return SweepPoint(
            settings,
            "ok",
            ranks=len(results),
            parameters=max(each.parameters for each in results),
            step_s=max(each.step_s for each in results),
            tokens=results[0].tokens,
            peak_mib=max(each.peak_mib for each in results),
            phases_mib=_highest([each.phases_mib for each in results]),
            phases_s=_highest([each.phases_s for each in results]),
        )
    for reply in replies:
        if isinstance(reply, RankFailed):
            kind = "out_of_memory" if reply.out_of_memory else "failed"
            return SweepPoint(settings, kind, reply.error.partition("\n")[0])
        if isinstance(reply, int):
            kind = "killed" if reply < 0 else "failed"
            what = f"signal {-reply}" if reply < 0 else f"exit code {reply}"
            return SweepPoint(settings, kind, f"a rank ended by {what} without a message")
    return SweepPoint(settings, "hung", f"no answer within {deadline_s:g} s")


def _highest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the highest value of each name over the ranks."""
    return {name: max(each.get(name, 0.0) for each in ranks) for name in ranks[0]}
