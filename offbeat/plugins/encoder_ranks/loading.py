"""Loads the side of a model that a torch rank of a grid holds: cut, and proved against the whole.

Also gives access to the weights of a model if each rank holds a part of only one side.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Iterator, Mapping
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
from offbeat.plugins.encoder_ranks.bridge import prove_sides
from offbeat.plugins.encoder_ranks.layout import Grid, side_grid
from offbeat.plugins.encoder_ranks.sides import Inventory, make_inventory, no_features
from offbeat.plugins.encoder_ranks.tower_plan import make_plans
from offbeat.plugins.encoder_ranks.tower_proof import NOT_APART, example_features, prove_tower
from offbeat.plugins.tensor_ranks.tensor_proof import copies_gap
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.sides import Side, keep_side
from offbeat.trainers.torch.forward import compute_packed_logprobs
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.proof import RowProof, Witness, prove_sharding
from offbeat.trainers.torch.sharding import RankMesh, Weights, class_name, mesh_of_side, own, settle

_FIRST: Final = 0


def side_mesh(device: str, grid: Grid, timeout_s: float) -> RankMesh:
    """Return the axes of the ranks that hold this rank's side. All ranks must call it together.

    ``timeout_s``: timeout of a side's collectives. torch's own default, half an hour, ignores the
    world's timeout.
    """
    sides = [(grid.list_ranks(each), grid.count_tensor_ranks(each)) for each in Side]
    return mesh_of_side(device, sides, timeout_s)


class GridWeights(Weights):
    """All weights of a model under their Hugging Face names, in its order, seen from one rank."""

    def __init__(self, inventory: Inventory, held: Weights, grid: Grid, rank: int) -> None:
        """``held``: the weights of this rank's side."""
        self._inventory, self._held, self._grid, self._rank = inventory, held, grid, rank

    def iterate(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights on rank 0. On other ranks, the other side's weights have no memory.

        All ranks must iterate together and to the end.
        """
        side, speaker = self._grid.find_side(self._rank), self._grid.list_ranks(Side.TOWER)[0]
        mine, parts = self._held.iterate(), self.local_tensors().values()
        device = own(next(iter(parts))).device
        for each in self._inventory.weights:
            if each.side is side:
                _, whole = next(mine)
            else:
                place = device if self._rank == _FIRST else torch.device("meta")
                whole = torch.empty(each.shape, dtype=each.dtype, device=place)
            if each.side is Side.TOWER and self._rank == speaker:
                dist.send(whole.contiguous(), _FIRST)
            elif each.side is Side.TOWER and self._rank == _FIRST:
                dist.recv(whole, speaker)
            yield each.name, whole
        for _ in mine:  # free the last gathered weight
            pass

    def local_tensors(self) -> dict[str, Tensor]:
        """Return this rank's part of each weight of its side."""
        return self._held.local_tensors()

    def metas(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Yield name, whole shape and dtype of each weight of the model."""
        for each in self._inventory.weights:
            yield each.name, each.shape, str(each.dtype).removeprefix("torch.")

    def buffers(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        for each in self._inventory.buffers:
            yield each.name, each.shape, each.dtype

    def fill(self, values: Mapping[str, Tensor]) -> None:
        """Copy whole weights into this rank's parts."""
        self._held.fill(values)


_SHAPE: Final = msgspec.msgpack.Decoder(tuple[int, int, int])


class GridLoader(ModelLoader):
    """Loads the side of a model that a rank holds: its language model, or its vision tower.

    Every rank creates the shell of the whole model, so that layout of rows, identity and names are
    the same as on a rank with both sides. Then it drops the other side. The constructor raises
    ``UntrainableModel`` as ``ModelLoader`` does. It also raises if the model has no separable
    tower, or if the tower computes different features than in the whole model.
    """

    def __init__(self, path: Path, trainer: TorchTrainerConfig, *given: Any, **named: Any) -> None:  # noqa: ANN401 -- of ``ModelLoader``
        super().__init__(path, trainer, *given, **named)
        self._grid = side_grid(trainer)
        self.side = self._grid.find_side(self.peers.rank)
        self.mesh = self.axes = side_mesh(trainer.device, self._grid, self.peers.timeout_s)
        self._inventory: Inventory | None = None  # of the trained model

    @property
    def inventory(self) -> Inventory:
        """Return the tensors of the whole trained model."""
        assert self._inventory is not None  # noqa: S101 -- known once the model is cut
        return self._inventory

    def prove(self, whole: PreTrainedModel | None) -> tuple[RowProof, Witness]:
        proved = super().prove(whole)
        self._example_features = self._features_of_example(whole)
        return proved

    def _features_of_example(self, whole: PreTrainedModel | None) -> Tensor:
        """Return the whole model's features [blocks, F, H] of an example on all ranks."""

        def compute() -> Tensor | None:
            if whole is None:
                return None
            rules = media_rules(whole.config)
            if not rules.reads_media:
                make_inventory(whole)  # refuses it
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
        # The reference is a copy of the trained model with the same names
        inventory = self._inventory = self._inventory or make_inventory(model)
        plans = make_plans(model, self._grid)  # of both sides, so that all ranks refuse together
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
        packed = witness.pack_witness(model)
        made = compute_packed_logprobs(model, packed, 1.0, self.dtype, features_of=no_features)
        return copies_gap(model, made.sum(), self.mesh)

    def _prove_tower(self, model: PreTrainedModel, _: Witness) -> tuple[float, str]:
        rules = media_rules(model.config)
        return prove_tower(model, rules, self._example_features, self.dtype, self.mesh)
