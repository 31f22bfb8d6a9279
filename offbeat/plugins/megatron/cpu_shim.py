"""Replaces ``torch.cuda`` by the CPU, to run megatron-core in tests without CUDA.

The library names the device "cuda" in many places without a check. Inside ``cpu_stands_in`` those
names mean the CPU, streams and random states belong to the CPU, and ``Tensor.type()`` returns
"torch.cuda.FloatTensor". Only devices are replaced. Collectives run over gloo. Kernels that exist
only for CUDA (Transformer Engine, Apex) cannot be used.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false
# megatron-core has no types.

import contextlib
from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch.overrides import TorchFunctionMode

from offbeat.plugins.megatron.errors import UnsupportedLayout

_CPU: Final = torch.device("cpu")
_TYPES: Final = ("Float", "Half", "BFloat16", "Int", "Long", "Double", "Byte")


@contextlib.contextmanager
def cpu_stands_in(device: str) -> Generator[None]:
    """Make megatron-core compute on the CPU inside the block, in this thread.

    Args:
        device: Device of the trainer. Must be "cpu".

    Raises:
        UnsupportedLayout: It is another device, or this process sees CUDA.
    """
    if device != "cpu":
        raise UnsupportedLayout("trainer.device", device, "cpu, if the CPU is to stand in for CUDA")
    if torch.cuda.is_available():
        fix = "cuda: this process sees CUDA devices. To test without them, hide them"
        raise UnsupportedLayout("trainer.device", device, fix)
    with contextlib.ExitStack() as stack:
        for module, names in _replacements():
            for name, value in names.items():
                _replace(stack, module, name, value)
        stack.enter_context(_CudaMeansCpu())
        yield


class _Stream:
    """Stand-in for a CUDA stream. Work on a CPU is done when the call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...
    def wait_stream(self, _: object) -> None: ...
    def wait_event(self, _: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: object) -> "_Stream":
        return self


class _CudaMeansCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401 -- torch's own signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- whatever the function returns
        del types
        keywords = dict(kwargs or {})
        if _is_cuda(keywords.get("device")):
            keywords["device"] = _CPU
        if func is torch.Tensor.type and len(args) == 1 and not keywords:
            return func(*args).replace("torch.", "torch.cuda.")  # the library compares these names
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(each) else each for each in args)
        return func(*args, **keywords)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _nothing(*_: object, **__: object) -> None:
    """Do nothing: the CPU has nothing to wait for or to set."""


def _get_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _numbers(tensor: Any, as_numpy: bool = False, **_: object) -> Any:  # noqa: ANN401, FBT001, FBT002 -- the library's
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _replacements() -> list[tuple[ModuleType | type, Mapping[str, object]]]:
    cuda: dict[str, object] = {
        "current_device": lambda: _CPU,
        "synchronize": _nothing,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "manual_seed": torch.manual_seed,
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "stream": contextlib.nullcontext,
        "current_stream": _Stream,
        "default_stream": _Stream,
        **{f"{name}Tensor": getattr(torch, f"{name}Tensor") for name in _TYPES},
    }
    rng = MappingProxyType({"get_rng_state": _get_rng_state, "set_rng_state": _set_rng_state})
    return [
        (torch.cuda, cuda),
        (torch.cuda.random, rng),
        # Without this, torch would queue the call until CUDA starts, which never happens.
        (megatron_random, {"_lazy_call": _nothing}),
        # Without this, tensors would stay on the CPU although numbers were requested.
        (token_dispatcher, {"maybe_move_tensor_to_cpu": _numbers}),
        (torch.Tensor, {"cuda": lambda tensor, *_, **__: tensor}),
    ]


def _replace(
    stack: contextlib.ExitStack, owner: ModuleType | type, name: str, value: object
) -> None:
    if name in vars(owner):
        stack.callback(setattr, owner, name, vars(owner)[name])
    else:
        stack.callback(delattr, owner, name)
    setattr(owner, name, value)
