"""Makes the side of a model that a torch rank of a grid holds: cut, and proved against the whole."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.media_rules import media_rules
from offbeat.plugins.encoder_ranks.exchange import prove_sides
from offbeat.plugins.encoder_ranks.layout import side_grid
from offbeat.plugins.encoder_ranks.sides import Inventory, inventory_of, no_features
from offbeat.plugins.encoder_ranks.tower_plan import plans_of
from offbeat.plugins.encoder_ranks.tower_proof import NOT_APART, example_features, prove_tower
from offbeat.plugins.encoder_ranks.weights import GridWeights, side_mesh
from offbeat.plugins.tensor_ranks.tensor_proof import copies_gap
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.sides import Side, keep_side
from offbeat.trainers.torch.forward import packed_logprobs
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.proof import RowProof, Witness, prove_sharding
from offbeat.trainers.torch.sharding import Weights, class_name, settle

_SHAPE: Final = msgspec.msgpack.Decoder(tuple[int, int, int])


class GridLoader(ModelLoader):
    """Makes the side of a model that a rank holds: its language model, or its vision tower.

    Every rank makes the shell of the whole model, so that the layout of rows, identity and names are
    the same as on a rank which holds both; then it drops the side that it does not hold. Making one raises
    ``UntrainableModel`` as ``ModelLoader`` does, and for a model without a tower that can be held
    apart, or whose tower computes other features than in the whole model.
    """

    def __init__(self, path: Path, trainer: TorchTrainerConfig, *given: Any, **named: Any) -> None:  # noqa: ANN401 -- of ``ModelLoader``
        super().__init__(path, trainer, *given, **named)
        self._grid = side_grid(trainer)
        self.side = self._grid.side_of(self.peers.rank)
        self.mesh = self.axes = side_mesh(trainer.device, self._grid, self.peers.timeout_s)
        self._inventory: Inventory | None = None  # of the model that is trained

    @property
    def inventory(self) -> Inventory:
        """Return the tensors of the whole model that is trained."""
        assert self._inventory is not None  # noqa: S101 -- known once the model is cut
        return self._inventory

    def prove(self, whole: PreTrainedModel | None) -> tuple[RowProof, Witness]:
        proved = super().prove(whole)
        self._example_features = self._features_of_example(whole)
        return proved

    def _features_of_example(self, whole: PreTrainedModel | None) -> Tensor:
        """Return [blocks, F, H]: what the whole model makes of an example, on all ranks."""

        def compute() -> Tensor | None:
            if whole is None:
                return None
            rules = media_rules(whole.config)
            if not rules.reads_media:
                inventory_of(whole)  # refuses it
            return example_features(whole, rules)

        made = run_on_all_ranks(self.peers, "the proof of the tower", compute)
        shape = (0, 0, 0) if made is None else (made.shape[0], made.shape[1], made.shape[2])
        shape = self.peers.broadcast(shape, _SHAPE)
        if made is None:
            made = torch.empty(shape, dtype=self.dtype, device=self.trainer.device)
        made = made.to(self.dtype).contiguous()
        dist.broadcast(made, src=0)
        return made

    def cut(self, model: PreTrainedModel) -> Weights:
        # The reference is a copy of the model that is trained, and has its names
        inventory = self._inventory = self._inventory or inventory_of(model)
        plans = plans_of(model, self._grid)  # of both sides: all ranks refuse a model together
        keep_side(model, self.side)
        held = self.cut_over(self.mesh, model, plans[self.side])
        if self.side is Side.TOWER:
            register_fsdp_forward_method(model, "get_image_features")
        return GridWeights(inventory, held, self._grid, self.peers.rank)

    def prove_shards(self, model: PreTrainedModel, witness: Witness) -> None:
        prove = self._prove_tower if self.side is Side.TOWER else self._prove_language
        prove_sides(self.peers, class_name(model), lambda: prove(model, witness))
        settle(model)

    def _prove_language(self, model: PreTrainedModel, witness: Witness) -> tuple[float, str]:
        prove_sharding(model, witness, self.dtype, no_features)
        settle(model)
        if self.mesh.tensor is None:
            return NOT_APART
        packed = witness.packed(model)
        made = packed_logprobs(model, packed, 1.0, self.dtype, features_of=no_features)
        return copies_gap(model, made.sum(), self.mesh)

    def _prove_tower(self, model: PreTrainedModel, _: Witness) -> tuple[float, str]:
        rules = media_rules(model.config)
        return prove_tower(model, rules, self._example_features, self.dtype, self.mesh)
