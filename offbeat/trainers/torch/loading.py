"""Loading of a torch trainer's model: whole on one rank; sharded and filled by rank 0 on several."""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import msgspec
import torch
from transformers import PreTrainedModel

from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.plain import attend_by
from offbeat.models.rope import freeze_rope
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.model_trainer import ModelTrainer
from offbeat.trainers.ranks.peers import run_on_all_ranks
from offbeat.trainers.torch.freezing import freeze
from offbeat.trainers.torch.matrix_division import find_division
from offbeat.trainers.torch.model import load_model, vocabulary
from offbeat.trainers.torch.proof import RowProof, Witness, prove_rows
from offbeat.trainers.torch.rank_mesh import RankMesh, rank_mesh
from offbeat.trainers.torch.sharding import ShardedWeights, Weights
from offbeat.trainers.torch.spreading import fill_like, make_room, shell_of, spread

_PROVED: Final = msgspec.msgpack.Decoder(tuple[RowProof, Witness])


class ReloadableTrainer(ModelTrainer):
    """A trainer that loads its model, again when it is reset, and once more as the reference."""

    _config: TorchTrainerConfig
    _model_config: ModelConfig
    _max_model_len: int
    _attention: str | None = None  # None: chosen by transformers
    _axes: RankMesh | None = None  # None: the model is not cut by these, or not yet

    def _read_model(self, during: str) -> PreTrainedModel | None:
        """Return the whole model of the files on rank 0; None on the others."""
        return run_on_all_ranks(
            self.peers, during, lambda: self._load_model() if self.is_first else None
        )

    def _proved(self, whole: PreTrainedModel | None) -> tuple[RowProof, Witness]:
        """Prove the rows of the whole model on rank 0; return the result on all ranks."""
        shared_prompt, length = self._config.shared_prompt, self._max_model_len

        def prove() -> tuple[RowProof, Witness] | None:
            if whole is None:
                return None
            return prove_rows(whole, length, dtype=self._dtype, shared_prompt=shared_prompt)

        proved = run_on_all_ranks(self.peers, "the proof of the model", prove)
        return self.peers.broadcast(cast("tuple[RowProof, Witness]", proved), _PROVED)

    def _unfilled(self, whole: PreTrainedModel | None) -> PreTrainedModel:
        """Return the model as it was read; with several ranks one without memory, to be sharded."""
        if self.peers.size == 1 and whole is not None:
            return whole
        shell = self._shell()
        if whole is not None:
            fill_like(whole, shell)
        return shell

    def _shell(self) -> PreTrainedModel:
        """Return the model that ``_load_model`` loads, without memory."""
        remote_code = self._model_config.trust_remote_code
        shell = shell_of(self.model_path, self._dtype, trust_remote_code=remote_code)
        if self._attention:
            attend_by(shell, self._attention)
        freeze(shell, self._config.freeze)
        return shell

    def _cut(self, model: PreTrainedModel, whole: PreTrainedModel | None) -> Weights:
        """Keep the model whole on one rank, or shard it over several and fill each rank's part."""
        if self.peers.size == 1:
            return Weights(model)
        weights = self._sharded(model)
        spread(whole, model, weights, torch.device(self._config.device))
        freeze_rope(model, self._max_model_len)
        torch.manual_seed(self._seed)  # only rank 0 may have drawn weights that the files lack
        return weights

    def _sharded(self, model: PreTrainedModel) -> Weights:
        """Shard a model without memory, and allocate this rank's part. All ranks call it together."""
        if self._axes is None:
            ranks, tensor = self.peers.size, self._config.tensor_parallel
            self._axes = rank_mesh(self._config.device, ranks, tensor, self.peers.timeout_s)
        mesh = self._axes.tensor
        plan = {} if mesh is None else find_division().plan(model, mesh.size())
        return self._sharded_over(self._axes, model, plan)

    def _sharded_over(
        self, axes: RankMesh, model: PreTrainedModel, plan: Mapping[str, str]
    ) -> ShardedWeights:
        """Shard as ``_sharded`` over these axes, whose tensor ranks divide matrices by a plan."""

        def divide(cut: PreTrainedModel) -> None:
            if axes.tensor is not None:
                find_division().divide(cut, axes.tensor, plan)

        return ShardedWeights(
            model, axes.data, lambda cut: make_room(cut, self._config.device), divide
        )

    def _load_teacher(self, path: str, shared_prompt: bool) -> PreTrainedModel:  # noqa: FBT001
        """Load a frozen model of another directory, exact in the rows of the trained one.

        Raises:
            UntrainableModel: It is not, or it has another vocabulary.
        """
        config = self._model_config
        teacher = load_model(
            Path(path),
            config.dtype,
            self._config.device,
            trust_remote_code=config.trust_remote_code,
        ).requires_grad_(requires_grad=False)
        freeze_rope(teacher, self._max_model_len)
        proof, _ = prove_rows(
            teacher, self._max_model_len, dtype=self._dtype, shared_prompt=shared_prompt
        )
        if shared_prompt and not proof.shared_prompt:
            problem = f"cannot share prompts as the trained model does: {proof.problem}"
            raise UntrainableModel(path, problem, "Set trainer.shared_prompt to false")
        if vocabulary(teacher) < self.vocabulary:
            problem = f"knows {vocabulary(teacher)} tokens, and the trained model {self.vocabulary}"
            raise UntrainableModel(path, problem, "Name a teacher of the same vocabulary")
        return teacher

    def _load_model(self) -> PreTrainedModel:
        config = self._model_config
        model = load_model(
            self.model_path,
            config.dtype,
            self._config.device,
            trust_remote_code=config.trust_remote_code,
        )
        freeze_rope(model, self._max_model_len)
        if self._attention:
            attend_by(model, self._attention)
        freeze(model, self._config.freeze)
        return model
