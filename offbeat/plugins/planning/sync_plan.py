"""Plan of the weight sync between two layouts, as a table: ``offbeat plan-sync``.

Account of a plan: bytes moved, the minimum of bytes to move, and the busiest rank. Pure.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec

from offbeat.config.base import of_kind
from offbeat.config.limits import find_encoder
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import ModelGeneratorConfig
from offbeat.config.trainer_parts import sends_additions
from offbeat.messages.failures import OffbeatError
from offbeat.plugins.planning.declared import place_tensors
from offbeat.plugins.planning.grid_text import describe_grid
from offbeat.plugins.planning.model_tensors import model_tensors
from offbeat.plugins.reshard.section import find_wire
from offbeat.trainers.torch.matrix_division import RECIPE_NAMES, SizeNames
from offbeat.trainers.trainer_plugin import TrainerPlugin, find_trainer, known_trainers
from offbeat.weight_sync.dtypes import SCALE_SUFFIX, WirePolicy
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.errors import LayoutRefused
from offbeat.weight_sync.grid import ModelGrid
from offbeat.weight_sync.manifest import TensorMeta
from offbeat.weight_sync.region import PlacedTensor, Placement, Region, Shape, union_elements
from offbeat.weight_sync.transfer_plan import DIRECT, RankMachines, TransferPlan, plan_transfers
from offbeat.weight_sync.wire_format import make_policy

Link = Literal["network", "machine", "shared copy"]


@dataclass(frozen=True, slots=True)
class ByteAccount:
    """Bytes of a plan by class of tensor and by link, and the load of the ranks."""

    moved: dict[tuple[str, Link], int]
    """Bytes by (class, link). ``shared copy``: from another receiver's copy on the same machine."""

    needed: int
    """Bytes that receivers' machines need and no sender on them holds. No plan moves less."""

    held: tuple[int, ...]  # by sender, on the wire
    sent: tuple[int, ...]  # over the network, by sender
    received: tuple[int, ...]  # over the network, by receiver
    model: int  # bytes of the model once

    @property
    def over_network(self) -> int:
        return sum(nbytes for (_, link), nbytes in self.moved.items() if link == "network")

    @property
    def ratio(self) -> float:
        """Bytes over the network per byte that must cross it. 1.0 is the optimum."""
        return self.over_network / self.needed if self.needed else 1.0

    @property
    def busiest(self) -> int:
        """Bytes that the busiest sender sends over the network."""
        return max(self.sent, default=0)


def account(plan: TransferPlan) -> ByteAccount:
    """Add up the bytes of a plan."""
    senders, receivers = plan.machines.senders, plan.machines.receivers
    moved = Counter[tuple[str, Link]]()
    sent, received = [0] * len(senders), [0] * len(receivers)
    for piece, sender, receiver, via in plan.transfers():
        link: Link = "shared copy"
        if via == DIRECT:
            link = "machine" if senders[sender] == receivers[receiver] else "network"
        if link == "network":
            sent[sender] += piece.nbytes
            received[receiver] += piece.nbytes
        moved[plan.tensors[piece.tensor].kind, link] += piece.nbytes
    model = sum(each.nbytes for each in plan.tensors)
    held = _held(plan)
    return ByteAccount(dict(moved), _count_needed(plan), held, tuple(sent), tuple(received), model)


def _held(plan: TransferPlan) -> tuple[int, ...]:
    elements, held = dict[tuple[Placement, int], int](), [0] * len(plan.machines.senders)
    for each in plan.tensors:
        key = each.source, each.itemsize
        elements[key] = elements.get(key, 0) + 1
    for (placement, itemsize), count in elements.items():
        for region, ranks in placement.parts:
            for rank in ranks:
                held[rank] += region.elements * itemsize * count
    return tuple(held)


def _count_needed(plan: TransferPlan) -> int:
    """Count the bytes that machines need but lack, from the placements instead of the transfers."""
    elements = dict[tuple[Placement, Placement, Shape], int]()
    total = 0
    for each in plan.tensors:
        key = each.source, each.target, each.shape
        if key not in elements:
            elements[key] = _elements_needed(each, plan.machines)
        total += elements[key] * each.itemsize
    return total


