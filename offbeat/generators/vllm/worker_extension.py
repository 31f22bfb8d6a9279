"""Added to vLLM's worker class: what a transactional weight sync needs of it.

vLLM imports this module by name, first thing in every worker: that is its hook for registering a
transfer engine, so this module does something when it is imported.
"""

# pyright: reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from offbeat.generators.vllm.arguments import TRANSFER_BACKEND
from offbeat.generators.vllm.transfer_engine import (
    Placed,
    ShmTransferEngine,
    Staged,
    place_back,
)


class WorkerExtension:
    """Calls of ``AsyncLLM.collective_rpc``. The other attributes are the worker's own."""

    weight_transfer_engine: Any
    _weight_update_active: bool

    def ws_stage(self, epoch: int, chunks: Staged) -> None:
        """Begin to verify the chunks, beside decoding."""
        self.weight_transfer_engine.stage(epoch, chunks)

    def ws_plan(self, chunks: list[list[Placed]], in_place: bool) -> str:  # noqa: FBT001 - a remote call
        """Learn what lies where, until told anew.

        Returns:
            Why updates cannot be prepared beside decoding; empty if they will be.
        """
        return self.weight_transfer_engine.plan(chunks, in_place=in_place)

    def ws_abort(self) -> int:
        """End an update that cannot be finished; the worker lives.

        Returns:
            How many layers of the model were open: if any was, its weights may be mixed.
        """
        engine = self.weight_transfer_engine
        opened = place_back(engine.model)
        engine.forget()
        engine.reset_weight_update_target()
        self._weight_update_active = False
        return opened


if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it has no getter
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, ShmTransferEngine)
