"""Builds the trainer and the weight source of a rank, for all backends."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
from torch import Tensor

from offbeat.config.limits import schedule_in_steps
from offbeat.config.sections.generator import PluginGeneratorConfig
from offbeat.config.sections.trainer_base import ModelTrainerConfig
from offbeat.trainers.expert_names import ExpertNames, Meta, Named
from offbeat.trainers.losses import load_losses
from offbeat.trainers.model_trainer import RankOptions
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks
from offbeat.trainers.receiver_names import names_for_files, names_for_module
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.buckets import BucketPlan, BucketRoute, NamedRegion, plan_buckets
from offbeat.weight_sync.chunks import GatheredSource, WeightChunk, pack, walk
from offbeat.weight_sync.engine_layout import EngineLayout
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.transport import BucketRoom, PackedBucket
from offbeat.weight_sync.wire_format import make_policy, wire_held, wire_metas, wire_regions


class HeldShards:
    """Packs this rank's regions of a sharded model, without gathering whole tensors."""

    manifest: Manifest
    routes: tuple[BucketRoute, ...]

    def __init__(
        self,
        plan: BucketPlan,
        rank: int,
        held: Callable[[], Iterable[TensorRegion]],
        plan_for: Callable[[EngineLayout], BucketPlan] | None = None,
    ) -> None:
        """Create the source.

        Args:
            plan: Plan of the releases, until ``follow`` makes a new plan.
            rank: This rank.
            held: Returns this rank's regions, in memory that training updates.
            plan_for: Returns the plan for a layout of engines, which must be the same on every
                rank. If this is None, ``plan`` is kept for every layout.
        """
        self._rank, self._held, self._plan_for = rank, held, plan_for
        self._adopt(plan)

    def follow(self, layout: EngineLayout) -> None:
        """Plan the following releases for the needs of engine ranks with this layout."""
        if self._plan_for is not None:
            self._adopt(self._plan_for(layout))

    def _adopt(self, plan: BucketPlan) -> None:
        self.manifest, self.routes = plan.manifest, plan.routes
        mine = set(plan.held_by(self._rank))
        self._chunks = [each for each in walk(plan.manifest) if each.index in mine]
        self._pieces = dict[int, list[tuple[str, Region]]]()
        for piece in plan.manifest.pieces:
            if piece.chunk in mine:
                name = plan.manifest.tensors[piece.tensor].name
                self._pieces.setdefault(piece.chunk, []).append((name, piece.region))

    def pack_buckets(self, room: BucketRoom) -> Iterator[PackedBucket]:
        held = dict[str, list[TensorRegion]]()
        for each in self._held():
            held.setdefault(each.name, []).append(each)
        for chunk in self._chunks:
            views = self._views(chunk, held)
            into = room(chunk.index, chunk.nbytes)
            digest = pack(chunk, dict(zip(chunk.names, views, strict=True)), into)
            yield PackedBucket(chunk.index, into, digest)

    def _views(self, chunk: WeightChunk, held: dict[str, list[TensorRegion]]) -> list[Tensor]:
        return [
            next(
                each.values[region.within(each.region)]
                for each in held[name]
                if each.region.contains(region)
            )
            for name, region in self._pieces[chunk.index]
        ]


_REGIONS: Final = msgspec.msgpack.Decoder(list[NamedRegion])
Section = TypeVar("Section", bound=ModelTrainerConfig)


def in_steps(spec: TrainerSpec, trainer: Section) -> Section:
    """Return the section with all lengths of its learning-rate schedule converted to steps."""
    optimizer = schedule_in_steps(spec.config, trainer.optimizer)
    return trainer.model_copy(update={"optimizer": optimizer})


def rank_options(spec: TrainerSpec, peers: Peers) -> RankOptions:
    """Return the arguments of a rank's trainer that all backends share.

    Raises:
        LossRefused: The user's loss cannot be loaded, or lacks a property that training needs.
        InputChanged: The loss's source has changed since the run began.
    """
    config = spec.config
    return RankOptions(
        model=config.model,
        total_steps=config.steps,
        seed=config.seed,
        peers=peers,
        losses=load_losses(spec),
    )


def build_source(
    spec: TrainerSpec, metas: Iterable[Meta], named: Callable[[], Iterator[Named]]
) -> GatheredSource:
    """Build the weight source of one rank. It uses the weight names that the run's engines load.

    Args:
        spec: The rank's spec.
        metas: Name, shape and dtype of every weight, in the order of ``named``.
        named: Iterates over the whole weights, on all ranks together.

    Raises:
        UntrainableModel: The engines need names that no known naming yields.
        OffbeatError: Weights cannot be converted to the engines' formats.
    """
    sync, weight_metas = spec.config.sync, list(metas)
    names = _find_names(spec, weight_metas)
    return GatheredSource(
        names.metas(weight_metas),
        lambda: names.named(named()),
        int(sync.chunk_mib * 2**20),
        make_policy(sync),
    )


def build_shards(
    spec: TrainerSpec,
    metas: Iterable[Meta],
    held: Callable[[], list[TensorRegion]],
    peers: Peers,
) -> HeldShards | None:
    """Build the weight source of a rank that sends its own shards. Return None if rank 0 sends all.

    All ranks must call it together. They exchange names and regions of their shards, and each makes
    the same plan from them. They make another plan once the layout of the engines is known.

    Args:
        spec: The rank's spec.
        metas: Name, shape and dtype of every weight.
        held: Returns this rank's regions, in the memory that training updates.
        peers: The ranks.

    Raises:
        UntrainableModel: The engines need names that no known naming yields.
        WeightsNotCovered: The ranks together do not hold a tensor completely.
        OffbeatError: Weights cannot be converted to the engines' formats, or a rank holds only a
            part of something that is converted as a whole.
    """
    sync = spec.config.sync
    if not sync.sends_regions(peers.size):
        return None
    weight_metas, policy = list(metas), make_policy(sync)
    names = _find_names(spec, weight_metas)
    shapes = {name: shape for name, shape, _ in weight_metas}
    renamed_metas = list(names.metas(weight_metas))
    wire_shapes = {name: shape for name, shape, _ in renamed_metas}

    def rename_regions() -> Iterator[TensorRegion]:
        return names.regions(held(), shapes)

    def convert_regions() -> Iterator[TensorRegion]:
        return wire_regions(rename_regions(), wire_shapes, policy)

    def regions() -> list[NamedRegion]:
        return wire_held(
            ((each.name, each.region) for each in rename_regions()), wire_shapes, policy
        )

    mine = run_on_all_ranks(peers, "regions of a weight sync", regions)
    world = peers.all_gather(mine, _REGIONS)
    tensors, bucket_bytes = list(wire_metas(renamed_metas, policy)), int(sync.chunk_mib * 2**20)

    def plan_for(layout: EngineLayout) -> BucketPlan:
        return plan_buckets(tensors, world, bucket_bytes, layout.placement(tensors))

    return HeldShards(
        plan_buckets(tensors, world, bucket_bytes), peers.rank, convert_regions, plan_for
    )


def _find_names(spec: TrainerSpec, metas: Sequence[Meta]) -> ExpertNames:
    """Return the naming that the run's engines load."""
    config = spec.config
    engines = config.generator
    if isinstance(engines, PluginGeneratorConfig) and engines.loads_file_names:
        return names_for_files(config.model.path, metas, engines.engine_name)
    remote_code = config.model.trust_remote_code
    return names_for_module(config.model.path, metas, remote_code=remote_code)