def _elements_needed(tensor: PlacedTensor, machines: RankMachines) -> int:
    needed = dict[int, set[Region]]()
    for region, ranks in tensor.target.parts:
        for machine in {machines.receivers[rank] for rank in ranks}:
            needed.setdefault(machine, set()).add(region)
    held = dict[int, set[Region]]()
    for region, ranks in tensor.source.parts:
        for machine in {machines.senders[rank] for rank in ranks} & needed.keys():
            held.setdefault(machine, set()).add(region)
    return sum(
        union_elements([*regions, *held.get(machine, ())]) - union_elements(held.get(machine, ()))
        for machine, regions in needed.items()
    )


MIB: Final = 1 << 20
_GB: Final = 1e9
_VLLM_VOCABULARY: Final = 64
"""vLLM pads the rows of the vocabulary to a multiple of this, then cuts them over its ranks."""
TRAINER_KEYS: Final = {
    "tensor": "trainer.tensor_parallel",
    "pipeline": "trainer.pipeline_parallel",
    "stages": "trainer.layers_per_stage",
    "expert": "trainer.expert_parallel",
    "expert_tensor": "trainer.expert_tensor_parallel",
    "expert x expert_tensor": "trainer.expert_parallel x trainer.expert_tensor_parallel",
    "encoders": "trainer.encoder.data_parallel",
    "encoder_tensor": "trainer.encoder.tensor_parallel",
    "fsdp": "trainer.data_parallel",
}
"""Recipe key by parallelism axis of the trainer, as errors name it."""
ENGINE_KEYS: Final = {
    "tensor": "generator.vllm.tensor_parallel",
    "pipeline": "generator.vllm.pipeline_parallel",
    "expert": "generator.vllm.expert_parallel",
}
"""Recipe key by parallelism axis of the engines."""
_LINKS: Final = ("network", "machine", "shared copy")


class NothingToPlan(OffbeatError):
    """A recipe without weights to send, or a request without one of the sides.

    Fix: name a recipe with a model, or both sides.
    """

    problem: str

    def __str__(self) -> str:
        return f"no weight sync to plan: {self.problem}"


OPTION_NAMES: Final = SizeNames("--senders tensor", "--senders encoders")
"""Names of sizes in errors, if the option sets them."""


@dataclass(frozen=True, slots=True)
class SyncLayouts:
    """The two sides of a sync."""

    model: Path
    policy: WirePolicy
    senders: ModelGrid
    receivers: ModelGrid
    ranks_per_machine: int
    max_piece_bytes: int
    recorded: EngineLayout | None = None
    """Regions that each rank of an engine loads, recorded from its own loader. None: ``receivers``
    determines them by the names of tensors."""
    trainer: TrainerPlugin | None = None
    """Plug-in of the recipe's trainer. None: the torch trainer, or no recipe."""

    names: SizeNames = RECIPE_NAMES  # of the senders' sizes, in refusals
    wire: str = "tcp"  # transport of the buckets


