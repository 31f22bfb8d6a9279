"""A second set of a model's layers, loaded with new weights while the first one decodes.

    opened -> filled by the model's own loaders -> closed, packed as the kernels want them ->
    exchanged

vLLM loads, fuses, pads and packs by layer. All of that happens here, in layers that are not in use;
while decoding is paused, only a few hundred references are exchanged. It needs room for the weights
twice, so it is for engines on CPU; and every layer must hold all of its computed state in the layer
itself, so it is for models that are not quantized (``obstacle``).
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# vllm lives in an environment of its own (docs/vllm.md).
# ruff: noqa: SLF001 -- torch and vLLM have no public name for a module's tensors and their loading

from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

Pair = tuple[nn.Module, nn.Module]
"""A live layer, and its shadow."""

_TREE: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_STATELESS: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Quantization methods whose packed weights are attributes of the layer."""


class ShadowModel:
    """Layers like those of a model, without weights. One thread at a time may use it."""

    def __init__(self, model: nn.Module) -> None:
        """Create the layers, ready to load weights. ``model`` is only read."""
        self._twins = {id(layer): _bare(layer) for layer in model.modules() if _is_copied(layer)}
        self._layers = [(live, self._twins[id(live)]) for live in _copied(model)]
        self._before = {id(live): dict(live.__dict__) for live, _ in self._layers}
        for live, twin in self._layers:
            for name, child in live._modules.items():
                twin._modules[name] = self._twins.get(id(child), child)
        self._model = self._twins[id(model)]
        self._tied = _tied(self._layers)
        tied = {id(twin) for twin, _ in self._tied}
        self._own = [
            (live, twin)
            for live, twin in self._layers
            if _parameters(live) and id(twin) not in tied
        ]
        for live, twin in self._own:
            _open(live, twin)
        for twin, owner in self._tied:
            twin._parameters["weight"] = owner._parameters["weight"]
        self._filled = list[Pair]()

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Pass tensors to the model's own loader.

        A layer is packed once all of its tensors have come.
        """
        with torch.no_grad():
            self._model.load_weights(tensors)  # type: ignore[operator] -- every model of vLLM has it

    def close(self) -> None:
        """Pack the remaining layers, ready to be exchanged.

        A layer that received nothing stays as it is.
        """
        with torch.no_grad():
            for _, twin in self._own:
                info = layerwise.get_layerwise_info(twin)
                if info.can_load() and info.load_numel > 0:  # it has padding that nothing fills
                    layerwise._layerwise_process(twin, info)
            self._filled = [pair for pair in self._own if not _on_meta(pair[1])]
            filled = {id(twin) for _, twin in self._filled}
            for twin, owner in self._tied:
                if id(owner) in filled:
                    twin._parameters["weight"] = owner._parameters["weight"]
                    _pack(twin)

    def exchange(self) -> None:
        """Swap: the model computes with the new weights, and the shadow holds the old ones."""
        for live, twin in self._filled:
            for name, parameter in live._parameters.items():
                other = twin._parameters.get(name)
                if parameter is not None and other is not None:
                    parameter.data, other.data = other.data, parameter.data
        for live, twin in self._layers:
            before = self._before[id(live)]
            for name, made in list(twin.__dict__.items()):
                if name not in _TREE and made is not before.get(name):
                    twin.__dict__[name] = live.__dict__.get(name)
                    live.__dict__[name] = made

    def drop(self) -> None:
        """Free the shadow's tensors.

        Its layers refer to themselves, so the collector would free them late.
        """
        for twin in self._twins.values():
            twin.__dict__.clear()
        self._before.clear()


def pack_tied(model: nn.Module) -> None:
    """Pack again the layers whose parameters were loaded through another layer."""
    for layer, _ in _tied([(layer, layer) for layer in model.modules()]):
        _pack(layer)


def _pack(layer: nn.Module) -> None:
    method: Any = layer.__dict__.get("quant_method")
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)


def obstacle(model: nn.Module) -> str:
    """Return why a model cannot have a shadow copy; empty if it can."""
    for layer in model.modules():
        problems = _of_a_copied(layer) if _is_copied(layer) else _of_a_shared(layer)
        for problem in problems:
            return f"{type(layer).__name__} {problem}"
    for layer, owner in _tied([(layer, layer) for layer in _copied(model)]):
        if [*_parameters(layer)] != ["weight"]:
            return f"{type(layer).__name__} shares parameters with {type(owner).__name__}"
    return ""


def _of_a_copied(layer: nn.Module) -> Iterator[str]:
    attributes = [value for name, value in layer.__dict__.items() if name not in _TREE]
    for method in attributes:
        if isinstance(method, QuantizeMethodBase) and type(method) not in _STATELESS:
            yield f"is computed by {type(method).__name__}"
    if layer.__dict__.get("do_not_compile") is False:
        yield "is compiled, and may hold what it is computed with elsewhere"
    if set(layer._buffers) - layer._non_persistent_buffers_set:
        yield "has buffers of the checkpoint"
    if _parameters(layer) and layer._buffers:
        yield "has parameters and buffers"
    if _refers_elsewhere(attributes, layer):
        yield "refers to layers outside of the tree"


def _of_a_shared(layer: nn.Module) -> Iterator[str]:
    if _parameters(layer) or layer._modules:
        yield "has parameters or layers"


def _is_copied(layer: nn.Module) -> bool:
    return not is_deferred_attention_layer(layer)


def _copied(model: nn.Module) -> Iterator[nn.Module]:
    return filter(_is_copied, model.modules())


def _bare(layer: nn.Module) -> nn.Module:
    """Return a copy of the layer without its tensors and children, which are set afterwards."""
    twin = layer.__class__.__new__(layer.__class__)
    twin.__dict__.update(layer.__dict__)
    twin.__dict__["_parameters"] = dict.fromkeys(layer._parameters)
    twin.__dict__["_modules"] = {}
    twin.__dict__["_buffers"] = dict(layer._buffers)
    twin.__dict__["_non_persistent_buffers_set"] = set(layer._non_persistent_buffers_set)
    return twin


def _parameters(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in layer._parameters.items() if tensor is not None}


def _tied(layers: Sequence[Pair]) -> list[tuple[nn.Module, nn.Module]]:
    """Return the shadows of layers with tied parameters, each with the shadow that owns them."""
    owners, tied = dict[int, nn.Module](), list[tuple[nn.Module, nn.Module]]()
    for live, twin in layers:
        for parameter in _parameters(live).values():
            if owners.setdefault(id(parameter), twin) is not twin:
                tied.append((twin, owners[id(parameter)]))
    return tied


def _open(live: nn.Module, twin: nn.Module) -> None:
    """Create tensors of the checkpoint's shapes, and loaders that wait until all have come."""
    info, recorded = (layerwise.get_layerwise_info(layer) for layer in (twin, live))
    info.restore_device = recorded.restore_device
    shapes: dict[str, Tensor] = recorded.restore_metadata[0]
    for name, tensor in {**_parameters(live), **shapes}.items():
        # A bias is never moved to the meta device: its loader writes at once.
        own = to_meta_tensor(tensor) if name in shapes else _copy_of(tensor)
        attributes = {name: _bound_to(twin, value, live) for name, value in vars(own).items()}
        vars(own).update(attributes)
        twin._parameters[name] = own  # type: ignore[assignment] -- of a parameter's class
    layerwise.initialize_online_processing(twin)


def _copy_of(tensor: Tensor) -> Tensor:
    copy = tensor.data.clone()
    copy.__class__ = tensor.__class__
    vars(copy).update(vars(tensor))
    return copy


def _bound_to(twin: nn.Module, value: Any, live: nn.Module) -> Any:  # noqa: ANN401 - an attribute
    """Return a loader bound to the live layer rebound to its shadow; any other value as it is."""
    while getattr(value, "__name__", "") == "online_process_loader":
        value = value.__wrapped__
    owner = value.__self__ if isinstance(value, MethodType) else None
    if owner is layer_ref_sentinel or owner is live:
        return MethodType(value.__func__, twin)
    return value


def _on_meta(layer: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _parameters(layer).values())


def _refers_elsewhere(value: object, layer: nn.Module) -> bool:
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module) and value.__self__ is not layer
    if isinstance(value, dict):
        return _refers_elsewhere([*value.values()], layer)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_refers_elsewhere(each, layer) or _is_module(each) for each in value)
    return _is_module(value)


def _is_module(value: object) -> bool:
    return isinstance(value, nn.Module)
