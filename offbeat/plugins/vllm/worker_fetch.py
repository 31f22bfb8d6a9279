"""One vLLM worker's end of a reshard: it records its loader and fetches the regions it reads.

    record      its own load_weights, once                   regions of the checkpoint's tensors
    introduce   the layout of releases                       the buckets that hold any of them
    fetch       these buckets of one release, from the       tensors for the model's own loader,
                ranks that hold them; digests are verified   in the groups of all workers

A region that the recording does not name is never fetched and never read. The loader gets tensors
of full shape, in which only its own regions have values.
"""

# pyright: basic, reportMissingImports=false
# vllm lives in an environment of its own (docs/vllm.md).

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.utils import initialize_model

from offbeat.messages.text import first_line
from offbeat.plugins.vllm.read_back import NotComparable
from offbeat.weight_sync.buckets import BucketRoute
from offbeat.weight_sync.chunks import BucketMemory
from offbeat.weight_sync.delta_plugin import find_delta
from offbeat.weight_sync.engine_layout import find_needed_buckets, find_needs
from offbeat.weight_sync.errors import LayoutNotRecorded, TransferRefused
from offbeat.weight_sync.manifest import Manifest, release_digest
from offbeat.weight_sync.recorder import EngineRecording, Loader, record
from offbeat.weight_sync.region import Region, Shape
from offbeat.weight_sync.region_tensors import RegionTensors
from offbeat.weight_sync.transport import ReleaseHandle
from offbeat.weight_sync.transport_plugin import ReleaseReceiver, find_transport


def record_worker(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's VllmConfig
    checkpoint: Mapping[str, tuple[Shape, torch.dtype]],
) -> EngineRecording:
    """Record the loader of a worker after it has loaded its own model in this process.

    The layers of a served model are packed for the kernels and no longer show the checkpoint's
    layout. A second model of the same configuration, without memory, runs ``load_weights`` once.

    The parallel groups must exist. vLLM keeps one set of rotary tables per process. If they were
    made here first, they would be without memory for every later model.

    Args:
        vllm_config: The worker's configuration, which is not changed.
        checkpoint: Shape and dtype of every tensor of the model's files.

    Raises:
        LayoutNotRecorded: The loader writes a parameter by other means than copies, writes an
            element twice, or leaves one unwritten.
    """
    model = _without_memory(vllm_config)
    load: Loader = model.load_weights  # type: ignore[assignment] -- every model of vLLM has it
    return record(load, dict(model.named_parameters()), checkpoint)


def _without_memory(vllm_config: Any) -> nn.Module:  # noqa: ANN401 -- vLLM's VllmConfig
    """Return a model of this configuration without memory.

    Attention layers register themselves by name in the configuration, so the model gets a copy.
    """
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device("meta"):
            return initialize_model(config)
    finally:
        torch.set_default_dtype(dtype)


Checkpoint = list[tuple[str, list[int], str]]
"""Name, shape and dtype of every tensor of the model's files."""

Regions = list[tuple[str, list[int], list[int]]]
"""Name of a tensor, start and stop of a region of it."""

Groups = Sequence[Iterable[tuple[str, Tensor]]]

_MANIFEST = msgspec.msgpack.Decoder(Manifest)
_ROUTES = msgspec.msgpack.Decoder(tuple[str, tuple[BucketRoute, ...]])
_CHANGES = msgspec.msgpack.Decoder(tuple[str, Manifest])


class _Introduced(NamedTuple):
    """Layout of releases, and this worker's part of them."""

    manifest: Manifest
    transport: str
    routes: tuple[BucketRoute, ...]
    buckets: tuple[int, ...]
    made: RegionTensors


class _Arrived(NamedTuple):
    """This worker's part of a release, in memory borrowed until the next one has arrived."""

    epoch: int
    digest: str  # of the whole release
    buckets: tuple[BucketMemory, ...]