@dataclass(frozen=True, slots=True)
class SyncPlanReport:
    """A plan in numbers."""

    model: str
    tensors: int
    senders: str
    receivers: str
    recorded: bool  # whether the receivers are engines with recorded loaders
    encoders: int  # of the senders: the last ranks, which hold only the vision tower
    ranks_per_machine: int
    bytes: ByteAccount
    pieces: int
    transfers: int
    seconds: float  # of CPU, to plan
    digest: str
    gathered: int  # bytes into trainer ranks if each gathers its side's part, and rank 0 everything
    stored: int  # bytes out of rank 0 if it sends the model once to each machine of receivers
    broadcast: int  # bytes into receivers if each receives the whole model
    apart: int  # bytes into receivers if each fetches its needs, even if neighbours have them
    gathered_everywhere: bool  # whether ``gathered`` is the whole model on every trainer rank
    wire: str = "tcp"

    def to_json(self) -> str:
        """Return the report as one JSON object. Sizes are in bytes."""
        found = asdict(self)
        moved = {kind: dict.fromkeys(_LINKS, 0) for kind, _ in self.bytes.moved}
        for (kind, link), nbytes in self.bytes.moved.items():
            moved[kind][link] = nbytes
        found["bytes"] |= {
            "moved": moved,
            "over_network": self.bytes.over_network,
            "ratio": self.bytes.ratio,
            "busiest": self.bytes.busiest,
        }
        return json.dumps(found) + "\n"

    def to_text(self) -> str:
        """Return the report as a table, in GB (1e9 bytes) or MB (1e6 bytes)."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        found = self.bytes
        unit, divisor = ("GB", 1e9) if found.model >= _GB else ("MB", 1e6)

        def said(nbytes: float) -> str:
            return f"{nbytes / divisor:,.2f} {unit}"

        def row(name: str, values: list[int]) -> str:
            return f"{name:<14}" + "".join(f"{value / divisor:>14,.2f}" for value in values)

        yield f"{self.model}: {said(found.model)} in {self.tensors:,} tensors"
        yield f"senders    {self.senders}"
        yield f"receivers  {self.receivers}"
        yield f"{self.ranks_per_machine} ranks on a machine, none on both sides"
        yield (
            "receivers as their loaders were recorded, senders declared"
            if self.recorded
            else "declared by the names of tensors, not recorded from engines"
        )
        if self.wire != "tcp":
            sender, receiver = said(max(found.held)), said(max(found.received))
            apart = "" if self.wire == "nccl" else " All of it stays within one GPU."
            yield (
                f"sync.wire {self.wire}: in addition in device memory, up to {sender} on a sender and {receiver} on "
                f"a receiver.{apart}"
            )
        yield ""
        yield f"{unit:<14}" + "".join(f"{link:>14}" for link in _LINKS)
        kinds = list(dict.fromkeys(kind for kind, _ in found.moved))
        for kind in kinds:
            yield row(kind, [found.moved.get((kind, link), 0) for link in _LINKS])
        yield row(
            "in all",
            [sum(found.moved.get((kind, link), 0) for kind in kinds) for link in _LINKS],
        )
        yield ""
        mean = found.over_network / len(found.sent)
        yield f"each byte that has to cross the network crosses it {found.ratio:.2f} times"
        yield (
            f"busiest sender {said(found.busiest)} (mean {said(mean)}), "
            f"busiest receiver {said(max(found.received))}"
        )
        if self.apart > found.over_network:
            yield f"sync.transport=reshard sends it to each receiver apart: {said(self.apart)}"
        if self.encoders:
            yield from self._sides(row)
        yield f"{self.transfers:,} transfers of {self.pieces:,} pieces, planned in {self.seconds:.1f} s of CPU"
        yield f"plan {self.digest}"
        yield ""
        yield "for comparison, whole weights through rank 0:"
        into = "the model into each other rank"
        if self.encoders and not self.gathered_everywhere:
            into = "each side into the ranks that hold it, the tower into rank 0"
        yield f"  into trainer ranks  {said(self.gathered)} to gather, {into}"
        yield f"  out of rank 0       {said(self.stored)} (object_store)"
        yield f"  into receivers      {said(self.broadcast)}"

    def _sides(self, row: Callable[[str, list[int]], str]) -> Iterator[str]:
        """Yield the bytes that each side of the senders holds and sends."""
        held, sent = self.bytes.held, self.bytes.sent
        first = len(held) - self.encoders
        yield ""
        yield f"{'the largest of':<14}{'holds':>14}{'sends':>14}"
        for name, ranks in (
            ("language", slice(0, first)),
            ("tower", slice(first, len(held))),
        ):
            last = len(held[ranks]) + ranks.start - 1
            of = f"{ranks.start} to {last}" if last > ranks.start else f"{last}"
            yield row(f"{name} {of}", [max(held[ranks]), max(sent[ranks])])
        yield ""


def make_layouts(config: RunConfig, ranks_per_machine: int) -> SyncLayouts:
    """Return the layouts of a recipe's trainer and engines.

    Raises:
        NothingToPlan: Its trainer or engines are stubs, it has no engines, or it sends adapters.
    """
    if config.trainer.backend == "stub":
        raise NothingToPlan("trainer.backend is stub, which has no weights")
    if not isinstance(config.generator, ModelGeneratorConfig):
        raise NothingToPlan(
            f"generator.backend is {config.generator.backend}, which has no weights"
        )
    if sends_additions(config):
        raise NothingToPlan(
            "trainer.lora sends only the adapters. Set sync.adapter=merged to plan whole weights"
        )
    return SyncLayouts(
        Path(config.model.path),
        msgspec.structs.replace(
            make_policy(config.sync), dtype=config.sync.wire_dtype or config.model.dtype
        ),
        sender_grid(config),
        _receivers(config),
        ranks_per_machine,
        round(config.sync.chunk_mib * MIB),
        trainer=find_trainer(config.trainer.backend),
        wire=find_wire(config.sync),
    )


def make_plan(layouts: SyncLayouts) -> tuple[TransferPlan, SyncPlanReport]:
    """Plan a sync only from the model's config, without weights, processes or a GPU.

    Raises:
        UnreadableModelConfig: The model cannot be read.
        UntrainableModel: The torch trainer's tensor ranks cannot divide the model.
        LayoutRefused: The layouts do not divide the model.
    """
    source, target = layouts.senders, layouts.receivers
    trainer = _find_trainer(source, layouts.trainer)
    everywhere = trainer is not None and trainer.gathers_everywhere
    tensors, sizes = model_tensors(
        layouts.model,
        layouts.policy,
        tensor_ranks=count_divided_ranks(source),
        holds_tower=not source.encoders,
        names=layouts.names,
    )
    if source.encoders and sizes.experts and not everywhere:
        want = "0 for a model with experts and the torch trainer"
        raise LayoutRefused("encoders", str(source.encoders), want).of("senders")
    heads = sizes.key_value_heads
    cuts_heads = layouts.trainer is not None and layouts.trainer.cuts_heads
    if cuts_heads and source.tensor > heads and source.tensor % heads == 0:
        want = f"at most the {heads} key-value heads: a plan knows no rows of part of a head"
        raise LayoutRefused("tensor", str(source.tensor), want).of("senders")
    machines = RankMachines.of_size(source.ranks, target.ranks, layouts.ranks_per_machine)
    started = time.process_time()
    both = place_tensors(tensors, sizes, source, target)
    if layouts.recorded is not None:
        both = _as_recorded(both, layouts.recorded, target.data)
    plan = plan_transfers(both, machines, max_piece_bytes=layouts.max_piece_bytes)
    seconds = time.process_time() - started
    found = account(plan)
    report = SyncPlanReport(
        model=layouts.model.stem if layouts.model.suffix == ".json" else layouts.model.name,
        tensors=len(tensors),
        senders=describe_grid(source),
        receivers=describe_grid(target),
        recorded=layouts.recorded is not None,
        encoders=source.encoder_ranks,
        ranks_per_machine=layouts.ranks_per_machine,
        bytes=found,
        pieces=len(plan.pieces),
        transfers=len(plan),
        seconds=seconds,
        digest=plan.digest,
        gathered=_count_gathered(
            found.model,
            sum(
                each.nbytes
                for each in plan.tensors
                if each.name.removesuffix(SCALE_SUFFIX) in sizes.tower
            ),
            source,
            everywhere=everywhere,
        ),
        stored=found.model * len(set(machines.receivers)),
        broadcast=found.model * target.ranks,
        apart=sum(found.moved.values()),
        gathered_everywhere=everywhere,
        wire=layouts.wire,
    )
    return plan, report


def _find_trainer(senders: ModelGrid, of_recipe: TrainerPlugin | None) -> TrainerPlugin | None:
    """Return the plug-in of a trainer with this layout of ranks, or None for the torch one."""
    if senders.shards > 1 or senders.own_plan:
        return None
    if of_recipe is None and senders.ranks_without_encoders > 1:  # the torch trainer would shard
        return next(iter(known_trainers().values()), None)
    return of_recipe


def with_recorded(layouts: SyncLayouts, recorded: EngineLayout) -> SyncLayouts:
    """Return layouts in which the same number of engines load like the recorded engine."""
    receivers = ModelGrid(tensor=len(recorded.ranks), data=layouts.receivers.data)
    return replace(layouts, receivers=receivers, recorded=recorded)


def _as_recorded(
    tensors: Sequence[PlacedTensor], recorded: EngineLayout, engines: int
) -> list[PlacedTensor]:
    """Return the tensors with the recorded placement, copied for each of ``engines`` engines.

    Raises:
        NothingToPlan: The recording is of a different model.
    """
    metas = [TensorMeta(each.name, each.shape, "") for each in tensors]
    known = set(recorded.tensors)
    for each in metas:
        if each.name not in known:
            raise NothingToPlan(f"the recorded engine loads a different model, without {each.name}")
    found, ranks = recorded.placement(metas), len(recorded.ranks)
    copies = {
        id(placement): Placement(
            tuple(
                (region, tuple(rank + ranks * at for at in range(engines) for rank in those))
                for region, those in placement.parts
            )
        )
        for placement in found.values()
    }
    return [replace(each, target=copies[id(found[each.name])]) for each in tensors]


def count_divided_ranks(senders: ModelGrid) -> int:
    """Return the torch trainer's tensor ranks, which divide a model by its own plan."""
    return senders.tensor if senders.own_plan else 1


