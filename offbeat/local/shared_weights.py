"""One copy of the weights: engines decode with the tensors that the trainer updates.

Decode steps and optimizer steps alternate (``WeightGate``), so each token has the version that
computed it:

- A finish closes the gate before the first weight changes, and waits for the decode steps in
  progress.
- After an applied step, each engine continues once it has committed that release.
- After a step that was not applied, the engines continue at once. They also continue after a finish
  that was refused because an earlier call of its step had failed.
- A finish that raised keeps the gate closed until a restore. Engines load the restored release.
- A replaced trainer has different tensors. Its former engines fail and are replaced.

Publishing copies nothing. Epochs, acks, digests and canaries are the same as in every other
transport.

The gate makes decode steps and optimizer steps alternate on one copy of the weights.

    trainer's thread    close -------- optimizer step ------- open
    engine's thread     step | nothing                            | commit of the release | step

An engine decodes only with the edition of the weights that it has committed. An applied step makes
a new edition. A step that was not applied leaves the edition unchanged.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.engine_server import LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.local.hosted import ONE_AT_A_TIME, Hosted
from offbeat.local.threads import WorkThread
from offbeat.messages.failures import EngineUnavailable, ReleaseLost, StaleFence, StepOutOfOrder
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import StepResult, TrainerState
from offbeat.messages.weights import WeightRelease
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.backend import TrainerBackend
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec
from offbeat.trainers.torch.loading import make_shell
from offbeat.trainers.torch.torch_trainer import make_torch_rank
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import ModuleTarget
from offbeat.weight_sync.served import ServedWeights
from offbeat.weight_sync.transport import WeightSource


class WeightGate:
    """Separates uses and changes of the weights. Any thread may call it.

    An edition is the weights between two changes.
    """

    def __init__(self) -> None:
        """Create an open gate."""
        self._changed = threading.Condition()
        self._edition, self._is_closed, self._users = 0, False, 0
        self._refused = dict[object, Callable[[], object]]()  # called at the next opening

    def close(self) -> bool:
        """Refuse new uses, wait for current uses to end, and return whether the gate was open."""
        with self._changed:
            was_open, self._is_closed = not self._is_closed, True
            self._changed.wait_for(lambda: not self._users)
            return was_open

    def open(self, *, changed: bool) -> None:
        """Permit use again, with a new edition if the weights have changed."""
        with self._changed:
            self._edition += changed
            self._is_closed = False
            self._changed.notify_all()
            refused = [*self._refused.values()]
            self._refused.clear()
        for retry in refused:
            retry()

    def begin(self, edition: int | None, user: object, retry: Callable[[], object]) -> bool:
        """Begin to use an edition, or return False and call ``retry`` when the gate opens."""
        with self._changed:
            if self._is_closed or edition != self._edition:
                self._refused[user] = retry
                return False
            self._users += 1
            return True

    def enter(self, *, waits: bool = False) -> int | None:
        """Begin to use the current edition and return it, or None if the gate is closed.

        With ``waits``, wait until the gate is open.
        """
        with self._changed:
            if waits:
                self._changed.wait_for(lambda: not self._is_closed)
            if self._is_closed:
                return None
            self._users += 1
            return self._edition

    def end(self) -> None:
        """End a use."""
        with self._changed:
            self._users -= 1
            self._changed.notify_all()


class EngineTurns:
    """Steps of one engine, which decodes with the edition that it has adopted."""

    def __init__(self, gate: WeightGate) -> None:
        """Create the turns. ``gate`` guards the weights that the engine uses."""
        self._gate = gate
        self._edition: int | None = None

    def begin(self, retry: Callable[[], object]) -> bool:
        return self._gate.begin(self._edition, self, retry)

    def end(self) -> None:
        self._gate.end()

    @contextmanager
    def reading(self) -> Generator[bool]:
        """Keep the weights unchanged in the block. Yield whether they are the engine's edition."""
        edition = self._gate.enter()
        try:
            yield edition is not None and edition == self._edition
        finally:
            if edition is not None:
                self._gate.end()

    @contextmanager
    def adopting(self) -> Generator[bool]:
        """Use the current edition in the block, and adopt it if the block does not raise.

        The block gets False if the weights are being changed. Then it must raise.
        """
        edition = self._gate.enter()
        try:
            yield edition is not None
            self._edition = edition
        finally:
            if edition is not None:
                self._gate.end()


