"""Base of the trainers of both sides of a grid: the cut, its proof, weights and state."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch declares some functions without types.

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from offbeat.config.loss_spec import LossSpec
from offbeat.messages.media import Media
from offbeat.messages.training import StepResult
from offbeat.model_proof.plain import TOLERANCES
from offbeat.model_proof.rope import freeze_rope
from offbeat.multimodal.picture_rules import PictureRules, picture_rules
from offbeat.multimodal.tower import features
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.grid.bridge import Bridge, Header, Kind, Traffic
from offbeat.trainers.grid.layout import Grid, Side
from offbeat.trainers.grid.provenance import list_digest
from offbeat.trainers.grid.sides import Inventory, inventory_of, keep_side, no_features
from offbeat.trainers.grid.weights import GridWeights, side_mesh, spread_sides
from offbeat.trainers.ranks.peers import all_reduce_max_or_fail, run_on_all_ranks
from offbeat.trainers.torch.optimizer import STEPS
from offbeat.trainers.torch.proof import RowProof, Witness, prove_sharding
from offbeat.trainers.torch.sharding import ShardedWeights, Weights, settle
from offbeat.trainers.torch.split_step import TorchTrainer
from offbeat.trainers.torch.spreading import make_room
from offbeat.trainers.weights import weights_digest

T = TypeVar("T")
_NAMES: Final = msgspec.msgpack.Decoder(list[str])
_TEXT: Final = msgspec.msgpack.Decoder(str)
_SHAPE: Final = msgspec.msgpack.Decoder(tuple[int, int, int])
_TRAFFIC: Final = msgspec.msgpack.Decoder(tuple[int, float])


class GridTrainer(TorchTrainer):
    """Trainer of one rank of a world whose ranks hold either the language model or the vision tower.

    Every rank makes the shell of the whole model, so that the layout of rows, identity and names are
    those of ranks which hold both; then it drops the side that it does not hold. Making one raises
    ``UntrainableModel`` as ``TorchTrainer`` does, and for a model without a tower that can be held
    apart, or whose tower computes other features than in the whole model.
    """

    def _prepare(self) -> None:
        trainer, rank = self._config, self.peers.rank
        assert trainer.encoder is not None  # noqa: S101 -- chosen by the same setting
        self._grid = Grid(trainer.data_parallel, trainer.encoder.data_parallel)
        self._side = self._grid.side_of(rank)
        self._mesh = side_mesh(trainer.device, self._grid, rank, self.peers.timeout_s)
        self._bridge = Bridge(rank, torch.device(trainer.device))
        self._exchanges = 0
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

    @property
    def _trains_tower(self) -> bool:
        return self.inventory.is_trained(Side.TOWER)

    @property
    def _rules(self) -> PictureRules:
        rules = picture_rules(self._model.config)
        assert rules is not None  # noqa: S101 -- the inventory refuses other models
        return rules

    # --- the cut -----------------------------------------------------------------------------------

    def _proved(self, whole: PreTrainedModel | None) -> tuple[RowProof, Witness]:
        proved = super()._proved(whole)
        self._example_features = self._features_of_example(whole)
        return proved

    @torch.no_grad()
    def _features_of_example(self, whole: PreTrainedModel | None) -> Tensor:
        """Return [blocks, F, H]: what the whole model makes of an example, on all ranks."""

        def compute() -> Tensor | None:
            if whole is None:
                return None
            if (rules := picture_rules(whole.config)) is None:
                inventory_of(whole)  # refuses it
                raise AssertionError("unreachable: a model without pictures is refused")
            return stacked(features(whole, (example(rules),)))

        made = run_on_all_ranks(self.peers, "the proof of the tower", compute)
        shape = (0, 0, 0) if made is None else (made.shape[0], made.shape[1], made.shape[2])
        shape = self.peers.broadcast(shape, _SHAPE)
        if made is None:
            made = torch.empty(shape, dtype=self._dtype, device=self._config.device)
        made = made.to(self._dtype).contiguous()
        dist.broadcast(made, src=0)
        return made

    def _cut(self, model: PreTrainedModel, whole: PreTrainedModel | None) -> Weights:
        device = self._config.device
        # The reference is a copy of the model that is trained, and has its names
        inventory = self._inventory = self._inventory or inventory_of(model)
        keep_side(model, self._side)
        held = ShardedWeights(model, self._mesh, lambda cut: make_room(cut, device))
        if self._side is Side.TOWER:
            register_fsdp_forward_method(model, "get_image_features")
        weights = GridWeights(inventory, held, self._grid, self.peers.rank)
        self._spread(whole, model, weights)
        freeze_rope(model, self._max_model_len)
        torch.manual_seed(self._seed)
        return weights

    def _spread(
        self, whole: PreTrainedModel | None, model: PreTrainedModel, weights: Weights
    ) -> None:
        device = torch.device(self._config.device)
        spread_sides(whole, model, weights, self.inventory, device)

    def _prove_cut(self, witness: Witness) -> None:
        prove = self._prove_tower if self._side is Side.TOWER else self._prove_language
        run_on_all_ranks(self.peers, "the proof of the cut", lambda: prove(witness))
        settle(self._model)

    def _prove_language(self, witness: Witness) -> None:
        prove_sharding(self._model, witness, self._dtype, no_features)

    @torch.no_grad()
    def _prove_tower(self, _: Witness) -> None:
        want = self._example_features.double()
        got = stacked(features(self._model, (example(self._rules),))).double()
        allowed = TOLERANCES[self._dtype]
        is_shaped = got.shape == want.shape
        gap = float((got - want).abs().max() / want.abs().max()) if is_shaped else float("inf")
        if not gap <= allowed:
            problem = (
                f"computes features of a picture {gap:.2g} of the largest off on encoder ranks, more than "
                f"{allowed:g}"
            )
            raise UntrainableModel(type(self._model).__name__, problem, "Leave trainer.encoder out")

    # --- weights and state -------------------------------------------------------------------------

    def _digest_of(self, named: Iterable[tuple[str, Tensor]]) -> str:
        """Return the digest of weights that are whole on rank 0 alone, on all ranks."""
        digest = weights_digest(named) if self.is_first else _exhausted(named)
        return self.peers.broadcast(digest, _TEXT)

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

    # --- the exchange of pictures ------------------------------------------------------------------

    def _pass_on_all_ranks(self, during: str, work: Callable[[], T]) -> T:
        """Run passes of this rank's side, while the other side waits; either all continue or none.

        A side of one rank reports its error, and all ranks end the call together. On a side of several
        the others may be inside a collective that the failed rank never enters. It raises without a
        report, for which they could not answer: so its own error is what the controller receives, at
        once, in place of the timeouts of the others.
        """
        if len(self._grid.ranks_of(self._side)) == 1:
            return run_on_all_ranks(self.peers, during, work)
        made = work()
        self._wait_for_all(during)
        return made

    def _wait_for_all(self, during: str) -> None:
        """Wait until all ranks have done what ``during`` names; ``PeerFailed`` if one cannot."""
        all_reduce_max_or_fail(self.peers, during, 0, None)

    def _begin(self, loss: LossSpec) -> None:
        self._bridge.traffic = Traffic()
        super()._begin(loss)

    def _finish(self) -> StepResult:
        result = super()._finish()
        traffic = self._bridge.traffic
        seen = self.peers.all_gather((traffic.nbytes, traffic.seconds), _TRAFFIC)
        named = {
            "train/bridge_bytes": float(sum(nbytes for nbytes, _ in seen)),
            "train/bridge_s": max(seconds for _, seconds in seen),
        }
        return msgspec.structs.replace(result, metrics={**result.metrics, **named})

    def _named_by_ranks(self, digests: Sequence[str]) -> list[list[str]]:
        """Return the digests of the pictures that each rank reads; begin an exchange."""
        self._exchanges += 1
        return self.peers.all_gather(list(digests), _NAMES)

    def _header(self, kind: Kind, lane: int, named: Sequence[Sequence[str]]) -> Header:
        """Return the header of a lane's message, without the shape and dtype of its values."""
        provenance = list_digest(named[lane])
        step = self.steps_applied + 1
        return Header(self._exchanges, step, kind, lane, provenance, 0, 0, 0, 0)


def example(rules: PictureRules) -> Media:
    """Return a picture of noise, for a pass that no prompt needs."""
    return rules.example(np.random.default_rng(0))


def stacked(made: tuple[Tensor, tuple[Tensor, ...]]) -> Tensor:
    """Return features and those of deeper layers as one tensor [blocks, F, H]."""
    embedded_FH, deep = made
    return torch.stack([embedded_FH, *deep])


def _exhausted(named: Iterable[tuple[str, Tensor]]) -> str:
    weights: Iterator[tuple[str, Tensor]] = iter(named)
    for _ in weights:
        pass
    return ""