def sender_grid(config: RunConfig) -> ModelGrid:
    """Return the parallel sizes of a recipe's trainer."""
    trainer = config.trainer
    if trainer.backend == "stub":
        return ModelGrid()
    encoder = find_encoder(trainer)
    encoders = 0 if encoder is None else encoder.data_parallel
    encoder_tensor = 1 if encoder is None else encoder.tensor_parallel
    if (plugin := find_trainer(trainer.backend)) is not None:
        grid = plugin.model_grid(config)
        return replace(grid, encoders=encoders, encoder_tensor=encoder_tensor)
    return ModelGrid(
        shards=trainer.data_parallel,
        tensor=trainer.tensor_parallel,
        own_plan=int(trainer.tensor_parallel > 1),
        encoders=encoders,
        encoder_tensor=encoder_tensor,
    )


def _count_gathered(model: int, tower: int, source: ModelGrid, *, everywhere: bool) -> int:
    """Return the bytes into trainer ranks until rank 0 has the whole model, including the tower."""
    if everywhere or not source.encoders:
        return model * (source.ranks - 1)
    # The ranks of a side gather it together. The first encoder rank sends the tower to rank 0.
    language = model - tower
    return language * (source.ranks_without_encoders - 1) + tower * source.encoder_ranks


def _receivers(config: RunConfig) -> ModelGrid:
    generator = config.generator
    if generator.backend != "vllm":
        return ModelGrid(data=generator.engines)
    from offbeat.plugins.vllm.section import VllmGeneratorConfig  # noqa: PLC0415 -- may be absent

    vllm = of_kind(VllmGeneratorConfig, generator).vllm
    is_padded = vllm.tensor_parallel > 1 and _VLLM_VOCABULARY % vllm.tensor_parallel == 0
    return ModelGrid(
        vocabulary_multiple=_VLLM_VOCABULARY // vllm.tensor_parallel if is_padded else 1,
        tensor=vllm.tensor_parallel,
        pipeline=vllm.pipeline_parallel,
        data=generator.engines,
        expert=vllm.tensor_parallel if vllm.expert_parallel else 1,
        expert_tensor=1 if vllm.expert_parallel else None,
    )
