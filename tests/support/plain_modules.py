"""Sends and receives the weights of a plain module, as trainer and engine do with their models."""

from torch import nn

from offbeat.weight_sync.chunks import GatheredSource, dtype_name, iterate_weights
from offbeat.weight_sync.dtypes import WirePolicy
from offbeat.weight_sync.receiver import ModuleTarget, Receiver


class ModuleSource(GatheredSource):
    """Packs the weights of a plain module."""

    def __init__(
        self, module: nn.Module, chunk_bytes: int, policy: WirePolicy | None = None
    ) -> None:
        metas = (
            (name, tuple(each.shape), dtype_name(each)) for name, each in iterate_weights(module)
        )
        super().__init__(metas, lambda: iterate_weights(module), chunk_bytes, policy)


class ModuleReceiver(Receiver):
    """Loads releases into a plain module. It serves the old weights until the commit."""

    def __init__(self, module: nn.Module, name: str = "receiver") -> None:
        super().__init__(ModuleTarget(module), name)