class SharedRank(TrainerRank):
    """A trainer rank that shares its weights with engines."""

    model: PreTrainedModel
    """The trained model. Its tensor objects are never replaced."""

    def __init__(
        self,
        spec: TrainerSpec,
        place: WriteLocation,
        address: Callable[[], str],
        *,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Create the rank with the arguments of the base class."""
        self.gate = WeightGate()
        self._published: tuple[int, str] | None = None  # version and digest of these weights

        def make(peers: Peers) -> tuple[TrainerBackend, WeightSource]:
            trainer, source = make_torch_rank(spec, peers)
            self.model = trainer.module
            return trainer, source

        super().__init__(spec, make, place, address, cpu_clock=cpu_clock)

    def publish_weights(
        self, fence: Fence, version: int, layout: EngineLayout | None = None
    ) -> tuple[Any, ...]:
        published, *handles = super().publish_weights(fence, version, layout)
        self._published = version, published.digest
        return published, *handles

    def finish_train_step(self, fence: Fence, key: StepKey) -> StepResult:
        """Finish like the base class.

        If it raises, the weights have no version, so no engine decodes.
        """
        before = self.version
        with self._close_gate():
            result = super().finish_train_step(fence, key)
        self._open(is_new=self.version != before)
        return result

    def restore(self, fence: Fence, at_most: int) -> TrainerState:
        with self._close_gate():
            state = super().restore(fence, at_most)
        self._open(is_new=True)
        return state

    @contextmanager
    def _close_gate(self) -> Generator[None]:
        """Close the gate before the block. If the block refuses its call, restore the gate."""
        was_open = self.gate.close()
        try:
            yield
        except (StaleFence, StepOutOfOrder):  # before any weight was changed
            if was_open:
                self.gate.open(changed=False)
            raise

    def _open(self, *, is_new: bool) -> None:
        if is_new:
            self._published = None
        self.gate.open(changed=is_new)

    def holds(self, release: WeightRelease) -> bool:
        """Return whether this release has the weights that the rank holds now."""
        return self._published == (release.version, release.digest)


class SharedEngineServer(EmbeddedEngineServer):
    """Server of an engine that computes with the tensors of a trainer rank."""

    def __init__(
        self,
        spec: EngineSpec,
        trainer: Hosted[TrainerRank],
        rank: SharedRank,
        thread: WorkThread,
        cpu_clock: Callable[[], float],
    ) -> None:
        """Create the engine. The caller uses the weights meanwhile.

        Args:
            spec: Specification of the engine.
            trainer: Host of the trainer.
            rank: The rank that the host holds now.
            thread: Thread that runs the engine.
            cpu_clock: Returns the CPU seconds of the engine.
        """
        self._trainer, self._rank, self._turns = trainer, rank, EngineTurns(rank.gate)
        super().__init__(
            spec,
            steps_in=thread,
            cpu_clock=cpu_clock,
            load=lambda spec: make_twin(rank.model, spec),
            turns=self._turns,
        )

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        """Adopt the trainer's weights as the release, without loading data."""
        release = incoming.release
        if not self._trainer.hosts(self._rank):
            problem = "it computes with the weights of a trainer that was replaced"
            self._engine.fail(problem)
            raise EngineUnavailable(self._name, "weight sync", problem, "Start another engine")
        read_back = ModuleTarget(self._module).read_back
        return await self._commit(incoming.epoch, release, self._adopt(release), read_back)

    @contextmanager
    def _adopt(self, release: WeightRelease) -> Generator[None]:
        with self._turns.adopting() as is_unchanged:
            if not is_unchanged or not self._rank.holds(release):
                problem = "the trainer has changed the weights that it names"
                raise ReleaseLost(self._name, release.version, problem)
            yield

    async def _read_back(self, version: int, manifest: Manifest) -> ServedWeights:
        with self._turns.reading() as are_served:
            if are_served:
                return await super()._read_back(version, manifest)
        problem = "the trainer is changing the weights; ask again"
        return ServedWeights(self._name, version, manifest, problem=problem)


def start_shared_engine(
    spec: EngineSpec,
    trainer: Hosted[TrainerRank],
    thread: WorkThread,
    cpu_clock: Callable[[], float],
) -> SharedEngineServer:
    """Create an engine in the thread that runs its steps, once a trainer exists.

    The caller must not hold ``ONE_AT_A_TIME``, which the trainer needs to be made.
    """
    rank = trainer.wait()
    assert isinstance(rank, SharedRank)  # noqa: S101 -- chosen by the same setting
    rank.gate.enter(waits=True)  # the proof of decoding reads the weights
    try:
        with ONE_AT_A_TIME:
            return SharedEngineServer(spec, trainer, rank, thread, cpu_clock)
    finally:
        rank.gate.end()


def make_twin(model: PreTrainedModel, spec: EngineSpec) -> PreTrainedModel:
    """Return a model whose weights are the tensors of another model.

    It has its own config, attention, parameter objects, and buffers that no file holds. Parameter
    objects are separate because the engine's proof replaces their ``data`` for a moment, and
    because the trainer's have gradients.
    """
    dtype = getattr(torch, spec.model.dtype)
    twin = make_shell(spec.model.path, dtype, trust_remote_code=spec.model.trust_remote_code)
    state = model.state_dict(keep_vars=True)
    # One alias per parameter: tied weights stay tied
    aliases = {id(each): nn.Parameter(each.detach()) for each in model.parameters()}
    twin.load_state_dict(
        {name: aliases.get(id(each), each) for name, each in state.items()}, assign=True
    )
    twin.requires_grad_(requires_grad=False)
    for name, each in model.named_buffers(remove_duplicate=False):
        if name not in state:
            at, _, own = name.rpartition(".")
            setattr(twin.get_submodule(at), own, each.clone())
    return twin
