"""Interface of plug-ins that add the tensors of a release to the weights that an engine loaded."""

from collections.abc import Callable
from typing import Protocol, cast

from torch import nn

from offbeat.doors import find_plugin
from offbeat.weight_sync.fingerprints import ReadBack
from offbeat.weight_sync.manifest import Manifest
from offbeat.weight_sync.receiver import Target


class LoadedWeights(Protocol):
    """Weights of an engine as it loaded them."""

    def make_target(self, epoch: int, manifest: Manifest) -> tuple[Target, Callable[[], ReadBack]]:
        """Return a target for releases of one layout, and a function that reads back its weights.

        Raises:
            TransferRefused: The release belongs to a different model than the engine loaded.
        """
        ...


class ReleaseKind(Protocol):
    """Applies the releases of one kind, which ``Adapter.kind`` names."""

    def open_base(self, module: nn.Module, digest: str) -> LoadedWeights:
        """Return the weights of a module before any release replaces them.

        Args:
            module: Model of the engine.
            digest: Digest of the files from which it was loaded.
        """
        ...


def find_release_kind(kind: str) -> ReleaseKind:
    """Return the plug-in that applies releases of a kind.

    Raises:
        PluginUnusable: No package provides it, or its import fails.
    """
    return cast("ReleaseKind", find_plugin("release", kind))
