"""Experts on CPU, which vLLM packs for their kernel only where they have no kernel yet."""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)


class ExpertKernels:
    """Kernels of a model's experts, which the model is without until they are given back.

    What is loaded meanwhile is packed as at the first time. Nothing may be computed meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take the kernels out of the model."""
        found = dict[int, UnquantizedFusedMoEMethod]()
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                found[id(method)] = method
        self._kernels = [(method, method.moe_kernel) for method in found.values()]
        for method, _ in self._kernels:
            method.moe_kernel = None

    def give_back(self) -> None:
        """Put them back: they refer to no weights, or to those that an update writes in place."""
        for method, kernel in self._kernels:
            method.moe_kernel = kernel
