"""The torch trainer of one rank: the split step, and the single-shot step it must equal.

Gradients accumulate as raw sums over microbatches and are divided once, at the end, by the valid
tokens or sequences of the whole step. So a step does not depend on how its groups were cut into
chunks, and ``train`` is the same step in one call.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.actors.trainers.checkpoint_manifest import Identity
from offbeat.actors.trainers.split_step import Advantages, LogprobColumns, SplitStep
from offbeat.actors.trainers.torch_backend.accumulate import StepSums
from offbeat.actors.trainers.torch_backend.forward import packed_logprobs
from offbeat.actors.trainers.torch_backend.inputs import loss_tokens
from offbeat.actors.trainers.torch_backend.model import (
    check_shared_prompt,
    identity,
    linear_to_pair_ratio,
    load_model,
    load_reference,
    save_model,
    weights_digest,
)
from offbeat.actors.trainers.torch_backend.optimizer import Optimizer
from offbeat.actors.trainers.torch_backend.packing import Batch, Packed, flatten, pack
from offbeat.actors.trainers.torch_backend.rows import (
    best_response_tokens,
    plan_microbatches,
    plan_rows,
)
from offbeat.actors.trainers.torch_backend.schedule import learning_rate
from offbeat.actors.trainers.torch_backend.state_files import save_tensors, saved_tensors
from offbeat.algorithms.losses import LOSSES
from offbeat.config.run import ModelConfig
from offbeat.config.training import TrainerConfig
from offbeat.messages.training import ChunkResult, LossSpec, StepResult
from offbeat.transfer_queue.schema import POLICY_LOGPROBS, REFERENCE_LOGPROBS, Columns
from offbeat.weight_sync.source import named_weights

WEIGHTS: Final = "weights.safetensors"
OPTIMIZER: Final = "optimizer.safetensors"
_RNG: Final = "rng"


@dataclass(slots=True)
class _OpenStep:
    sums: StepSums
    rng: Tensor  # torch's CPU generator as begin found it


class TorchTrainer(SplitStep):
    """One model, one optimizer, one step at a time. Its weights are the same tensors for life."""

    def __init__(
        self,
        model_path: str | Path,
        *,
        trainer: TrainerConfig,
        model: ModelConfig,
        total_steps: int,
        seed: int = 0,
        reference_path: str | Path | None = None,
    ) -> None:
        """Load the model.

        Args:
            model_path: Hugging Face directory; a checkpoint written by ``save`` is one.
            trainer: Its device, packing, and optimizer. Threads are the process's business.
            model: Its type of weights, and whether code that comes with it may run.
            total_steps: Where the learning-rate schedule ends.
            seed: Of torch's generator, for weights a model makes up when it is loaded.
            reference_path: What the KL penalty pulls towards; None: ``model_path``.

        Raises:
            UnsupportedModel: ``trainer.shared_prompt`` with a model that cannot have it.
        """
        super().__init__()
        torch.manual_seed(seed)
        self._seed, self.model_path = seed, Path(model_path)
        self._reference_path = Path(reference_path or model_path)
        self._config, self._model_config, self._total_steps = trainer, model, total_steps
        self._model = self._load_model(load_model, self.model_path)
        if trainer.shared_prompt:
            check_shared_prompt(self._model)
        self._ratio_tokens = linear_to_pair_ratio(self._model)
        self._optimizer = Optimizer(self._model, trainer.optimizer)
        self._open: _OpenStep | None = None

    # --- log-probabilities -----------------------------------------------------------------------

    def prepare_logprobs(
        self, groups: Sequence[Columns], *, policy: bool, reference: bool, temperature: float
    ) -> list[LogprobColumns]:
        """Log-probabilities of every response token, under the weights as they are now.

        Leaves an open step's gradients alone. The reference is loaded when first asked for.

        Returns:
            For each group ``policy_logprobs`` and ``reference_logprobs``, whichever was asked for,
            one value a response token.
        """
        columns: list[LogprobColumns] = [{} for _ in groups]
        asked = ((POLICY_LOGPROBS, policy), (REFERENCE_LOGPROBS, reference))
        batch = flatten(groups, only_trained=False)
        for name in (name for name, wanted in asked if wanted):
            model = self._model if name == POLICY_LOGPROBS else self._reference
            values = self._logprobs(model, batch, temperature)
            for group, part in enumerate(np.split(values, batch.ends[:-1])):
                columns[group][name] = part
        return columns

    @torch.no_grad()
    def _logprobs(
        self, model: PreTrainedModel, batch: Batch, temperature: float
    ) -> NDArray[np.float32]:
        values = np.empty(len(batch.tokens), np.float32)
        for packed in self._microbatches(batch):
            logprobs_N = packed_logprobs(model, packed, temperature)
            values[packed.source_N] = logprobs_N.float().cpu().numpy()
        return values

    # --- weights in and out ----------------------------------------------------------------------

    @property
    def module(self) -> PreTrainedModel:
        """The model being trained; its tensors stay the same objects for life."""
        return self._model

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones once."""
        return sum(each.numel() for each in self._model.parameters())

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights under their Hugging Face names, in a fixed order; tied ones once."""
        return named_weights(self._model)

    def weights_digest(self) -> str:
        """Names and bytes of all weights in one number."""
        return weights_digest(self._model)

    def save(self, directory: str | Path) -> None:
        """Write a Hugging Face directory with the tokenizer of the model path; atomic."""
        save_model(self._model, directory, like=self.model_path)

    @property
    def identity(self) -> Identity:
        return identity(self._model)

    @property
    def state_nbytes(self) -> int:
        weights = sum(each.nbytes for _, each in self.named_weights())
        return weights + self._optimizer.state_nbytes

    def _save(self, directory: Path) -> None:
        save_tensors(dict(self.named_weights()), directory / WEIGHTS)
        others = {_RNG: torch.get_rng_state(), **self._optimizer.tensors()}
        save_tensors(others, directory / OPTIMIZER)

    @torch.no_grad()
    def _load(self, directory: Path) -> None:
        with saved_tensors(directory / WEIGHTS) as saved:
            for name, tensor in self.named_weights():
                tensor.copy_(saved[name])
        with saved_tensors(directory / OPTIMIZER) as saved:
            self._optimizer.load(saved)
            torch.set_rng_state(saved[_RNG])

    @torch.no_grad()
    def _initialise(self) -> None:
        torch.manual_seed(self._seed)
        initial = dict(named_weights(self._load_model(load_model, self.model_path)))
        for name, tensor in self.named_weights():
            tensor.copy_(initial[name])
        self._optimizer.reset()

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self, loss: LossSpec) -> None:
        self._open = _OpenStep(StepSums(loss), torch.get_rng_state())
        self._optimizer.drop_gradients()

    def _drop(self) -> None:
        self._optimizer.drop_gradients()
        if self._open is not None:
            torch.set_rng_state(self._open.rng)
            self._open = None

    def _accumulate(self, groups: Sequence[Columns], advantages: Advantages) -> ChunkResult:
        started, sums = time.perf_counter(), self._step.sums
        tokens, sequences, microbatches = 0, 0, 0
        batch = flatten(groups, only_trained=True)
        make_tokens = loss_tokens(batch, groups, advantages, sums.spec, self._model.device)
        for packed in self._microbatches(batch):
            logprobs_N = packed_logprobs(self._model, packed, sums.spec.temperature)
            inputs = make_tokens(packed, logprobs_N)
            part = LOSSES[sums.spec.name](inputs, sums.spec)
            part.loss.backward()
            sums.add(part)
            tokens += len(packed.source_N)
            sequences += inputs.sequences
            microbatches += 1
        compute_s = time.perf_counter() - started
        sums.tokens, sums.sequences = sums.tokens + tokens, sums.sequences + sequences
        sums.chunks, sums.compute_s = sums.chunks + 1, sums.compute_s + compute_s
        return ChunkResult(tokens, sequences, microbatches, compute_s)

    def _finish(self) -> StepResult:
        started, sums = time.perf_counter(), self._step.sums
        rate = learning_rate(self._config.optimizer, self.steps_applied, self._total_steps)
        loss, norm, metrics, reason = 0.0, 0.0, dict[str, float](), "no valid tokens"
        if sums.tokens:
            means = sums.means()
            loss, metrics, reason = means.loss, means.metrics, ""
            if not np.isfinite(loss):
                reason = f"loss is {loss}"
            else:
                update = self._optimizer.step(sums.denominator, rate)
                norm = update.grad_norm
                reason = "" if update.applied else f"gradient norm is {norm}"
        self._optimizer.drop_gradients()
        self.steps_applied += not reason
        self._open = None
        return StepResult(
            applied=not reason,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=sums.tokens,
            sequences=sums.sequences,
            chunks=sums.chunks,
            metrics=metrics,
            reason=reason,
            compute_s=sums.compute_s + time.perf_counter() - started,
        )

    def _microbatches(self, batch: Batch) -> Iterator[Packed]:
        budget = self._config.max_tokens_per_microbatch
        response_tokens = 0.0
        if self._config.shared_prompt:
            prompt_tokens = sum(map(len, batch.prompts)) / len(batch.prompts)
            response_tokens = best_response_tokens(prompt_tokens, self._ratio_tokens)
        rows = plan_rows(batch, response_tokens=response_tokens, max_tokens=budget)
        for microbatch in plan_microbatches(rows, budget):
            yield pack(batch, microbatch)

    @property
    def _step(self) -> _OpenStep:
        assert self._open is not None  # noqa: S101 -- the guard lets nothing through otherwise
        return self._open

    @cached_property
    def _reference(self) -> PreTrainedModel:
        return self._load_model(load_reference, self._reference_path)

    def _load_model(self, load: Callable[..., PreTrainedModel], path: Path) -> PreTrainedModel:
        config = self._model_config
        return load(
            path,
            config.dtype,
            self._config.device,
            trust_remote_code=config.trust_remote_code,
        )
