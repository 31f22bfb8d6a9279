"""Gradient buffers of one rank, and the library's hooks that would reduce them too early.

The library's schedules handle a whole step in one call and reduce gradients over ranks at its end.
A split step makes many calls, so three hooks of the config are removed while the step is open:

    grad_sync_func              starts a reduction in a pipeline's last backward
    no_sync_func                the schedule would enter and leave it around all but the last
                                microbatch, and leaving it enables reductions again inside our own
    finalize_model_grads_func   reduces at the end of every call

They are restored when the step ends. The reduction then happens once, in ``reduce``.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# megatron-core has no types.

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from offbeat.plugins.megatron.groups import tensor_group
from offbeat.plugins.megatron.tower import sum_tower_gradients


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions that the library calls between and after microbatches."""

    grad_sync_func: Any
    no_sync_func: Any
    finalize_model_grads_func: Any

    @classmethod
    def of(cls, config: TransformerConfig) -> "Hooks":
        return cls(config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func)

    def put(self, config: TransformerConfig) -> None:
        config.grad_sync_func = self.grad_sync_func
        config.no_sync_func = self.no_sync_func
        config.finalize_model_grads_func = self.finalize_model_grads_func


class Gradients:
    """Sums of one open step's gradients, in the buffers of the library's data parallelism."""

    def __init__(self, ddp: DistributedDataParallel, config: TransformerConfig) -> None:
        self._ddp, self._config = ddp, config
        self._overlap = ddp.ddp_config.overlap_grad_reduce
        own = ddp.start_grad_sync if self._overlap and ddp.pp_group.size() > 1 else None
        Hooks(own, ddp.no_sync, finalize_model_grads).put(config)
        self._saved: Hooks | None = None  # set while a step is open

    def begin(self) -> None:
        """Zero all gradients. Until ``restore``, nothing but ``reduce`` reduces them."""
        self.zero()
        self._saved = Hooks.of(self._config)
        self.take_away().put(self._config)

    def take_away(self) -> Hooks:
        """Return the replacements of the hooks while a step is open."""
        return Hooks(None, contextlib.nullcontext, None)

    def accumulate(self, work: Callable[[], None]) -> None:
        """Run forward and backward passes. Their gradients are added without a reduction."""
        with self.no_sync():
            work()

    def reduce(self, denominator: float) -> None:
        """Divide the sums and reduce them over ranks, once per step, on all ranks."""
        self.scale(1.0 / denominator)
        if (
            self._overlap
        ):  # else the finalize hook reduces by itself, and this would be a second reduction
            self.start()
        self.finalize()
        torch.cuda.synchronize()

    def restore(self) -> None:
        """Restore the hooks. Without an open step, do nothing."""
        if self._saved is not None:
            self._saved.put(self._config)
            self._saved = None

    def zero(self) -> None:
        """Discard the accumulated gradients, and any reduction in progress."""
        for group in self._ddp.bucket_groups + self._ddp.expert_parallel_bucket_groups:
            if group.grad_reduce_handle is not None:
                # It would still write, and the next step would mistake it for its own.
                group.grad_reduce_handle.wait()
                group.grad_reduce_handle = None
        self._ddp.zero_grad_buffer()
        for parameter in self._ddp.module.parameters():
            parameter.grad = None  # left by a backward that raised

    # --- calls of the library, each at one place -------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward starts no reduction."""
        return self._ddp.no_sync()

    def scale(self, factor: float) -> None:
        """Multiply all gradients accumulated on this rank."""
        self._ddp.scale_gradients(factor)

    def start(self) -> None:
        """Start the reductions that backward would have started."""
        self._ddp.start_grad_sync()

    def finalize(self) -> None:
        """Reduce over data-parallel ranks, and over shared weights.

        Shared weights are tied embeddings, norms of heads and the vision tower.
        """
        assert self._saved is not None  # noqa: S101 -- only an open step is reduced
        self._saved.finalize_model_grads_func([self._ddp], None)
        sum_tower_gradients(cast("GPTModel", self._ddp.module), tensor_group())
