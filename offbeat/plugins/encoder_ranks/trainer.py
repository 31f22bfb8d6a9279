"""Base of the trainers of both sides of a grid: the cut, its proof, weights and state."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from typing import Final

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from offbeat.config.limits import encoder_tokens
from offbeat.models.media_rules import media_rules
from offbeat.plugins.encoder_ranks.exchange import ExchangingTrainer
from offbeat.plugins.encoder_ranks.sides import Inventory, inventory_of, no_features
from offbeat.plugins.encoder_ranks.tower_plan import plans_of
from offbeat.plugins.encoder_ranks.tower_proof import NOT_APART, example_features, prove_tower
from offbeat.plugins.encoder_ranks.weights import GridWeights, side_mesh
from offbeat.plugins.tensor_ranks.tensor_proof import copies_gap
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.sides import Side, keep_side
from offbeat.trainers.torch.forward import packed_logprobs
from offbeat.trainers.torch.optimizer import STEPS
from offbeat.trainers.torch.proof import RowProof, Witness, prove_sharding
from offbeat.trainers.torch.sharding import Weights, class_name, settle
from offbeat.trainers.torch.split_step import TorchTrainer

_SHAPE: Final = msgspec.msgpack.Decoder(tuple[int, int, int])


class GridTrainer(ExchangingTrainer, TorchTrainer):
    """Trainer of one rank of a world whose ranks hold either the language model or the vision tower.

    Every rank makes the shell of the whole model, so that the layout of rows, identity and names are
    those of ranks which hold both; then it drops the side that it does not hold. Making one raises
    ``UntrainableModel`` as ``TorchTrainer`` does, and for a model without a tower that can be held
    apart, or whose tower computes other features than in the whole model.
    """

    def _prepare(self) -> None:
        trainer = self._config
        self._join_grid(trainer)
        self._side = self._grid.side_of(self.peers.rank)
        self._mesh = self._axes = side_mesh(trainer.device, self._grid, self.peers.timeout_s)
        self._lane_group = None if self._mesh.tensor is None else self._mesh.tensor.get_group()
        self._max_tokens = encoder_tokens(trainer)
        self._inventory: Inventory | None = None  # of the model that is trained

    @property
    def inventory(self) -> Inventory:
        """Return the tensors of the whole model that is trained."""
        assert self._inventory is not None  # noqa: S101 -- known once the model is cut
        return self._inventory

    @property
    def parameters(self) -> int:
        return self.inventory.parameters

    @property
    def state_nbytes(self) -> int:
        """Estimate the bytes of both sides' state: the first rank looks for room for all of it."""
        return self.inventory.state_nbytes

    @property
    def vocabulary(self) -> int:
        return self._planner.vocabulary

    # --- the cut -----------------------------------------------------------------------------------

    def _proved(self, whole: PreTrainedModel | None) -> tuple[RowProof, Witness]:
        proved = super()._proved(whole)
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
            made = torch.empty(shape, dtype=self._dtype, device=self._config.device)
        made = made.to(self._dtype).contiguous()
        dist.broadcast(made, src=0)
        return made

    def _sharded(self, model: PreTrainedModel) -> Weights:
        # The reference is a copy of the model that is trained, and has its names
        inventory = self._inventory = self._inventory or inventory_of(model)
        self._trains_tower = inventory.is_trained(Side.TOWER)
        plans = plans_of(model, self._grid)  # of both sides: all ranks refuse a model together
        keep_side(model, self._side)
        held = self._sharded_over(self._mesh, model, plans[self._side])
        if self._side is Side.TOWER:
            register_fsdp_forward_method(model, "get_image_features")
        return GridWeights(inventory, held, self._grid, self.peers.rank)

    def _prove_cut(self, witness: Witness) -> None:
        prove = self._prove_tower if self._side is Side.TOWER else self._prove_language
        self._prove_cut_sides(class_name(self._model), lambda: prove(witness))
        settle(self._model)

    def _prove_language(self, witness: Witness) -> tuple[float, str]:
        prove_sharding(self._model, witness, self._dtype, no_features)
        settle(self._model)
        if self._mesh.tensor is None:
            return NOT_APART
        packed = witness.packed(self._model)
        made = packed_logprobs(self._model, packed, 1.0, self._dtype, features_of=no_features)
        return copies_gap(self._model, made.sum(), self._mesh)

    def _prove_tower(self, _: Witness) -> tuple[float, str]:
        return prove_tower(
            self._model, self.media_rules, self._example_features, self._dtype, self._mesh
        )

    # --- weights and state -------------------------------------------------------------------------

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors to save; the numbers of updates are those of both sides, on all ranks."""
        state = super()._state()
        updates: list[float] = state[STEPS].tolist()
        own = dict(zip(self._optimizer.names, updates, strict=True))
        counts = [int(own.get(name, 0)) for name, _ in self.inventory.trained]
        return state | {STEPS: torch.tensor(self.peers.all_reduce_max(counts)).float()}

    def _own_steps(self, steps: Tensor) -> Tensor:
        own = [side is self._side for _, side in self.inventory.trained]
        return steps[torch.tensor(own, dtype=torch.bool, device=steps.device)]
