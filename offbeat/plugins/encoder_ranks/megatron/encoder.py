"""Trainer of an encoder rank: the vision tower, sharded over encoder ranks by FSDP2.

The optimizer of the sharded tower keeps its state in the form of the language ranks' optimizer.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar, Unpack

import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from offbeat.config.limits import encoder_tokens
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.bridge import Exchange, prove_sides, share_values
from offbeat.plugins.encoder_ranks.encoding import EncoderPasses
from offbeat.plugins.encoder_ranks.loading import side_mesh
from offbeat.plugins.encoder_ranks.tower_plan import tower_plan
from offbeat.plugins.encoder_ranks.tower_proof import example_features, prove_tower
from offbeat.plugins.megatron.architecture import Architecture, read_architecture
from offbeat.plugins.megatron.boxed_state import BoxedState, file_names
from offbeat.plugins.megatron.freezing import freeze_weights, frozen_weights
from offbeat.plugins.megatron.gathering import TensorGather
from offbeat.plugins.megatron.groups import start_groups
from offbeat.plugins.megatron.hf_files import load_boxes
from offbeat.plugins.megatron.mapping import TOWER, TensorBox
from offbeat.plugins.megatron.optimizer import MASTER, MOMENTS, RankState
from offbeat.plugins.megatron.passes import share_top_logprobs
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.plugins.megatron.tower import make_unfilled_tower
from offbeat.plugins.tensor_ranks.tensor_parallel import divide
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.model_trainer import ModelTrainer, RankOptions
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.parts import RankFacts, shared_digest
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks
from offbeat.trainers.torch.optimizer import Optimizer
from offbeat.trainers.torch.sharding import RankMesh, ShardedWeights, local_region, own
from offbeat.transfer_queue.schema import POLICY_LOGPROBS
from offbeat.weight_sync.region import Region


class TowerOptimizer(RankState):
    """AdamW of this rank's trained shards of a tower.

    All ranks of the world must make the same calls. It updates the shards in every step, even
    without pictures, like megatron-core's optimizer on ranks that hold both sides. So all weights
    have the same number of updates, even on a rank without trained weights.
    """

    def __init__(
        self,
        tower: PreTrainedModel,
        shards: Mapping[str, Tensor],
        config: OptimizerConfig,
        dtype: torch.dtype,
        peers: Peers,
        mesh: RankMesh | None = None,
    ) -> None:
        """Create the optimizer without moments.

        Args:
            tower: Sharded tower. Frozen parameters are not in the state.
            shards: This rank's part of each parameter, in the memory that is updated.
            config: Rates and bounds.
            dtype: Dtype of the weights in passes. Shards of 16-bit weights are masters.
            peers: All ranks of the world. The gradient norm is computed over them.
            mesh: Axes over which the tower is sharded, or None for only data.
        """
        self._tower, self._optimizer = tower, Optimizer(tower, config, peers, mesh)
        names = [f"{TOWER}{name}" for name in self._optimizer.names]
        self._shards = {name: shards[name] for name in names}
        super().__init__(dtype)

    def step(self, denominator: float, learning_rate: float) -> UpdateResult:
        """Divide the summed gradients, clip them by both sides' norm and update the weights."""
        for each in self._tower.parameters():
            if each.requires_grad and each.grad is None:
                each.grad = torch.zeros_like(each)
        result = self._optimizer.step(denominator, learning_rate)
        self.steps += result.applied
        return result

    def begin(self) -> None:
        """Prepare for the first microbatch of an update, without gradients."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Discard the accumulated gradients. Keep weights and moments."""
        self._optimizer.drop_gradients()

    # --- the state ---------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        kinds = self._moments()
        if self._has_masters:
            kinds[MASTER] = dict(self._shards)
        return kinds

    @torch.no_grad()
    def load(self, kinds: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        names = self._optimizer.names if steps else ()
        self._optimizer.make_room({f"{kind}/{name}" for kind in MOMENTS for name in names})
        for kind, moments in self._moments().items():
            for name, each in moments.items():
                each.copy_(kinds[kind][name])
        if self._has_masters:
            for name, each in self._shards.items():
                each.copy_(kinds[MASTER][name])
        self._optimizer.resume_filled(torch.full((len(self._optimizer.names),), float(steps)))
        self.steps = steps

    def reset(self) -> None:
        self._optimizer.reset()
        self.steps = 0

    def like(self, name: str) -> Tensor:
        return torch.zeros_like(self._shards[name])

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Return AdamW's moments by kind and local parameter name, or an empty dict."""
        kinds = dict[str, dict[str, Tensor]]()
        for key, each in self._optimizer.moments().items():
            kind, _, name = key.partition("/")
            kinds.setdefault(kind, {})[f"{TOWER}{name}"] = own(each)
        return kinds


T = TypeVar("T")


def architecture_with_tower(path: str | Path) -> Architecture:
    """Return the architecture of a model with a separable tower.

    Raises:
        UntrainableModel: The model has no tower, or the trainer has no mapping for it.
    """
    architecture = read_architecture(path)
    if not architecture.media_rules.reads_media:
        problem = "reads no media, so that it has no tower to encode them"
        raise UntrainableModel(architecture.name, problem, "Leave trainer.encoder out")
    return architecture


class _Tower(NamedTuple):
    """Sharded tower with this rank's part of each parameter, in the memory used by passes."""

    model: PreTrainedModel
    shards: dict[str, Tensor]
    boxes: list[TensorBox]


class TowerPart:
    """Tower of an encoder rank, as its passes load it."""

    def __init__(
        self, facts: RankFacts, peers: Peers, tower: _Tower, load_reference: Callable[[], _Tower]
    ) -> None:
        self.facts, self._peers, self._own = facts, peers, tower
        self._load_reference = load_reference

    def begin_update(self) -> None:
        """Do nothing, because no pass draws random numbers."""

    def undo(self) -> None:
        """Do nothing, because passes change only gradients."""

    def agree(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        """Return the result of ``read`` after all ranks have read their own."""
        return run_on_all_ranks(self._peers, during, read)

    def load(self, column: str, teacher: str | None) -> PreTrainedModel:
        """Return the trained tower, or the reference's tower."""
        del teacher
        return self._own.model if column == POLICY_LOGPROBS else self.reference.model

    @cached_property
    def reference(self) -> _Tower:
        """Return the frozen tower. All ranks must load it together at the first call."""
        return self._load_reference()


@dataclass(eq=False, kw_only=True)
class TowerState(BoxedState):
    """State of a rank in which the shards of 16-bit weights are the masters."""

    tower: _Tower
    fill: Callable[[], None]  # fills the tower's shards from the model's files

    def _held(self) -> dict[str, Tensor]:
        return self.tower.shards

    def _read_files(self) -> None:
        self.fill()


class MegatronEncoderTrainer(ModelTrainer):
    """Trainer of one rank of the vision tower, for the groups of its lanes."""

    passes_kind: type[EncoderPasses] = EncoderPasses

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: MegatronTrainerConfig,
        **options: Unpack[RankOptions],
    ) -> None:
        """Load this rank's share of the tower. Arguments are the same as in ``MegatronTrainer``.

        All ranks of the world must create their trainers together.

        Raises:
            UntrainableModel: The model has no tower, this kind has no mapping here, or
                ``trainer.freeze`` also matches parameters outside the tower.
            WeightsMismatch: The files do not match their config's model.
            UnsupportedLayout: The world cannot be partitioned like this.
        """
        super().__init__(model_path, trainer.optimizer, **options)
        self._config = trainer
        self.architecture = architecture_with_tower(model_path)
        self.frozen = frozen_weights(model_path, trainer.freeze)
        self._exchange = Exchange(trainer, self.peers, lambda: self.steps_applied + 1)
        self._grid = grid = self._exchange.grid
        # At the same time, the first rank checks the files.
        self._plan = run_on_all_ranks(
            self.peers, "its start", lambda: self._plan_division(grid.encoder_tensor)
        )
        # Create it before any other group of the layout. torch caches data of shards only by the
        # ranks of their mesh. It finds the mesh of an earlier world in this process by its group's
        # number.
        self._mesh = side_mesh(trainer.device, grid, self.peers.timeout_s)
        start_groups(trainer, self.peers)
        self._file_names = file_names(self.model_path, self.architecture)
        self._tower = self._build(trained=True)
        self.gathering = TensorGather(self._tower.boxes, self.peers)
        if grid.encoder_tensor > 1:
            prove_sides(self.peers, self.architecture.name, self._prove)
        self.updates = self.optimizer = TowerOptimizer(
            self._tower.model,
            self._tower.shards,
            trainer.optimizer,
            self._dtype,
            self.peers,
            self._mesh,
        )
        self.model_state = TowerState(
            self.model_path,
            self._dtype,
            self.peers,
            self.architecture,
            self.frozen,
            self.gathering,
            self.optimizer,
            lambda: self._weights_in(self._tower.shards),
            tower=self._tower,
            fill=lambda: self._fill(self._tower),
        )
        self.passes = self._make_passes()
        self.initial_digest = self.current_digest()

    def _make_passes(self) -> EncoderPasses:
        a = self.architecture
        facts = RankFacts(
            self._device,
            a.vocabulary,
            a.media_rules,
            replica=self.peers.rank,
            leads_replica=False,
            expert_load=None,
        )
        return self.passes_kind(
            TowerPart(facts, self.peers, self._tower, self._load_reference),
            self._exchange,
            self._mesh,
            encoder_tokens(self._config),
            trained=not self.frozen.is_whole_tower,
            answer=lambda: share_top_logprobs(None, self.peers),
        )

    def _load_reference(self) -> _Tower:
        tower = self._build(trained=False)
        named = self.gathering.all_tensors(self._weights_in(tower.shards))
        self._check_initial(shared_digest(named, self.peers))
        return tower

    # --- weights -----------------------------------------------------------------------------------

    def _weights_in(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.to(self._dtype) for name, each in shards.items()}

    def _prove(self) -> tuple[float, str]:
        """Prove the divided tower against the whole one, read by each encoder's first rank."""
        tensor = self._mesh.tensor
        assert tensor is not None  # noqa: S101 -- otherwise nothing needs a proof
        whole = (
            make_unfilled_tower(self.model_path, self._dtype)
            if self.peers.rank == self._grid.find_sender(self.peers.rank)
            else None
        )
        if whole is not None:
            parameters = dict(whole.named_parameters())
            regions = {name: Region.whole(tuple(each.shape)) for name, each in parameters.items()}
            boxes = [
                TensorBox(name, each.shape, each, name, each) for name, each in regions.items()
            ]
            load_boxes(parameters, boxes, self.model_path, self._file_names)
        made = None if whole is None else example_features(whole, self.architecture.media_rules)
        sender, group = self._grid.find_sender(self.peers.rank), tensor.get_group()
        want = share_values(made, sender, group, self._device)
        return prove_tower(
            self._tower.model, self.architecture.media_rules, want, self._dtype, self._mesh
        )

    @torch.no_grad()
    def _fill(self, tower: _Tower) -> None:
        """Fill shards from the files, rounded to the weights' dtype like on every other rank."""
        read = self._weights_in(tower.shards)
        load_boxes(read, tower.boxes, self.model_path, self._file_names)
        for name, each in tower.shards.items():
            each.copy_(read[name])

    def _plan_division(self, ranks: int) -> dict[str, str]:
        """Return the division of the tower's matrices over ``ranks`` ranks."""
        if ranks == 1:
            return {}
        return tower_plan(model_without_memory(self.model_path, trust_remote_code=False), ranks)

    def _build(self, *, trained: bool) -> _Tower:
        model = make_unfilled_tower(self.model_path, self._dtype).requires_grad_(trained)
        freeze_weights(model, self.frozen.names)

        held = ShardedWeights(
            model, self._mesh.data, divide=lambda cut: divide(cut, self._mesh.tensor, self._plan)
        ).local_tensors()
        register_fsdp_forward_method(model, "get_image_features")
        boxes = [
            TensorBox(name, tuple(each.shape), region, f"{TOWER}{name}", Region.whole(region.shape))
            for name, each in held.items()
            if (region := local_region(each)).elements
        ]
        shards = {f"{TOWER}{name}": own(each) for name, each in held.items()}
        tower = _Tower(model, shards, boxes)
        self._fill(tower)
        return tower

    # --- the side ----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return torch.device(self._config.device)
