"""Defines section ``sync`` of a recipe: one model for each transport, of the core and of plug-ins."""

from typing import TYPE_CHECKING, Literal

from offbeat.config.base import make_choice
from offbeat.config.sections.sync_base import BaseSyncConfig
from offbeat.doors import find_plugins


class ObjectStoreSyncConfig(BaseSyncConfig):
    """Send through Ray's object store: shared memory on one machine, one copy per machine on a cluster."""

    transport: Literal["object_store"] = "object_store"
    """How weights get from the trainer to the engines."""


if TYPE_CHECKING:

    class PluginSyncConfig(BaseSyncConfig):
        """Section of a plug-in, as the core sees it."""

        transport: str

    SyncConfig = ObjectStoreSyncConfig | PluginSyncConfig
else:
    _BROUGHT = (transport.section for transport in find_plugins("transport").values())
    SyncConfig = make_choice("transport", "object_store", (ObjectStoreSyncConfig, *_BROUGHT))
