"""Loads a torch trainer's model: whole on one rank, or sharded over several and filled by rank 0.

To load a sharded model, every rank makes the model without memory for weights, shards it, and
allocates only its part. Only rank 0 reads the files. It broadcasts tensor by tensor, and each rank
copies its part.
"""

# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.
# torch declares some functions without types.

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.loading import freeze_rope
from offbeat.models.plain import attend_by
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.parts import torch_dtype
from offbeat.trainers.ranks.peers import Peers, run_on_all_ranks
from offbeat.trainers.torch.matrix_division import find_division
from offbeat.trainers.torch.model import freeze, load_model, make_unfilled_model, vocabulary
from offbeat.trainers.torch.proof import RowProof, Witness, prove_rows, prove_sharding
from offbeat.trainers.torch.sharding import (
    RankMesh,
    ShardedWeights,
    Weights,
    own,
    rank_mesh,
    reset_after_error,
    settle,
    shard_like,
)
from offbeat.weight_sync.chunks import iterate_weights

if TYPE_CHECKING:
    from offbeat.trainers.torch.torch_trainer import TrainedParameters


def make_shell(path: str | Path, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """Return the causal LM of a directory without memory for weights, in evaluation mode."""
    config = AutoConfig.from_pretrained(
        path, trust_remote_code=trust_remote_code, local_files_only=True
    )
    return make_unfilled_model(config, dtype, trust_remote_code=trust_remote_code).eval()


def make_room(model: PreTrainedModel, device: str) -> None:
    """Allocate all buffers and this rank's part of a model that was sharded without memory.

    Raises:
        UntrainableModel: The model keeps a tensor elsewhere, which would not be filled.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                problem = f"keeps {name}.{attribute}, which is neither a weight nor a buffer"
                fix = "Set trainer.data_parallel to 1"
                raise UntrainableModel(type(model).__name__, problem, fix)


@torch.no_grad()
def spread(
    source: PreTrainedModel | None, model: PreTrainedModel, weights: Weights, device: torch.device
) -> None:
    """Fill this rank's weights and buffers of a sharded model. All ranks must call it together.

    Args:
        source: The whole model on rank 0, or None on other ranks.
        model: The sharded model, with this rank's part allocated.
        weights: Weights of ``model``.
        device: Device of the ranks' collectives.
    """
    given = {} if source is None else dict(iterate_weights(source))
    parts = weights.local_tensors()
    for name, shape, dtype in weights.metas():
        whole = from_first(given.get(name), shape, getattr(torch, dtype), device)
        if name in parts:
            own(parts[name]).copy_(shard_like(whole, parts[name]))
    given = {} if source is None else dict(source.named_buffers())
    buffers = dict(model.named_buffers())
    for name, shape, dtype in weights.buffers():
        whole = from_first(given.get(name), shape, dtype, device)
        if name in buffers:
            buffers[name].copy_(whole)


def fill_like(source: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the settings that the files store in addition to the weights, for a later export."""
    model.generation_config = source.generation_config
    model._weight_conversions = source._weight_conversions  # noqa: SLF001 -- how it was renamed


def from_first(
    given: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return rank 0's tensor on every rank. Only rank 0 passes it as ``given``."""
    if given is None:
        whole = torch.empty(shape, dtype=dtype, device=device)
    else:
        whole = given.detach().to(device, dtype).contiguous()
    dist.broadcast(whole, src=0)
    return whole


_PROVED: Final = msgspec.msgpack.Decoder(tuple[RowProof, Witness])


class ModelLoader:
    """Makes a directory's model on the ranks of a torch trainer, as trained model or reference.

    All ranks must call ``read``, ``prove``, ``make`` and ``shard`` together, in this order.
    """

    def __init__(
        self,
        path: Path,
        trainer: TorchTrainerConfig,
        model: ModelConfig,
        *,
        max_model_len: int,
        seed: int,
        peers: Peers,
        trained: "TrainedParameters",
    ) -> None:
        """Store the arguments. The constructor loads nothing.

        Args:
            path: Hugging Face directory.
            trainer: Device, freezing, packing and parallel sizes.
            model: Dtype of the weights, and whether code of the directory may run.
            max_model_len: Tokens of the longest sequence of the run.
            seed: Seed of torch's generator, for weights that are missing in the files.
            peers: The ranks of the world.
            trained: The trained weights, which are added to the model if it lacks them.
        """
        self.path, self.peers, self.trained = path, peers, trained
        self.axes: RankMesh | None = None  # None: not sharded by these axes, or not yet
        self.trainer, self._model = trainer, model
        self._max_model_len, self._seed = max_model_len, seed
        self.dtype = torch_dtype(model.dtype)
        self._attention: str | None = None  # chosen by transformers

    def read(self, during: str) -> PreTrainedModel | None:
        """Return the whole model of the files on rank 0, or None on other ranks."""
        is_first = self.peers.rank == 0
        return run_on_all_ranks(self.peers, during, lambda: self.load() if is_first else None)

    def prove(self, whole: PreTrainedModel | None) -> tuple[RowProof, Witness]:
        """Prove packed rows on the whole model on rank 0. Return the result on all ranks.

        Models that are made afterwards use the attention that was proved.

        Raises:
            UntrainableModel: Packed rows of the model are not exact.
        """
        shared_prompt, length = self.trainer.shared_prompt, self._max_model_len

        def prove() -> tuple[RowProof, Witness] | None:
            if whole is None:
                return None
            return prove_rows(whole, length, dtype=self.dtype, shared_prompt=shared_prompt)

        proved = run_on_all_ranks(self.peers, "the proof of the model", prove)
        rows, witness = self.peers.broadcast(cast("tuple[RowProof, Witness]", proved), _PROVED)
        self._attention = rows.attention
        return rows, witness

    def make(self, whole: PreTrainedModel | None) -> PreTrainedModel:
        """Return the model that was read. For several ranks, return one without memory instead."""
        if self.peers.size == 1 and whole is not None:
            return whole
        shell = self.shell()
        if whole is not None:
            fill_like(whole, shell)
        return shell

    def shard(self, model: PreTrainedModel, whole: PreTrainedModel | None) -> Weights:
        """Keep the model whole on one rank, or shard it over several and fill each rank's part."""
        if self.peers.size == 1:
            return Weights(model)
        weights = self.cut(model)
        spread(whole, model, weights, torch.device(self.trainer.device))
        freeze_rope(model, self._max_model_len)
        torch.manual_seed(self._seed)  # only rank 0 may have drawn weights missing in the files
        return weights

    def prove_shards(self, model: PreTrainedModel, witness: Witness) -> None:
        """Prove that the ranks together compute the same results as the whole model.

        Raises:
            UntrainableModel: The results differ.
        """
        prove_sharding(model, witness, self.dtype)
        settle(model)
        if self.axes is not None and self.axes.tensor is not None:
            with self.trained.proving(), reset_after_error(model):
                find_division().prove_copies(model, witness, self.dtype, self.axes, self.peers)

    def refill(self, model: PreTrainedModel, weights: Weights) -> None:
        """Fill the weights of a model from the files again."""
        whole = self.read("reset")
        if self.peers.size > 1:
            spread(whole, model, weights, model.device)
            torch.manual_seed(self._seed)
        elif whole is not None:
            weights.fill(dict(Weights(whole).iterate()))

    def load_teacher(
        self, path: str, vocabulary_size: int, *, shared_prompt: bool
    ) -> PreTrainedModel:
        """Load a frozen model of another directory. It must be exact in the same kind of rows.

        Raises:
            UntrainableModel: The teacher is not exact, or it has a different vocabulary.
        """
        teacher = self._load(Path(path)).requires_grad_(requires_grad=False)
        proof, _ = prove_rows(
            teacher, self._max_model_len, dtype=self.dtype, shared_prompt=shared_prompt
        )
        if shared_prompt and not proof.shared_prompt:
            problem = f"cannot share prompts as the trained model does: {proof.problem}"
            raise UntrainableModel(path, problem, "Set trainer.shared_prompt to false")
        if vocabulary(teacher) < vocabulary_size:
            problem = f"knows {vocabulary(teacher)} tokens, and the trained model {vocabulary_size}"
            raise UntrainableModel(path, problem, "Name a teacher of the same vocabulary")
        return teacher

    # --- one model, and its cut --------------------------------------------------------------------

    def load(self) -> PreTrainedModel:
        """Load the whole model on this rank."""
        model = self._load(self.path)
        if self._attention:
            attend_by(model, self._attention)
        freeze(model, self.trainer.freeze)
        self.trained.add_to(model)
        return model

    def shell(self) -> PreTrainedModel:
        """Return the same model as ``load``, but without memory for weights."""
        remote_code = self._model.trust_remote_code
        shell = make_shell(self.path, self.dtype, trust_remote_code=remote_code)
        if self._attention:
            attend_by(shell, self._attention)
        freeze(shell, self.trainer.freeze)
        self.trained.add_to(shell)
        return shell

    def cut(self, model: PreTrainedModel) -> Weights:
        """Shard a model without memory, and allocate this rank's part. All ranks must call it."""
        if self.axes is None:
            ranks, tensor = self.peers.size, self.trainer.tensor_parallel
            self.axes = rank_mesh(self.trainer.device, ranks, tensor, self.peers.timeout_s)
        mesh = self.axes.tensor
        plan = {} if mesh is None else find_division().plan(model, mesh.size())
        return self.cut_over(self.axes, model, plan)

    def cut_over(
        self, axes: RankMesh, model: PreTrainedModel, plan: Mapping[str, str]
    ) -> ShardedWeights:
        """Shard like ``cut``, over these axes. The tensor ranks divide matrices by a plan."""

        def divide(cut: PreTrainedModel) -> None:
            if axes.tensor is not None:
                find_division().divide(cut, axes.tensor, plan)

        return ShardedWeights(
            model, axes.data, lambda cut: make_room(cut, self.trainer.device), divide
        )

    def _load(self, path: Path) -> PreTrainedModel:
        model = load_model(
            path,
            self._model.dtype,
            self.trainer.device,
            trust_remote_code=self._model.trust_remote_code,
        )
        freeze_rope(model, self._max_model_len)
        return model
