"""One trainer rank, for any backend, with its fence, classified failures and log of trained groups.

The log is independent of the ledger. The caller makes one call at a time, in the order of the
controller's calls. The split step relies on that order.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import msgspec
import structlog

from offbeat.config.limits import trainer_device
from offbeat.config.loss_spec import LossSpec
from offbeat.messages.failures import (
    ActorLost,
    CheckpointFailed,
    OffbeatError,
    StartFailed,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
)
from offbeat.messages.fences import Fence, FenceGuard, StepKey
from offbeat.messages.training import Checkpoint, ChunkResult, StepResult, TrainerState
from offbeat.run_files.disk import DISK
from offbeat.run_files.line_file import LineFile
from offbeat.run_files.sharing import WriteLocation
from offbeat.run_files.transfer import send
from offbeat.telemetry.logs import new_incarnation
from offbeat.trainers.backend import Advantages, TrainerBackend
from offbeat.trainers.checkpoints.rank_store import FOLDER, MirroredCheckpoints, RankCheckpoints
from offbeat.trainers.checkpoints.store import VerifiedCheckpoint
from offbeat.trainers.cpu_time import CpuTime
from offbeat.trainers.errors import UnfitColumns
from offbeat.trainers.held_columns import HeldColumns, MissingColumns, Places, merge_columns
from offbeat.trainers.memory import PeakMemory, make_meter
from offbeat.trainers.ranks.peers import PeerFailed, Peers, SingleRank, WorldBroken, shorten_error
from offbeat.trainers.senders import Canaries, make_sender
from offbeat.trainers.spec import TrainerSpec, WorldRendezvous
from offbeat.transfer_queue.schema import Columns, payload_bytes
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import TransferFailed
from offbeat.weight_sync.rendezvous.frames import StoreAddress
from offbeat.weight_sync.rendezvous.interface import AddressNotLocal, find_interface
from offbeat.weight_sync.transport import WeightSource, with_handles_apart

if TYPE_CHECKING:
    from tensordict import TensorDictBase


log = structlog.stdlib.get_logger()


class TrainedLog:
    """Append-only log of the applied steps and restores of one trainer.

    It has a line ``{"step", "attempt", "version", "prompt_indices"}`` per applied step, and
    ``{"restored": version}`` per rewind. A ``restored`` line undoes all earlier lines of later
    versions. If the disk refuses a line, the line is missing and a warning is logged. The step is
    applied, or the trainer restored, nevertheless.
    """

    def __init__(self, append: Callable[[bytes], object], close: Callable[[], None]) -> None:
        self._append, self.close = append, close

    def record_step(self, key: StepKey, version: int, prompt_indices: Sequence[int]) -> None:
        """Record an applied step, before its result is returned to the controller."""
        step = {"step": key.step, "attempt": key.attempt, "version": version}
        self._write(step | {"prompt_indices": list(prompt_indices)})

    def record_restore(self, version: int) -> None:
        """Record that the trainer was restored to ``version``."""
        self._write({"restored": version})

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self._append(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            log.warning("trained.not_logged", error=str(error))


def open_trained_log(place: WriteLocation) -> TrainedLog:
    """Create the log of rank 0. It is in the run directory even if rank 0 runs elsewhere."""
    name, files = "trained-rank0.jsonl", place.files
    if files is None:
        file = LineFile(place.directory / "logs" / name)
        return TrainedLog(file.append, file.close)
    return TrainedLog(lambda line: files.append(f"logs/{name}", line), lambda: None)


T = TypeVar("T")
P = ParamSpec("P")
MakeRank = Callable[[Peers], tuple[TrainerBackend, WeightSource]]


class TrainerRank:
    """One trainer rank: a split step and a weight source.

    It starts with the initial model, version 0. ``restore`` loads the state of a run. If
    ``finish_train_step`` raises ``TrainStepFailed``, the weights may match no version. Then only a
    restore helps.

    Several ranks begin by forming a process group: ``listen`` is called on rank 0, then ``join`` on
    all ranks. All ranks receive the same calls in the same order, each with its share of the
    groups, and execute each call together. After ``WorldBroken``, only new processes can continue.
    """

    def __init__(
        self,
        spec: TrainerSpec,
        make: MakeRank,
        place: WriteLocation,
        address: Callable[[], str],
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Create the rank, and its model if it is the only rank.

        Args:
            spec: Spec of the rank.
            make: Creates the trainer and the source of its weights, once all ranks have joined.
            place: Directory to which this process writes.
            address: Returns the address at which other machines reach this one. Called only if
                needed.
            cpu_clock: Returns the CPU seconds of the rank.
        """
        self._spec, self._rank, self._make = spec, spec.rank, make
        self._place, self._checkpoints = place, place.directory / FOLDER
        self._address = address
        self._guard = FenceGuard(f"trainer rank {spec.rank}")
        self._log = None if spec.rank else open_trained_log(place)
        # By call, because a repeated one counts once
        self._prompt_indices: dict[StepKey, Sequence[int]] = {}
        self._columns = HeldColumns()
        self._canaries = Canaries(spec.config)
        self._memory, self._cpu = PeakMemory(make_meter(spec.config.trainer)), CpuTime(cpu_clock)
        self._incarnation = new_incarnation(spec.process)
        self._world = ""  # name of the process group; empty before it is formed
        self._entry = WorldEntry(spec.rank, trainer_device(spec.config.trainer), address)
        self._peers: Peers = SingleRank()
        if spec.ranks == 1:
            self._enter(self._incarnation, SingleRank())

    # --- several ranks ---------------------------------------------------------------------------

    def identity(self, fence: Fence) -> tuple[str, str]:
        """Return the name of this incarnation, and of its process group (empty before it joins)."""
        self._guard.check(fence)
        return self._incarnation, self._world

    def listen(self, fence: Fence) -> StoreAddress:
        """Start the store of a new world on rank 0. Return its address and key."""
        self._guard.check(fence)
        return self._entry.listen()

    def join(self, fence: Fence, at: WorldRendezvous) -> None:
        """Join the other ranks, and create this rank's part of the model with them.

        Raises:
            WorldBroken: Not all joined in time. The same processes may try again.
            Exception: This rank cannot create its part. Later calls raise it again at once.
        """
        self._guard.check(fence)
        self._entry.join(at, partial(self._enter, at.world))

    def _enter(self, world: str, peers: Peers) -> None:
        spec, self._peers = self._spec, peers
        self._split, source = self._make(peers)
        self._sender = make_sender(spec, source, self._address, self._incarnation, peers)
        keep, identity = spec.config.checkpoint.keep, self._split.identity
        store = RankCheckpoints(self._checkpoints, identity, keep=keep, peers=peers)
        files = self._place.files
        self._store = (
            store if files is None else MirroredCheckpoints(store, self._checkpoints, files)
        )
        self._world = world

    def _admit(self, fence: Fence) -> None:
        """Accept a call of the present controller. Raise if the ranks have not joined yet."""
        self._guard.check(fence)
        if not self._world:
            raise ActorLost(f"trainer rank {self._rank}", "a call", "it has not met the others")

    # --- a rank ----------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Return the version of the weights that the rank holds."""
        return self._split.steps_applied

    def state(self, fence: Fence) -> TrainerState:
        self._admit(fence)
        return self._together("state", self._state)

    def _state(self) -> TrainerState:
        last = self._split.last_applied or StepKey(0, 0, 0)
        return TrainerState(
            ranks=self._spec.ranks,
            version=self._split.steps_applied,
            last_step=last.step,
            last_attempt=last.attempt,
            parameters=self._split.parameters,
            digest=self._split.current_digest(),
            incarnation=self._incarnation,
            initial_digest=self._split.initial_digest,
        )

    def about(self, fence: Fence) -> tuple[str, int, int]:
        """Return this incarnation's name, and the handles of a published release and its delta."""
        self._admit(fence)
        return self._incarnation, self._sender.handles, self._sender.delta_handles

    def publish_weights(
        self, fence: Fence, version: int, layout: EngineLayout | None = None
    ) -> tuple[Any, ...]:
        """Publish a snapshot: ``(release without handles, handle, handle, ...)``.

        The release's handles are followed by the handles of its delta, or by None without a delta.
        If an engine layout is passed, this and later releases are cut for it. Training may continue
        at once.
        """
        self._admit(fence)
        self._check_holds(version, TrainerCall.PUBLISH)
        try:
            make = partial(self._sender.publish, version, layout)
            published = self._together("publish", lambda: self._canaries.add(make(), self._split))
        except TransferFailed as error:  # only a new process can send again
            raise TrainStepFailed(self._rank, version, TrainerCall.PUBLISH, str(error)) from error
        return with_handles_apart(published, self._sender.delta_handles)

    def hold(self, fence: Fence, number: int, *payloads: Sequence[Columns]) -> None:
        """Receive columns ahead of the next call with groups. That call names them by ``number``.

        With several ranks, a lost object makes only this call fail. The rank then reports the loss
        inside the next call. Otherwise the other ranks would wait for it in vain.
        """
        self._guard.check(fence)
        self._columns.put(fence, number, payloads)

    def prepare_logprobs(
        self, fence: Fence, loss: LossSpec, places: Places, sent: int, *payloads: Sequence[Columns]
    ) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], list[Columns]]:
        """Return ``(column names, bytes of each group)``, and each group's columns.

        Without groups, the names are empty.

        Raises:
            ColumnsMissing: The columns sent with ``hold`` did not arrive.
        """
        self._admit(fence)
        chunk = self._chunk(fence, "prepare_logprobs", places, sent, payloads)
        written = self._classify_errors(
            TrainerCall.PREPARE_LOGPROBS,
            self._split.steps_applied + 1,
            self._split.prepare_logprobs,
            chunk,
            policy=loss.config.needs_policy_logprobs,
            reference=loss.config.needs_reference_logprobs,
            temperature=loss.temperature,
            teacher=loss.config.teacher_path,
        )
        names = tuple(written[0]) if written else ()
        return (names, tuple(payload_bytes(columns) for columns in written)), list(written)

    def begin_train_step(self, fence: Fence, key: StepKey, loss: LossSpec) -> None:
        """Open the step that follows the version of these ranks. Refuse any other step.

        A rank that was restarted without the controller's knowledge has the initial model, so it
        refuses.
        """
        self._admit(fence)
        if key.step != self._split.steps_applied + 1:
            found = f"the step after version {self._split.steps_applied}, which this rank holds"
            raise StepOutOfOrder(f"begin of step {key.step}", found)
        self._classify_errors(TrainerCall.BEGIN, key.step, self._split.begin_train_step, key, loss)
        self._prompt_indices = {
            k: v for k, v in self._prompt_indices.items() if k.attempt_id == key.attempt_id
        }

    def train_microbatch(
        self,
        fence: Fence,
        key: StepKey,
        prompt_indices: Sequence[int],
        advantages: Advantages,
        minibatches: Sequence[int],
        places: Places,
        sent: int,
        *payloads: Sequence[Columns],
    ) -> ChunkResult:
        """Train this rank's share of a chunk.

        Args:
            fence: Fence of the controller.
            key: The next key of the step.
            prompt_indices: Prompt indices of the whole chunk, not only of the share.
            advantages: Advantages of the share's groups.
            minibatches: Minibatch of each of the share's groups. If empty, all groups are in one.
            places: Location of each group's columns in the payloads.
            sent: Number of the ``hold`` that sent the payloads, or 0 if they are arguments of this
                call.
            payloads: Lists of columns.

        Raises:
            ColumnsMissing: The columns sent with ``hold`` did not arrive.
        """
        self._admit(fence)
        chunk = self._chunk(fence, "train_microbatch", places, sent, payloads)
        train = self._split.train_microbatch
        result = self._classify_errors(
            TrainerCall.MICROBATCH, key.step, train, key, chunk, advantages, minibatches
        )
        self._prompt_indices[key] = prompt_indices
        return result

    def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        self._admit(fence)
        before = self._split.last_applied
        result = self._classify_errors(
            TrainerCall.FINISH, key.step, self._split.finish_train_step, key
        )
        if result.applied and key != before and self._log is not None:
            prompt_indices = list(chain.from_iterable(self._prompt_indices.values()))
            self._log.record_step(key, self._split.steps_applied, prompt_indices)
        metrics = {**result.metrics, **self._memory.report(key), **self._cpu.report(key)}
        return msgspec.structs.replace(result, metrics=metrics)

    def abort_train_step(self, fence: Fence, key: StepKey) -> None:
        self._admit(fence)
        self._classify_errors(TrainerCall.ABORT, key.step, self._split.abort_train_step, key)

    def save(self, fence: Fence, step: int) -> None:
        """Export a Hugging Face directory for transformers and vLLM to the run's checkpoints.

        Raises:
            TrainStepFailed: The weights belong to another step, because a rank was restarted.
        """
        self._admit(fence)
        self._check_holds(step, TrainerCall.SAVE)
        self._together("save", lambda: self._save_model(f"step_{step}"))

    def _save_model(self, name: str) -> None:
        model, files = self._checkpoints / name, self._place.files
        self._split.save(model)
        if files is not None:
            send(files, model, FOLDER, name)
            DISK.remove(model)

    def save_checkpoint(self, fence: Fence, version: int) -> Checkpoint:
        """Save the state that ``restore`` needs, completely and durably. Training waits meanwhile.

        Raises:
            CheckpointFailed: The disk refused a write.
            TrainStepFailed: The weights have a different version, because a rank was restarted.
        """
        self._admit(fence)
        self._check_holds(version, TrainerCall.CHECKPOINT)

        def save() -> Checkpoint:
            digest, nbytes = self._split.current_digest(), self._split.state_nbytes
            written = self._store.save(version, digest, nbytes, self._split.save_state)
            return Checkpoint(version, digest, written)

        return self._together("checkpoint", save)

    def restore(self, fence: Fence, at_most: int) -> TrainerState:
        """Load the newest intact checkpoint, or else the initial model. Set newer ones aside.

        An open step is dropped. The next begin may be of any step, with a new attempt.

        Raises:
            CheckpointMismatch: That checkpoint belongs to a different model, backend or schema.
            CheckpointFailed: The checkpoint could not be read, or its weights do not match its
                digest.
        """
        self._admit(fence)
        self._prompt_indices = {}
        state = self._together("restore", lambda: self._restore(at_most))
        if self._log is not None:
            self._log.record_restore(state.version)
        return state

    def close(self) -> None:
        if self._world:
            self._sender.close()
        if self._log is not None:
            self._log.close()
        if self._place.files is not None:
            DISK.remove(self._checkpoints)  # the run directory has copies

    def _restore(self, at_most: int) -> TrainerState:
        self._sender.forget()
        found = self._store.rewind(at_most)
        if found is None:
            self._split.reset()
        else:
            self._load(found)
        return self._state()

    def _load(self, stored: VerifiedCheckpoint) -> None:
        self._store.load(stored, self._split.load_state)
        got = (self._split.steps_applied, self._split.current_digest())
        want = (stored.version, stored.manifest.weights_digest)
        if got != want:
            problem = f"version and weights are {got}, its manifest says {want}"
            raise CheckpointFailed(self._rank, stored.version, problem)

    def _chunk(
        self,
        fence: Fence,
        during: str,
        places: Places,
        sent: int,
        payloads: Sequence[Sequence[Columns]],
    ) -> "TensorDictBase":
        """Return the groups in the form that the trainer receives.

        If columns are missing, the error is raised when they are read, inside the call of all
        ranks.
        """
        brought = self._columns.take(fence, sent) if sent else payloads
        if brought is None:
            return cast("TensorDictBase", MissingColumns(self._rank, during))
        return self._split.make_chunk(merge_columns(places, brought))

    def _check_holds(self, version: int, during: TrainerCall) -> None:
        if version != (applied := self._split.steps_applied):
            raise TrainStepFailed(self._rank, version, during, f"it holds version {applied}")

    def _together(self, during: str, work: Callable[[], T]) -> T:
        """Run ``work`` on all ranks together. Losing another rank raises ``WorldBroken``."""
        try:
            with self._memory.during(during):
                return work()
        except Exception as error:
            if not self._peers.are_lost(error):
                raise
            raise WorldBroken(self._rank, during, shorten_error(error)) from error

    def _classify_errors(
        self, call: TrainerCall, step: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run ``work``. Convert its unexpected errors to a failure of this rank in this step."""
        try:
            return self._together(call, lambda: work(*args, **kwargs))
        except UnfitColumns as unfit:
            raise unfit.on(self._rank) from unfit
        except OffbeatError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            detail = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
            raise TrainStepFailed(self._rank, step, call, detail.replace("\n", " ")) from error


class WorldEntry:
    """Entry of one process into worlds of ranks, one at a time."""

    def __init__(self, rank: int, device: str, address: Callable[[], str]) -> None:
        """Create the entry of a rank.

        Args:
            rank: Number of the rank.
            device: Kind of device of the ranks' collectives.
            address: Returns the address at which other machines reach this one.
        """
        self._rank, self._device, self._address = rank, device, address
        self._unfit: Exception | None = None  # why this process can join no world
        self._store_server: Any = None  # its module imports torch

    def listen(self) -> StoreAddress:
        """Start the store of a new world. Return its address and key.

        Raises:
            StartFailed: Other machines cannot connect to this one.
        """
        from offbeat.trainers.ranks.process_group import (  # noqa: PLC0415 -- loads torch
            open_rendezvous,
        )

        if self._store_server is not None:
            self._store_server.close()
        self._store_server, address = open_rendezvous(self._reachable_address())
        return address

    def join(self, at: WorldRendezvous, enter: Callable[[Peers], None]) -> None:
        """Join the other ranks, and create this rank's part of the model with them.

        This is a separate call, not a part of the constructor, because Ray restarts an actor with
        its original arguments. These would contain the port of a dead rank 0.

        Raises:
            WorldBroken: Not all joined in time. The same processes may try again.
            StartFailed: Other machines cannot connect to this one.
            Exception: ``enter`` raised it. Later calls raise it again at once, because the first
                caller may have stopped waiting before.
        """
        if self._unfit is not None:
            raise self._unfit
        from offbeat.trainers.ranks.process_group import (  # noqa: PLC0415 -- loads torch
            join,
            leave,
        )

        peers = join(at, self._rank, self._device, self._reachable_address())
        try:
            enter(peers)
        except Exception as error:
            leave()
            if not (peers.are_lost(error) or isinstance(error, (PeerFailed, WorldBroken))):
                self._unfit = error
            raise

    def _reachable_address(self) -> str:
        """Return the address of this machine.

        Raises:
            StartFailed: No local network interface has this address, so no other rank could connect
                to it.
        """
        address = self._address()
        try:
            find_interface(address)
        except AddressNotLocal as error:
            raise StartFailed(f"trainer rank {self._rank}", str(error)) from error
        return address
