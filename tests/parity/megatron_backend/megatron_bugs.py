"""A trainer that is watched, trainers that reduce or count wrongly, and trainers that fail when told to.

Those whose model computes something else are in ``megatron_model_bugs``.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor

from offbeat.messages.training import StepResult
from offbeat.plugins.megatron.context import ContextAttention, GatherTokens
from offbeat.plugins.megatron.gradients import Gradients, Hooks
from offbeat.plugins.megatron.megatron_trainer import MegatronTrainer
from offbeat.plugins.megatron.optimizer import MainGradAdamW, RankOptimizer, ShardedAdamW
from offbeat.trainers.model_trainer import learning_rate
from offbeat.trainers.movement import Movement


def main_grads(module: Any) -> dict[str, Tensor]:
    """Frozen parameters have none."""
    named = module.named_parameters()
    return {name: each.main_grad for name, each in named if each.requires_grad}


class Recording(Gradients):
    """Keeps a copy of what it reduced."""

    reduced: dict[str, Tensor] | None = None

    def reduce(self, denominator: float) -> None:
        super().reduce(denominator)
        self.reduced = {n: each.clone() for n, each in main_grads(self._ddp.module).items()}


# --- the historic bugs, one each -------------------------------------------------------------------


class ReducedTwice(Recording):
    """Starts a reduction that the finalize hook then does again."""

    def finalize(self) -> None:
        self.start()
        super().finalize()


class FinalizeHookLeft(Recording):
    """The schedule goes on reducing at the end of every call."""

    def take_away(self) -> Hooks:
        kept = Hooks.of(self._config).finalize_model_grads_func
        return replace(super().take_away(), finalize_model_grads_func=kept)


class NoSyncLeaked(Recording):
    """Backward reduces while chunks are still to come."""

    def no_sync(self) -> Any:
        return nullcontext()


class NoSyncHookLeft(Recording):
    """The schedule enters and leaves no_sync inside ours: leaving turns reductions on."""

    def take_away(self) -> Hooks:
        kept = Hooks.of(self._config).no_sync_func
        return replace(super().take_away(), no_sync_func=kept)


class Averaged(Recording):
    """Divides by the ranks, too."""

    def scale(self, factor: float) -> None:
        super().scale(factor / self._ddp.dp_group.size())


class NormsNotAdded(Recording):
    """Ranks that share the tokens keep their parts of the norms' gradients to themselves."""

    def begin(self) -> None:
        super().begin()
        for each in self._ddp.module.parameters():
            setattr(each, "sequence_parallel", False)  # noqa: B010 -- no attribute of torch's


GRADIENTS: dict[str, Callable[..., Gradients]] = {
    each.__name__: each
    for each in (
        Recording,
        ReducedTwice,
        FinalizeHookLeft,
        NoSyncLeaked,
        NoSyncHookLeft,
        Averaged,
        NormsNotAdded,
    )
}


class OwnKeysOnly(MegatronTrainer):
    """A context-parallel rank keeps what its own queries make of its keys' gradient, and no more."""

    class Gather(GatherTokens):
        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            ranks = dist.get_world_size(ctx.group)
            return grads[0].chunk(ranks)[dist.get_rank(ctx.group)], None

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        for module in model.modules():
            if isinstance(module, ContextAttention):
                setattr(module, "gather", self.Gather)  # noqa: B010 -- of the instance
        return model


class CountedPerContextRank(MegatronTrainer):
    """Every context-parallel rank adds the tokens of the rows that it shares."""

    def _make_passes(self) -> Any:
        passes = super()._make_passes()
        is_leader = self.layout.tensor_rank == 0 and self.layout.is_last_stage
        passes.facts = replace(passes.facts, leads_replica=is_leader)
        return passes


class ExpertsAsDense(MegatronTrainer):
    """Gradients of experts are reduced over the copies of a dense layer, as the library would."""

    def _build(self, config: Any) -> Any:
        model = super()._build(config)
        for each in model.parameters():
            setattr(each, "allreduce", True)  # noqa: B010 -- no attribute of torch's
        return model


