"""Defines section ``sync`` of a recipe: one model for each transport, of the core and of plug-ins."""

from typing import TYPE_CHECKING, Literal

from offbeat.config.base import choice_of
from offbeat.config.sections.sync_base import BaseSyncConfig
from offbeat.doors import plugins_of


class ObjectStoreSyncConfig(BaseSyncConfig):
    """Send through Ray's object store: shared memory on one machine, one copy per machine on a cluster."""

    transport: Literal["object_store"] = "object_store"
    """Path of the bytes."""


if TYPE_CHECKING:

    class PluginSyncConfig(BaseSyncConfig):
        """Section of a plug-in, as the core sees it."""

        transport: str

    SyncConfig = ObjectStoreSyncConfig | PluginSyncConfig
else:
    _BROUGHT = (transport.section for transport in plugins_of("transport").values())
    SyncConfig = choice_of("transport", "object_store", (ObjectStoreSyncConfig, *_BROUGHT))
