"""New weights beside those a model computes with, without an engine."""

import importlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def shadow_model() -> Any:
    """The module under test. Imported by each test, not by this file: vLLM's imports warn."""
    return importlib.import_module("offbeat.plugins.vllm.transfer_engine")


class Model(nn.Module):
    """Loads as models of vLLM do: by name, through the loader of each parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2, bias=False)])
        self.none = nn.ModuleList()
        self.norm = nn.LayerNorm(2)
        self.requires_grad_(requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", Tensor.copy_)
            loader(parameter, weight)


@pytest.fixture
def model() -> Model:
    made = Model()
    shadow_model().layerwise.record_metadata_for_reloading(made)
    return made


def values(of: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.state_dict().items()}


def others(of: nn.Module) -> dict[str, Tensor]:
    return {name: torch.randn_like(tensor) for name, tensor in of.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_is_what_it_was_until_the_exchange_and_the_new_one_after_it(model: Model) -> None:
    for _ in range(3):
        before, after, computed = values(model), others(model), dict(model.named_parameters())
        shadow = shadow_model().ShadowModel(model)
        for each in after.items():
            shadow.load([each])
            assert equal(values(model), before)
        shadow.close()
        assert equal(values(model), before)
        shadow.exchange()
        assert equal(values(model), after)
        assert all(served is computed[name] for name, served in model.named_parameters())
        shadow.drop()
        assert equal(values(model), after)


def test_a_shadow_model_that_is_dropped_leaves_nothing(model: Model) -> None:
    before = values(model)
    shadow = shadow_model().ShadowModel(model)
    shadow.load(list(others(model).items())[:3])
    shadow.drop()
    assert equal(values(model), before)


def test_a_layer_that_got_nothing_stays_as_it_was(model: Model) -> None:
    before, after = values(model), others(model)
    shadow = shadow_model().ShadowModel(model)
    shadow.load((name, tensor) for name, tensor in after.items() if "layers.1" not in name)
    shadow.close()
    shadow.exchange()
    assert equal(values(model), after | {"layers.1.weight": before["layers.1.weight"]})


def test_what_was_exchanged_is_freed_at_once(model: Model) -> None:
    """Nobody waits for the collector: layers refer to themselves."""
    shadow = shadow_model().ShadowModel(model)
    shadow.load(others(model).items())
    shadow.close()
    shadow.exchange()
    old = [weakref.ref(served) for layer in shadow._twins.values() for served in layer.parameters()]  # noqa: SLF001
    assert len(old) > len(list(model.parameters()))
    shadow.drop()
    assert not [each for each in old if each() is not None]


def with_a_buffer(model: Model) -> None:
    model.norm.register_buffer("seen", torch.zeros(1))


def with_another_way_to_a_layer(model: Model) -> None:
    model.__dict__["shortcut"] = [model.norm]


def with_a_method_that_keeps_what_it_made(model: Model) -> None:
    class Stateful(shadow_model().QuantizeMethodBase):
        def create_weights(self, *args: object, **kwargs: object) -> None: ...
        def apply(self, *args: object, **kwargs: object) -> Tensor: ...

    model.layers[0].__dict__["quant_method"] = Stateful()


def that_is_compiled(model: Model) -> None:
    model.__dict__["do_not_compile"] = False


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (with_a_buffer, "LayerNorm has buffers of the checkpoint"),
        (with_another_way_to_a_layer, "Model refers to layers outside of the tree"),
        (with_a_method_that_keeps_what_it_made, "Linear is computed by Stateful"),
        (that_is_compiled, "Model is compiled"),
    ],
)
def test_a_model_that_may_hold_weights_elsewhere_gets_no_twin(
    model: Model, made: Callable[[Model], None], said: str
) -> None:
    assert not shadow_model().obstacle(model)
    made(model)
    assert shadow_model().obstacle(model).startswith(said)