LAYOUT_BUGS: dict[str, type[MegatronTrainer]] = {
    each.__name__: each
    for each in (
        OwnKeysOnly,
        CountedPerContextRank,
        ExpertsAsDense,
    )
}


class UnmarkedMatrices(ShardedAdamW):
    """The library takes what tensor-parallel ranks hold for copies, and measures the first rank's."""

    def grad_norm(self) -> float:
        for each in self._chained:
            for main in each.get_parameters():
                setattr(main, "tensor_model_parallel", False)  # noqa: B010 -- as above
        return super().grad_norm()


class DecaysVectors(ShardedAdamW):
    """Weight decay as the library's optimizer has it without the library's scheduler."""

    def step(self, grad_norm: float, learning_rate: float) -> Movement:
        for group in self._library.param_groups:
            group["wd_mult"] = 1.0
        return super().step(grad_norm, learning_rate)


class StatesOfParts(ShardedAdamW):
    """A moment is read where this rank keeps its part, and not from the others."""

    def _whole(self, place: Any, kind: str) -> Tensor:
        whole = super()._whole(place, kind)
        own = whole.new_zeros(whole.numel())
        own[place.part] = whole.view(-1)[place.part]
        return own.view(whole.shape)


class LateRate(MegatronTrainer):
    """Reads the learning rate after the schedule has moved on."""

    def _finish(self) -> StepResult:
        result = super()._finish()
        late = learning_rate(self._config.optimizer, self.steps_applied, self._total_steps)
        return msgspec.structs.replace(result, learning_rate=late)


# --- faults ----------------------------------------------------------------------------------------


class Injected(Exception):
    """A fault that a test asked for."""


class Faulty(Recording):
    """Raises at one call of the library."""

    site = ""

    def no_sync(self) -> Any:
        self._pass("no_sync")
        return super().no_sync()

    def scale(self, factor: float) -> None:
        self._pass("scale")
        super().scale(factor)

    def start(self) -> None:
        self._pass("start")
        super().start()

    def finalize(self) -> None:
        self._pass("finalize")
        super().finalize()
        self._pass("synchronize")

    def _pass(self, site: str) -> None:
        if self.site == site:
            raise Injected(site)


class FaultyAdamW(MainGradAdamW):
    """Raises where the gradient is measured, or where it is applied."""

    site = ""

    def grad_norm(self) -> float:
        if self.site == "grad_norm":
            raise Injected(self.site)
        return super().grad_norm()

    def step(self, grad_norm: float, learning_rate: float) -> Movement:
        if self.site == "step":
            raise Injected(self.site)
        return super().step(grad_norm, learning_rate)


OPTIMIZERS: dict[str, type[RankOptimizer]] = {
    each.__name__: each
    for each in (FaultyAdamW, ShardedAdamW, UnmarkedMatrices, DecaysVectors, StatesOfParts)
}


def hooked(trainer: MegatronTrainer, site: str) -> Any:
    """Forward or backward raises in the second layer, with other gradients made already."""

    def fail(*_: Any) -> None:
        raise Injected(site)

    layer = trainer.model.decoder.layers[-1]
    if site == "forward":
        return layer.register_forward_hook(fail)
    if site == "backward":
        return trainer.model.get_parameter("decoder.layers.0.mlp.linear_fc1.weight").register_hook(
            fail
        )
    return None


def witness(trainer: MegatronTrainer) -> dict[str, Any]:
    """All that an abort has to put back."""
    config, ddp = trainer.transformer, trainer.ddp
    parameters = dict(trainer.model.named_parameters())
    return {
        "hooks": Hooks.of(config),
        "gradients": {n: float(g.abs().sum()) for n, g in main_grads(trainer.model).items()},
        "grad": [n for n, p in parameters.items() if p.grad is not None],
        "last microbatch": [group.is_last_microbatch for group in ddp.bucket_groups],
        "weights": {n: float(p.detach().double().sum()) for n, p in parameters.items()},
        "steps": trainer.steps_applied,
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [f"{name}: {after[name]}" for name in before if before[name] != after[name]]
