"""Trainer of an encoder rank: the vision tower, sharded over encoder ranks by FSDP2."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from offbeat.config.limits import encoder_tokens
from offbeat.models.loading import model_without_memory
from offbeat.plugins.encoder_ranks.bridge import shared_values
from offbeat.plugins.encoder_ranks.encoding import EncodingTrainer
from offbeat.plugins.encoder_ranks.exchange import prove_sides
from offbeat.plugins.encoder_ranks.megatron.optimizer import TowerOptimizer
from offbeat.plugins.encoder_ranks.tower_plan import tower_plan
from offbeat.plugins.encoder_ranks.tower_proof import example_features, prove_tower
from offbeat.plugins.encoder_ranks.weights import side_mesh
from offbeat.plugins.megatron.architecture import Architecture, read_architecture
from offbeat.plugins.megatron.boxed_trainer import BoxedTrainer
from offbeat.plugins.megatron.freezing import freeze_weights, frozen_weights
from offbeat.plugins.megatron.groups import start_groups
from offbeat.plugins.megatron.hf_files import load_boxes
from offbeat.plugins.megatron.mapping import TOWER, TensorBox
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.plugins.megatron.tower import unfilled_tower
from offbeat.plugins.tensor_ranks.tensor_parallel import divide
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.model_trainer import LossOf, RankOptions
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.torch.sharding import ShardedWeights, local_region, own
from offbeat.trainers.weights import shared_digest
from offbeat.transfer_queue.schema import POLICY_LOGPROBS
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.region import Region

T = TypeVar("T")


def architecture_with_tower(path: str | Path) -> Architecture:
    """Return the architecture of a model whose tower can be held apart.

    Raises:
        UntrainableModel: It has no tower, or the trainer has no mapping for it.
    """
    architecture = read_architecture(path)
    if not architecture.media_rules.reads_media:
        problem = "reads no media, so that it has no tower to encode them"
        raise UntrainableModel(architecture.name, problem, "Leave trainer.encoder out")
    return architecture


class _Tower(NamedTuple):
    """A sharded tower, and this rank's part of each of its parameters, in the memory it computes with."""

    model: PreTrainedModel
    shards: dict[str, Tensor]
    boxes: list[TensorBox]


class MegatronEncoderTrainer(EncodingTrainer, BoxedTrainer):
    """Trainer of one rank of the vision tower, for the groups of its lanes."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: MegatronTrainerConfig,
        **options: Unpack[RankOptions],
    ) -> None:
        """Load this rank's share of the tower; the arguments are those of ``MegatronTrainer``.

        All ranks of the world make their trainers together.

        Raises:
            UntrainableModel: The model has no tower, this kind has no mapping here, or not all that
                ``trainer.freeze`` matches is of the tower.
            WeightsMismatch: The files are not those of their config's model.
            UnsupportedLayout: The world cannot be partitioned like this.
        """
        super().__init__(model_path, trainer.optimizer, **options)
        self._config = trainer
        self.architecture = architecture_with_tower(model_path)
        self.frozen = frozen_weights(model_path, trainer.freeze)
        self._trains_tower = not self.frozen.is_whole_tower
        self._max_tokens = encoder_tokens(trainer)
        self._join_grid(trainer)
        grid = self._grid
        # Meanwhile the first rank checks the files.
        self._plan = run_on_all_ranks(
            self.peers, "its start", lambda: self._planned(grid.encoder_tensor)
        )
        # First, whatever groups the layout has: torch keeps what it knows of shards by the ranks of
        # their mesh alone, and finds the mesh of an earlier world in this process by its group's number.
        self._mesh = side_mesh(trainer.device, grid, self.peers.timeout_s)
        start_groups(trainer, self.peers)
        self._tower = self._build(trained=True)
        self._meet(self._tower.boxes)
        if grid.encoder_tensor > 1:
            prove_sides(self.peers, self.architecture.name, self._proved)
        self.optimizer = self._optimizer_state = TowerOptimizer(
            self._tower.model,
            self._tower.shards,
            trainer.optimizer,
            self._dtype,
            self.peers,
            self._mesh,
        )
        self.initial_digest = self.current_digest()

    # --- passes ------------------------------------------------------------------------------------

    def _top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        super()._top_logprobs(prompts, count)
        return self._of_last_stage(None)

    def _model_of(self, name: str) -> PreTrainedModel:
        return self._tower.model if name == POLICY_LOGPROBS else self._reference.model

    @cached_property
    def _reference(self) -> _Tower:
        tower = self._build(trained=False)
        named = self.gathering.all_tensors(self._weights_in(tower.shards))
        self._check_initial(shared_digest(named, self.peers))
        return tower

    def _prepared_on_all_ranks(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        return run_on_all_ranks(self.peers, during, read)

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        del count, microbatches, temperature
        _never(name)

    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        del microbatches, loss_of, temperature
        _never("a loss")

    def _begin_gradients(self) -> None:
        self.optimizer.drop_gradients()

    def _discard_gradients(self) -> None:
        self.optimizer.drop_gradients()

    def _apply(self, denominator: float, rate: float) -> UpdateResult:
        return self.optimizer.step(denominator, rate)

    # --- weights -----------------------------------------------------------------------------------

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """Return this rank's share of the weights: trained ones of 16 bits as copies of their masters."""
        return self._weights_in(self._tower.shards)

    def held_regions(self) -> list[TensorRegion]:
        return self._regions_in(self._tower.shards)

    def _weights_in(self, shards: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.to(self._dtype) for name, each in shards.items()}

    def _read_files(self) -> None:
        self._fill(self._tower)

    def _proved(self) -> tuple[float, str]:
        """Prove the divided tower against the whole one, which the first rank of each encoder reads."""
        tensor = self._mesh.tensor
        assert tensor is not None  # noqa: S101 -- else there is nothing to prove
        whole = unfilled_tower(self.model_path, self._dtype) if self._is_sender else None
        if whole is not None:
            parameters = dict(whole.named_parameters())
            regions = {name: Region.whole(tuple(each.shape)) for name, each in parameters.items()}
            boxes = [
                TensorBox(name, each.shape, each, name, each) for name, each in regions.items()
            ]
            load_boxes(parameters, boxes, self.model_path, self._file_names)
        made = None if whole is None else example_features(whole, self.media_rules)
        sender, group = self._grid.sender_of(self.peers.rank), tensor.get_group()
        want = shared_values(made, sender, group, self._device)
        return prove_tower(self._tower.model, self.media_rules, want, self._dtype, self._mesh)

    @torch.no_grad()
    def _fill(self, tower: _Tower) -> None:
        """Fill shards from the files, rounded to the weights' dtype as on every other rank."""
        read = self._weights_in(tower.shards)
        load_boxes(read, tower.boxes, self.model_path, self._file_names)
        for name, each in tower.shards.items():
            each.copy_(read[name])

    def _planned(self, ranks: int) -> dict[str, str]:
        """Return how so many ranks divide the matrices of the tower."""
        if ranks == 1:
            return {}
        return tower_plan(model_without_memory(self.model_path, trust_remote_code=False), ranks)

    def _build(self, *, trained: bool) -> _Tower:
        model = unfilled_tower(self.model_path, self._dtype).requires_grad_(trained)
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


def _never(what: str) -> NoReturn:
    raise AssertionError(f"an encoder rank was asked for {what}, and its lanes compute it")
