"""The torch trainer of one rank.

With several ranks the model is sharded over them (``sharding``), and they compute every microbatch
together; before each chunk they exchange the number of microbatches, and whether a rank has failed.
"""

# pyright: reportUnknownMemberType=false
# torch declares some functions without types.

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar, Unpack, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.models.media_passes import FeaturesOf
from offbeat.models.media_rules import MediaRules, media_rules
from offbeat.trainers.backend import TopLogprobs
from offbeat.trainers.batches.packing import PackedRows, padding_microbatch
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.checkpoints.manifest import Identity
from offbeat.trainers.checkpoints.weight_files import FILE_BYTES
from offbeat.trainers.expert_load import SHARES
from offbeat.trainers.model_trainer import LossOf, ModelTrainer, RankOptions
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.ranks.dispatch import pad_microbatches
from offbeat.trainers.ranks.peers import all_reduce_max_or_fail, run_on_all_ranks
from offbeat.trainers.teacher import check_tokenizers
from offbeat.trainers.torch.flops import model_flops
from offbeat.trainers.torch.forward import (
    PassOptions,
    packed_logprobs,
    packed_logprobs_and_entropies,
    top_logprobs,
)
from offbeat.trainers.torch.matrix_division import find_division
from offbeat.trainers.torch.model import (
    call_to_pair_ratio,
    linear_to_pair_ratio,
    vocabulary,
)
from offbeat.trainers.torch.optimizer import STEPS, Optimizer
from offbeat.trainers.torch.parts import TorchParts
from offbeat.trainers.torch.pass_room import PassRoom, largest_tokens
from offbeat.trainers.torch.recompute import recompute_layers
from offbeat.trainers.torch.routing import ModelRouting, check_routers
from offbeat.trainers.torch.saving import save_model
from offbeat.trainers.torch.sharded_state import load_shards, save_shards, saved_names
from offbeat.trainers.torch.sharding import settle, settled
from offbeat.trainers.torch.split_attention import register_split_attention
from offbeat.trainers.weights import TrainedWeights, shared_digest
from offbeat.transfer_queue.schema import (
    POLICY_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
)
from offbeat.weight_sync.receiver import TensorRegion
from offbeat.weight_sync.wire_format_plugin import WireFormat

T = TypeVar("T")
_WEIGHT: Final = "weight"
_RNG: Final = "rng"