class WorkerFetch:
    """Recording, layout and receiver of one worker."""

    def __init__(self, rank: int, device: str) -> None:
        """``device``: device of the worker, as torch names it."""
        self._device = device
        self._rank, self._names = rank, tuple[str, ...]()
        self._regions = list[tuple[str, Region]]()
        self._receiver: ReleaseReceiver | None = None
        self._introduced: _Introduced | None = None
        self.recording: EngineRecording | None = None
        self._arrived: _Arrived | None = None  # of the last fetch

    def record(self, vllm_config: Any, checkpoint: Checkpoint) -> Regions | str:  # noqa: ANN401 -- vLLM's VllmConfig
        """Record this worker's loader; return the regions that it reads, or the problem."""
        if problem := _explain_unrecorded(vllm_config):
            return problem
        try:
            specs = {n: (tuple(shape), getattr(torch, dtype)) for n, shape, dtype in checkpoint}
            with set_current_vllm_config(vllm_config):
                recording = record_worker(vllm_config, specs)
        except LayoutNotRecorded as refused:
            return f"{refused.parameter} {refused.problem}"
        except Exception as error:  # noqa: BLE001 -- of the model's own code, run without memory
            return f"its loader raised {type(error).__name__}: {first_line(error)}"
        whole = ((name, Region.whole(specs[name][0])) for name in recording.misc)
        self._names, self._introduced, self.recording = tuple(specs), None, recording
        self._regions = [*recording.regions(), *whole]
        return [(n, list(region.start), list(region.stop)) for n, region in self._regions]

    def introduce(self, member: str, manifest: bytes, routes: bytes) -> int:
        """Store the layout of releases; return the bytes that this worker needs of each.

        Raises:
            TransferRefused: Releases of this layout lack tensors that this worker needs.
        """
        layout = _MANIFEST.decode(manifest)
        buckets = find_needed_buckets(0, layout, find_needs(self._names, self._regions))
        made = RegionTensors(layout, buckets)
        self._arrived = None
        transport, by_bucket = _ROUTES.decode(routes)
        self._introduced = _Introduced(layout, transport, by_bucket, buckets, made)
        if self._receiver is None:
            name, plugin = f"{member}.{self._rank}", find_transport(transport)
            self._receiver = plugin.make_receiver(name, self._rank, self._device)
        return sum(layout.chunk_nbytes[each] for each in buckets)

    def fetch(
        self,
        epoch: int,
        digests: list[str],
        senders: bytes,
        cancelled: threading.Event,
        changes: bytes = b"",
    ) -> list[Iterator[tuple[str, Tensor]]]:
        """Fetch and verify this worker's buckets of a release; return its tensors in groups.

        Args:
            epoch: Epoch of the transfer.
            digests: Digest of every bucket of the release.
            senders: The ranks' addresses.
            cancelled: When set, stop at the next bucket.
            changes: Base and manifest of the delta, if the ranks send only the changes; else empty.

        Raises:
            TransferRefused: The last fetch did not bring the base.
            TransferFailed: No rank that holds a bucket could send it.
            SenderGone: All ranks that hold a bucket have ended, or send a different release.
        """
        known, receiver = self._introduced, self._receiver
        if known is None or receiver is None:
            raise TransferRefused(epoch, "layout of the release", "unknown", "introduced")
        route = find_transport(known.transport).decode_senders(senders, known.routes)
        sealed = known.manifest.seal(digests)
        if changes:
            buckets = self._rebuilt(epoch, route, sealed, _CHANGES.decode(changes), cancelled)
        else:
            self._arrived = None
            got = receiver.receive(route, epoch, sealed, cancelled, needed=known.buckets)
            buckets = got.buckets
        self._arrived = _Arrived(epoch, release_digest(sealed, digests), buckets)
        return known.made.tensors(buckets)

    def _rebuilt(
        self,
        epoch: int,
        route: ReleaseHandle,
        release: Manifest,
        changes: tuple[str, Manifest],
        cancelled: threading.Event,
    ) -> tuple[BucketMemory, ...]:
        """Fetch the changes of this worker's buckets, and rebuild the release from their base."""
        known, receiver, held = self._introduced, self._receiver, self._arrived
        assert known is not None and receiver is not None  # noqa: S101, PT018 -- for the type checker
        base, manifest = changes
        if held is None or held.digest != base:
            has = "nothing" if held is None else held.digest
            raise TransferRefused(epoch, f"base in worker {self._rank}", has, base)
        parts = receiver.receive(
            route, epoch, manifest, cancelled, needed=known.buckets, release=release
        )
        return find_delta().rebuild_buckets(
            epoch, release, known.buckets, held.buckets, parts.buckets
        )

    def arrived(self, epoch: int, group: int) -> Iterator[tuple[str, Tensor]]:
        """Return a group of the tensors that the fetch of an epoch brought.

        Raises:
            NotComparable: A later fetch has replaced it, or there was none.
        """
        if self._introduced is None or self._arrived is None or self._arrived.epoch != epoch:
            raise NotComparable("the buckets of the served release are not in memory any more")
        return self._introduced.made.tensors(self._arrived.buckets)[group]


def _explain_unrecorded(vllm_config: Any) -> str:  # noqa: ANN401 -- vLLM's VllmConfig
    """Return why these settings prevent recording a layout, or an empty string if they do not."""
    parallel = vllm_config.parallel_config
    if vllm_config.quant_config is not None:
        return "layouts of quantized models are not recorded"
    if parallel.pipeline_parallel_size > 1 or parallel.enable_expert_parallel:
        return "layouts of pipeline and expert parallelism are not recorded"
    return ""
