"""Methods that a transactional weight sync adds to vLLM's worker class.

vLLM imports this module by name at the start of every worker, which is its hook for registering a
transfer engine. So importing this module has a side effect.
"""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from offbeat.plugins.vllm.arguments import TRANSFER_BACKEND
from offbeat.plugins.vllm.load_comparison import Comparison, Extent, Placed
from offbeat.plugins.vllm.shared_chunks import Staged
from offbeat.plugins.vllm.transfer_engine import ShmTransferEngine, place_back
from offbeat.plugins.vllm.worker_fetch import Checkpoint, Regions


class WorkerExtension:
    """Methods for ``AsyncLLM.collective_rpc``. Other attributes are the worker's own."""

    vllm_config: Any
    weight_transfer_engine: Any
    _weight_update_active: bool

    def ws_stage(self, epoch: int, chunks: Staged) -> None:
        """Begin to verify the chunks, concurrently with decoding."""
        engine = self.weight_transfer_engine
        engine.begin(epoch, len(chunks), lambda _: engine.shared_chunks.verify(epoch, chunks))

    def ws_plan(self, chunks: list[list[Placed]], in_place: bool) -> str:  # noqa: FBT001 - a remote call
        """Store the layout of the chunks, until the next call.

        Returns:
            Reason why updates cannot be prepared concurrently with decoding; empty if they can.
        """
        engine = self.weight_transfer_engine
        engine.shared_chunks.plan(chunks)
        return engine.choose(in_place=in_place)

    def ws_record(self, checkpoint: Checkpoint) -> Regions | str:
        """Record which regions of the model's files this worker loads.

        Returns:
            The regions, or the reason why they are unknown.
        """
        return self.weight_transfer_engine.worker_fetch.record(self.vllm_config, checkpoint)

    def ws_plan_fetch(self, member: str, manifest: bytes, routes: bytes, in_place: bool) -> str:  # noqa: FBT001 - a remote call
        """Store the layout of releases that this worker fetches itself, until the next call.

        Returns:
            As ``ws_plan``.
        """
        engine = self.weight_transfer_engine
        engine.worker_fetch.introduce(member, manifest, routes)
        return engine.choose(in_place=in_place)

    def ws_fetch(
        self, epoch: int, groups: int, digests: list[str], senders: bytes, changes: bytes
    ) -> None:
        """Begin to fetch this worker's part of a release, or its changes, during decoding."""
        engine = self.weight_transfer_engine
        fetch = engine.worker_fetch.fetch
        engine.begin(epoch, groups, lambda gone: fetch(epoch, digests, senders, gone, changes))

    def ws_compare(self, placed: list[Placed], extent: Extent) -> Comparison:
        """Compare this worker's weights with a chunk of the release in shared memory."""
        engine = self.weight_transfer_engine
        return engine.compare(lambda: engine.shared_chunks.read(placed, extent))

    def ws_compare_fetched(self, epoch: int, group: int) -> Comparison:
        """Compare this worker's weights with a group of the tensors that it has fetched."""
        engine = self.weight_transfer_engine
        return engine.compare(lambda: engine.worker_fetch.arrived(epoch, group))

    def ws_abort(self) -> int:
        """End an update that cannot be finished. The worker stays alive.

        Returns:
            Number of layers that were open. If it is above 0, the weights may be a mixture.
        """
        engine = self.weight_transfer_engine
        opened = place_back(engine.model)
        engine.forget()
        engine.reset_weight_update_target()
        self._weight_update_active = False
        return opened


if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - it has no getter
    WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, ShmTransferEngine)