class TorchTrainer(ModelTrainer):
    """Trainer of one model with one optimizer. Its weight tensors keep their identity.

    Its model is made by ``ModelLoader``, and ``TrainedParameters`` are the weights that it trains.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: TorchTrainerConfig,
        max_model_len: int,
        parts: TorchParts | None = None,
        **options: Unpack[RankOptions],
    ) -> None:
        """Load the model, and shard it if there are several ranks.

        Args:
            model_path: Hugging Face directory. The KL penalty pulls towards this model.
            trainer: Device, packing, and optimizer. The caller sets the number of threads.
            max_model_len: Tokens of the longest sequence of the run.
            parts: Parts that differ from the default ones.
            options: The model and the world of ranks.

        Raises:
            UntrainableModel: Packed rows of the model are not exact, or it does not support
                ``trainer.activation_checkpointing`` or several ranks where they are set.
        """
        super().__init__(model_path, trainer.optimizer, **options)
        torch.manual_seed(self._seed)
        register_split_attention()
        self._config, parts = trainer, parts or TorchParts()
        self.trained = parts.trained(trainer, self.model_path, self.peers)
        self._loader = parts.loader(
            self.model_path,
            trainer,
            options["model"],
            max_model_len=max_model_len,
            seed=self._seed,
            peers=self.peers,
            trained=self.trained,
        )
        self._prepare()
        # Source of the features of media; None: the model's own encoder
        self._features_of: FeaturesOf | None = None
        whole = self._loader.read("its start")
        rows, witness = self._loader.prove(whole)
        self._plain_head = rows.plain_head
        self._model = self._loader.make(whole)
        if trainer.activation_checkpointing:
            recompute_layers(self._model)
        self._planner = MicrobatchPlanner(
            trainer.max_tokens_per_microbatch,
            rows.shared_prompt,
            linear_to_pair_ratio(self._model),
            vocabulary(self._model),
            call_pairs=call_to_pair_ratio(self._model) if rows.split else None,
            media_rules=media_rules(self._model.config),
        )
        self._flops = model_flops(self._model)
        check_routers(self._model, trainer.moe)
        self._identity = self.trained.identify(self._model)
        self._weights = self._loader.shard(self._model, whole)
        del whole
        self._hold()
        self._routing = ModelRouting(self._model, trainer.moe)
        self.expert_load = self._routing.load
        if self.peers.size > 1:
            self._loader.prove_shards(self._model, witness)
        self._optimizer = Optimizer(self._model, trainer.optimizer, self.peers, self._loader.axes)
        self._teachers: dict[str, PreTrainedModel] = {}  # by directory
        self._room = PassRoom(self._device)
        self._rng_at_begin = torch.get_rng_state()  # of torch's CPU generator, at begin of a step
        # With a base alone: a resume with other additions is refused by their checkpoint, which says so.
        self.initial_digest = self.trained.base or self.current_digest()

    def _prepare(self) -> None:
        """Prepare for loading; nothing by default."""

    def _hold(self) -> None:
        """Find the weights that are trained in the model, as this rank holds it."""
        self.trained.hold(self._model, self._weights)

    @property
    def vocabulary(self) -> int:
        return self._planner.vocabulary

    @property
    def media_rules(self) -> MediaRules:
        return media_rules(self._model.config)

    def _top_logprobs(self, prompts: Sequence[Sequence[int]], count: int) -> TopLogprobs:
        with self.trained.as_served():
            return top_logprobs(self._model, prompts, count, self._features_of)

    def _quantized_matrices(self, wire_format: WireFormat) -> AbstractContextManager[None]:
        return wire_format.trained_pass(self._model)

    # --- weights in and out ----------------------------------------------------------------------

    @property
    def module(self) -> PreTrainedModel:
        """Return the model being trained; its tensors keep their identity."""
        return self._model

    @property
    def weights(self) -> TrainedWeights:
        """Return the weights that are trained."""
        return self.trained.weights

    @property
    def shares_prompts(self) -> bool:
        """Return whether samples of a group share one copy of their prompt in a row."""
        return self._planner.shared_prompt

    @property
    def parameters(self) -> int:
        """Return the number of weights; tied weights count once."""
        return sum(each.numel() for each in self._model.parameters())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by Hugging Face name, in a fixed order; tied ones once. All ranks."""
        return self.weights.named()

    def weights_digest(self) -> str:
        """Compute one digest over the trained weights, and their base. All ranks call it together."""
        return shared_digest(self.named_weights(), self.peers, self.trained.base)

    def held_regions(self) -> list[TensorRegion]:
        """Return this rank's regions of the weights, in the memory that training updates."""
        return self._weights.held_regions()

    def save(self, directory: str | Path, *, file_bytes: int = FILE_BYTES) -> None:
        """Write a Hugging Face directory with the tokenizer of the model path; atomic.

        All ranks call it together. Rank 0 writes, and holds the tensors of one file of ``file_bytes`` and
        those gathered with them.
        """
        weights, beside = self.trained.export()
        save_model(
            weights,
            self._model,
            self._dtype,
            Path(directory),
            self.model_path,
            self.peers,
            file_bytes=file_bytes,
            beside=beside,
        )

    @property
    def identity(self) -> Identity:
        """Return an identity that is equal for any number of ranks, which can load each other's state."""
        return self._identity

    @property
    def state_nbytes(self) -> int:
        trained = self._optimizer.names
        others = (
            each for name, each in self.weights.local_tensors().items() if name not in trained
        )
        return self._optimizer.state_nbytes + sum(each.nbytes for each in others)

    def _save(self, directory: Path) -> None:
        save_shards(self._state(), directory, self.peers)

    def _load(self, directory: Path) -> None:
        names = run_on_all_ranks(self.peers, "restore", lambda: saved_names(directory))
        self._optimizer.make_room(names)
        state = self._state()
        load_shards(state, directory, self.peers)
        self._optimizer.filled(self._own_steps(state[STEPS]))
        torch.set_rng_state(state[_RNG])

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors to save, not copies: this rank's parts, and masters for 16-bit weights."""
        weights = self.weights.local_tensors() | self._optimizer.masters()
        return {
            **{f"{_WEIGHT}/{name}": each for name, each in weights.items()},
            **self._optimizer.moments(),
            STEPS: self._optimizer.steps(),
            **({} if self.expert_load is None else {SHARES: self.expert_load.state()}),
            _RNG: torch.get_rng_state(),
        }

    def _own_steps(self, steps: Tensor) -> Tensor:
        """Return the numbers of updates [parameters] of this rank's parameters, of all that were saved."""
        return steps

    def _initialise(self) -> None:
        torch.manual_seed(self._seed)
        if not self.trained.restore():
            self._loader.refill(self._model, self._weights)
        self._optimizer.reset()
        if self.expert_load is not None:
            self.expert_load.reset()

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._model.device

    @property
    def _is_replica_leader(self) -> bool:
        return self.peers.rank % self._config.tensor_parallel == 0

    @property
    def _replica(self) -> int:
        return self.peers.rank // self._config.tensor_parallel

    def _begin_gradients(self) -> None:
        self._rng_at_begin = torch.get_rng_state()
        self._optimizer.drop_gradients()
        self._room.begin_step()

    def _add_gradients(
        self, microbatches: Sequence[PackedRows], loss_of: LossOf, temperature: float
    ) -> None:
        normalize = self._step.loss.config.normalize
        options = PassOptions(plain_head=self._plain_head, features_of=self._features_of)
        with settled(self._model), self._room.used(largest_tokens(microbatches)):
            for packed in microbatches:
                with self._routing.trained(packed, normalize):
                    logprobs_N, entropy_N = packed_logprobs_and_entropies(
                        self._model, packed, temperature, self._dtype, **options
                    )
                    self._routing.forward_done()
                    if packed.is_padding:
                        loss = logprobs_N.sum() * 0.0
                    else:
                        loss = loss_of(packed, logprobs_N, entropy_N)
                    loss.backward()

    def _router_biases(self) -> list[tuple[int, Tensor]]:
        return self._routing.biases()

    def _apply(self, denominator: float, rate: float) -> UpdateResult:
        return self._optimizer.step(denominator, rate)

    def _discard_gradients(self) -> None:
        self._optimizer.drop_gradients()

    def _drop(self) -> None:
        if self._sums is not None:
            torch.set_rng_state(self._rng_at_begin)
        super()._drop()

    def _logprobs(
        self, name: str, count: int, microbatches: Sequence[PackedRows], temperature: float
    ) -> NDArray[np.float32]:
        model = self._model_of(name)
        plain_head = self._plain_head and name != TEACHER_LOGPROBS
        options = PassOptions(plain_head=plain_head, features_of=self._features_of)
        values = np.empty(count, np.float32)
        with settled(model), self._computing(name):
            for packed in microbatches:
                logprobs_N = packed_logprobs(model, packed, temperature, self._dtype, **options)
                if not packed.is_padding:
                    values[packed.source_N] = logprobs_N.float().cpu().numpy()
            settle(model)
        return values

    def _prepared_on_all_ranks(
        self, during: str, read: Callable[[], tuple[T, list[PackedRows]]]
    ) -> tuple[T, list[PackedRows]]:
        what, own, failure = None, list[PackedRows](), None
        try:
            trains = during == "microbatch"
            what, own = self._room.fit(read, self._cut_smaller) if trains else read()
        except Exception as error:
            if self.peers.size == 1:
                raise
            failure = error
        token = max((each.padding_token for each in own), default=0)
        count, token = all_reduce_max_or_fail(self.peers, during, [len(own), token], failure)
        if self._config.tensor_parallel > 1:
            tensor = self._config.tensor_parallel
            find_division().check_same_rows(self.peers, tensor, during, own)
        return cast("T", what), pad_microbatches(own, count, padding_microbatch(token))

    def _cut_smaller(self, tokens: int) -> None:
        """Cut microbatches of at most so many tokens from now on; tensor ranks have to share rows."""
        if self._config.tensor_parallel == 1:
            most = min(tokens, self._planner.max_tokens)
            self._planner = replace(self._planner, max_tokens=most)

    def _model_of(self, name: str) -> PreTrainedModel:
        """Return the model whose logprobs a column holds."""
        if name == TEACHER_LOGPROBS:
            assert self._teacher_path is not None  # noqa: S101 -- the column is requested with it
            return self._teacher(self._teacher_path)
        is_own = name == POLICY_LOGPROBS or self.trained.base
        return self._model if is_own else self._reference

    def _computing(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which the model of a column computes its values."""
        return self.trained.as_base() if name == REFERENCE_LOGPROBS else nullcontext()

    def _check_initial(self, digest: str) -> None:
        if not self.trained.base:  # which is frozen: a reset reads no file
            super()._check_initial(digest)

    def _teacher(self, path: str) -> PreTrainedModel:
        """Return the frozen model of a directory, loaded once and proved as the trained one is.

        Each rank holds it whole: it is never gathered, and scores this rank's groups alone.
        """

        def loaded() -> PreTrainedModel:
            check_tokenizers(path, self.model_path)
            shared_prompt = self._planner.shared_prompt
            return self._loader.load_teacher(path, self.vocabulary, shared_prompt=shared_prompt)

        if path not in self._teachers:
            self._teachers[path] = run_on_all_ranks(self.peers, "the teacher", loaded)
        return self._teachers[path]

    @cached_property
    def _reference(self) -> PreTrainedModel:
        whole = self._loader.read("the reference")
        model = self._loader.make(whole).requires_grad_(requires_grad=False)
        weights = self._loader.shard(model, whole)
        self._check_initial(shared_digest(weights.named(), self.peers))
        return model
