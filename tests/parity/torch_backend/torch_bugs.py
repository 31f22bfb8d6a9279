"""Trainers with the bugs that others had, one each, and one that fails when told to. In workers only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from tiny_models import compute_in_float64
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from offbeat.algorithms.losses import LossSums, LossTokens
from offbeat.config.sections.loss import LossConfig
from offbeat.messages.training import StepResult
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.model_trainer import learning_rate
from offbeat.trainers.movement import UpdateResult
from offbeat.trainers.step_sums import StepTotals
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.loading import ModelLoader
from offbeat.trainers.torch.logprobs import VocabularyShare
from offbeat.trainers.torch.sharding import Weights, iterate_sharded_modules
from offbeat.trainers.torch.torch_trainer import TorchParts, WholeModel
from tests.support.image_text_models import exact_angles, exact_norms


class PlantedUpdates:
    """Updates before whose step something is done; it returns what gradients are divided by."""

    def __init__(self, updates: Any, before: Callable[[float], float]) -> None:
        self.updates, self._before = updates, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self.updates, name)

    def begin(self) -> None:
        self.updates.begin()

    def drop_gradients(self) -> None:
        self.updates.drop_gradients()

    def step(self, denominator: float, rate: float) -> UpdateResult:
        return self.updates.step(self._before(denominator), rate)


class PlantedLoader(ModelLoader):
    """Makes models that compute otherwise than transformers, and cuts with a bug."""

    def __init__(self, *given: Any, change: Callable[[Any], Any], plant: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.change, self.plant = change, plant

    def load(self) -> PreTrainedModel:
        return self.change(super().load())

    def shell(self) -> PreTrainedModel:
        return self.change(super().shell())

    def shard(self, model: PreTrainedModel, whole: PreTrainedModel | None) -> Weights:
        weights = super().shard(model, whole)
        self.plant(model, self.axes)
        return weights


class Exact(TorchTrainer):
    """Computes in float64 what transformers does not."""

    loader: type[PlantedLoader] = PlantedLoader
    trained_by: Any = WholeModel

    def __init__(self, path: Path, **given: Any) -> None:
        super().__init__(path, parts=self.exact_parts(), **given)
        self.updates = PlantedUpdates(self.updates, self.before_update)

    def exact_parts(self) -> TorchParts:
        loader = partial(self.loader, change=self.change, plant=self.plant_in_cut)
        return TorchParts(loader, self.trained_by)

    def change(self, model: Any) -> Any:
        """Return a model that was read, or its shell, with what transformers rounds in float64."""
        if self._dtype == torch.float64:
            compute_in_float64(model)
        return model

    def plant_in_cut(self, model: Any, axes: Any) -> None:
        self.axes = axes
        self.plant(model)

    def plant(self, model: Any) -> None:
        """Put the bug into a model that has been cut; none by default."""

    def before_update(self, denominator: float) -> float:
        """Put the bug into gradients; return what the optimizer divides them by."""
        return denominator


class ExactPictures(Exact):
    """Computes norms of all families, and angles of Qwen's towers, in float64."""

    def change(self, model: Any) -> Any:
        return exact_angles(exact_norms(super().change(model)))


# --- bugs of others, planted ----------------------------------------------------------------------


class Averaged(Exact):
    """Gradients are averaged over ranks: what FSDP2 does unless told."""

    def plant(self, model: Any) -> None:
        for each in iterate_sharded_modules(model):
            each.set_gradient_divide_factor(float(self.peers.size))


class ReducedTwice(Exact):
    """What is reduced already is reduced again."""

    def plant(self, model: Any) -> None:
        for each in iterate_sharded_modules(model):
            each.set_all_reduce_hook(again)


def again(reduced: Tensor) -> None:
    dist.all_reduce(reduced)


class OwnCounts(Exact):
    """Gradients of all ranks are divided by the tokens of one."""

    def _update(self, totals: StepTotals, rate: float) -> tuple[float, str]:
        return super()._update(StepTotals(totals.config, totals.ranks[:1]), rate)


class OwnMetrics(Exact):
    """Metrics of all ranks are divided by the tokens of one."""

    def _finish(self) -> StepResult:
        own = self._step.own()
        result = super()._finish()
        by_own = {name: each * result.tokens / own.tokens for name, each in result.metrics.items()}
        return msgspec.structs.replace(result, metrics=by_own)


class LateRate(Exact):
    """The learning rate is looked up after the step was counted."""

    def _finish(self) -> StepResult:
        result = super()._finish()
        late = learning_rate(self._config.optimizer, self.steps_applied, self._total_steps)
        return msgspec.structs.replace(result, learning_rate=late)


class Unsharded(Exact):
    """Every rank trains all the data."""

    everything = True


class Scattered(Exact):
    """Every rank trains data of its own, those of one replica, too."""


class CountsCopies(Exact):
    """The gradient norm counts the copies of a weight that every tensor rank has whole."""

    def __init__(self, path: Path, **given: Any) -> None:
        super().__init__(path, **given)
        self.optimizer: Any = self.updates

    def before_update(self, denominator: float) -> float:
        self.optimizer.updates._mesh = None  # noqa: SLF001 -- whom it asks which copies count
        return denominator


class KeepsPartsOfNorms(Exact):
    """Nobody adds up the gradients of norms of queries and keys, which see some heads each."""

    def plant(self, model: Any) -> None:
        for name, module in model.named_modules():
            if name.endswith(("q_norm", "k_norm")):
                module.forward = partial(of_own_heads, module)


def of_own_heads(norm: Any, heads: Any) -> DTensor:
    """A norm whose weight gets the gradient of this rank's heads, as if it were that of all."""
    weight, local = norm.weight.to_local(), heads.to_local()
    normed = nn.functional.rms_norm(local, norm.normalized_shape, weight, norm.eps)
    return DTensor.from_local(normed, heads.device_mesh, heads.placements, run_check=False)


class KeepsPartsOfHidden(Exact):
    """Nobody adds up the gradients that the ranks' rows of the output head give the hidden states."""

    def plant(self, model: Any) -> None:
        head: Any = model.get_output_embeddings()
        head.share = OwnGradients(head.share.cuts, head.share.rank, head.share.group)


class OwnGradients(VocabularyShare):
    """A share whose head's gradient is that of its own tokens."""

    def add_up(self, values: Tensor) -> Tensor:
        return values if values.ndim > 1 else super().add_up(values)


class KeepsPartsOfTotals(Exact):
    """Each rank divides by the sum over its own tokens."""

    def plant(self, model: Any) -> None:
        head: Any = model.get_output_embeddings()
        head.share = OwnTotals(head.share.cuts, head.share.rank, head.share.group)


class OwnTotals(VocabularyShare):
    """A share that is taken for the whole vocabulary, but for the tokens that are asked for."""

    def of_all(self, total_U: Tensor, entropy_U: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return total_U, entropy_U


class CountsReplicaTwice(Exact):
    """Every tensor rank adds the tokens of its replica to those of the step."""

    def __init__(self, path: Path, **given: Any) -> None:
        super().__init__(path, **given)
        self.passes.facts = replace(self.passes.facts, leads_replica=True)


KINDS = {
    each.__name__: each
    for each in (
        Exact,
        ExactPictures,
        Averaged,
        ReducedTwice,
        OwnCounts,
        OwnMetrics,
        LateRate,
        Unsharded,
        Scattered,
        CountsCopies,
        KeepsPartsOfNorms,
        KeepsPartsOfHidden,
        KeepsPartsOfTotals,
        CountsReplicaTwice,
    )
}


# --- failures ---------------------------------------------------------------------------------------


class Injected(Exception):
    """What a failing part raises."""


@dataclass(frozen=True)
class FailingCutting(MicrobatchPlanner):
    """Fails where a rank's groups are read."""

    fail_at: Callable[[str], None]

    def cut(self, *arguments: Any, **keywords: Any) -> Any:
        self.fail_at("read")
        return super().cut(*arguments, **keywords)


class Failing(Exact):
    """Fails once, at one of its call sites, on some ranks."""

    site = ""
    ranks: tuple[int, ...] = ()
    forward_passes = 0  # before it fails

    def arm(self, site: str, ranks: Sequence[int], after: int) -> None:
        self.site, self.ranks, self.forward_passes = site, tuple(ranks), after

    def _due(self, site: str) -> bool:
        if site != self.site or self.peers.rank not in self.ranks:
            return False
        self.forward_passes -= 1
        if self.forward_passes >= 0:
            return False
        self.site = ""
        return True

    def _fail_at(self, site: str) -> None:
        if self._due(site):
            raise Injected(site)

    def watch(self) -> None:
        layers: Any = self._model.model.layers
        layers[-1].register_forward_pre_hook(lambda *_: self._fail_at("forward"))
        planner = self.own_passes.planner
        sizes = {each.name: getattr(planner, each.name) for each in fields(planner)}
        self.own_passes.planner = FailingCutting(**sizes, fail_at=self._fail_at)

    def _loss(self, inputs: LossTokens, config: LossConfig) -> LossSums:
        self._fail_at("loss")
        if self._due("backward"):
            inputs.logprobs_N.register_hook(raise_injected)
        return super()._loss(inputs, config)

    def _update(self, totals: StepTotals, rate: float) -> tuple[float, str]:
        self._fail_at("finish")
        return super()._update(totals, rate)


def raise_injected(_: Tensor) -> None:
    raise Injected("backward")
