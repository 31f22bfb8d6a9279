"""vLLM's weight transfer: loads the weights that one of two sources brings to this worker.

    actor                                  worker                               decoding
    fills its StagingArea                  (``SharedChunks``)
    ws_plan                   ---------->  stores the places of tensors
    ws_stage(digests)         ---------->  a thread hashes the area             goes on
                              <----------  report: verified

or, if the worker's loader was recorded (``WorkerFetch``):
    ws_plan_fetch             ---------->  selects its buckets, from then on
    ws_fetch(senders)         ---------->  a thread fetches and verifies them   goes on
                              <----------  report: verified

concurrent with decoding, if the model can have a shadow copy:
    start_weight_update       ---------->  the thread opens a copy of the model     goes on
    update_weights(chunk)...  ---------->  it loads and packs the chunk's tensors   goes on
                              <----------  report: prepared
    finish_weight_update      ---------->  model and copy are exchanged            stands still

in place:
    start_weight_update       ---------->  opens the model's layers                 stands still
    update_weights(chunk)...  ---------->  loads the tensors of one chunk           stands still
    finish_weight_update      ---------->  closes the layers                        stands still

An error before ``finish_weight_update``, or in place before ``start_weight_update``, leaves the
model untouched. Reports go through ``verdicts``, because a reply to a call would block the worker.

The shadow copy is a second set of a model's layers. It is loaded with new weights while the first
one decodes.

    opened -> filled by the model's own loaders -> closed, packed as the kernels want them ->
    exchanged

vLLM loads, fuses, pads and packs by layer. All of that happens here, in layers that are not in use.
Only a few hundred references are exchanged while decoding is paused. The copy doubles the memory of
the weights, so it is for engines on CPU. Every layer must hold all of its computed state itself, so
the copy is for models that are not quantized (``obstacle``).
"""

# pyright: basic, reportMissingImports=false, reportPrivateUsage=false
# vllm lives in an environment of its own (docs/vllm.md).
# ruff: noqa: SLF001 -- torch and vLLM have no public name for a module's tensors and their loading

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

from offbeat.plugins.vllm.load_comparison import Comparison
from offbeat.plugins.vllm.read_back import NotComparable, WorkerWeights
from offbeat.plugins.vllm.shared_chunks import SharedChunks
from offbeat.plugins.vllm.verdicts import PREPARED, VERIFIED, VerdictSender
from offbeat.plugins.vllm.worker_fetch import Groups, WorkerFetch
from offbeat.weight_sync.errors import TransferFailed, TransferRefused

Pair = tuple[nn.Module, nn.Module]
"""A live layer, and its shadow."""

_TREE: Final = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_STATELESS: Final = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Quantization methods whose packed weights are attributes of the layer."""


class ShadowModel:
    """Copies of a model's layers, without weights. One thread at a time may use them."""

    def __init__(self, model: nn.Module) -> None:
        """Create the layers, ready to load weights. ``model`` is only read."""
        self._twins = {id(layer): _bare(layer) for layer in model.modules() if _is_copied(layer)}
        self._layers = [(live, self._twins[id(live)]) for live in _find_copied(model)]
        self._before = {id(live): dict(live.__dict__) for live, _ in self._layers}
        for live, twin in self._layers:
            for name, child in live._modules.items():
                twin._modules[name] = self._twins.get(id(child), child)
        self._model = self._twins[id(model)]
        self._tied = _find_tied(self._layers)
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

        A layer is packed once all of its tensors have arrived.
        """
        with torch.no_grad():
            self._model.load_weights(tensors)  # type: ignore[operator] -- every model of vLLM has it

    def close(self) -> None:
        """Pack the remaining layers, so that they can be exchanged.

        A layer that received nothing stays unchanged.
        """
        with torch.no_grad():
            for _, twin in self._own:
                info = layerwise.get_layerwise_info(twin)
                if info.can_load() and info.load_numel > 0:  # its padding is never filled
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

        Its layers refer to themselves, so the garbage collector would free them late.
        """
        for twin in self._twins.values():
            twin.__dict__.clear()
        self._before.clear()


def pack_tied(model: nn.Module) -> None:
    """Pack again the layers that share parameters loaded through another layer."""
    for layer, _ in _find_tied([(layer, layer) for layer in model.modules()]):
        _pack(layer)


def _pack(layer: nn.Module) -> None:
    method: Any = layer.__dict__.get("quant_method")
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(layer)


def obstacle(model: nn.Module) -> str:
    """Return why a model cannot have a shadow copy, or an empty string if it can."""
    for layer in model.modules():
        problems = _of_a_copied(layer) if _is_copied(layer) else _of_a_shared(layer)
        for problem in problems:
            return f"{type(layer).__name__} {problem}"
    for layer, owner in _find_tied([(layer, layer) for layer in _find_copied(model)]):
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


def _find_copied(model: nn.Module) -> Iterator[nn.Module]:
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


def _find_tied(layers: Sequence[Pair]) -> list[tuple[nn.Module, nn.Module]]:
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
        own = to_meta_tensor(tensor) if name in shapes else _copy(tensor)
        attributes = {name: _bound_to(twin, value, live) for name, value in vars(own).items()}
        vars(own).update(attributes)
        twin._parameters[name] = own  # type: ignore[assignment] -- of a parameter's class
    layerwise.initialize_online_processing(twin)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.data.clone()
    copy.__class__ = tensor.__class__
    vars(copy).update(vars(tensor))
    return copy


def _bound_to(twin: nn.Module, value: Any, live: nn.Module) -> Any:  # noqa: ANN401 - an attribute
    """Rebind a loader of the live layer to its shadow; return any other value unchanged."""
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


class ExpertKernels:
    """Kernels of a model's experts, removed from the model until they are given back.

    Weights loaded meanwhile are packed as at the first load. Nothing may be computed meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remove the kernels from the model."""
        found = dict[int, UnquantizedFusedMoEMethod]()
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                found[id(method)] = method
        self._kernels = [(method, method.moe_kernel) for method in found.values()]
        for method, _ in self._kernels:
            method.moe_kernel = None

    def give_back(self) -> None:
        """Put the kernels back. They refer to no weights, or to ones written in place."""
        for method, kernel in self._kernels:
            method.moe_kernel = kernel


T = TypeVar("T")

_NOBODY: Final = -1  # epoch of no transfer


@dataclass
class StagingInfo(WeightTransferInitInfo):
    """Location of the shared memory, and of the pipe for verdicts."""

    path: str
    nbytes: int
    verdicts: str


@dataclass
class ChunkInfo(WeightTransferUpdateInfo):
    """Update request of vLLM's interface: the index of one planned chunk."""

    epoch: int
    index: int


class ShmTransferEngine(WeightTransferEngine[StagingInfo, ChunkInfo]):
    """Verifies the digests of a source's chunks in this worker, then loads them."""

    init_info_cls = StagingInfo
    update_info_cls = ChunkInfo

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - vLLM's to define
        super().__init__(*args)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="weights")  # in order
        self._verdicts: VerdictSender | None = None
        self._rank = self.parallel_config.rank
        self._obstacle: str | None = None  # reason against a shadow copy; None: not determined yet
        self._epoch, self._chunks, self._next = _NOBODY, 0, 0
        self.shared_chunks = SharedChunks(self._rank)
        self.worker_fetch = WorkerFetch(self._rank, _own_device())
        self._given_up = threading.Event()  # of the open transfer
        self._verified: Future[Groups] | None = None
        self._groups: Groups = ()  # tensors of the open transfer, by chunk
        self._twin: Future[ShadowModel] | None = None  # of the open transfer
        self._prepared: Future[None] | None = None
        self._in_place = True
        self._kernels: ExpertKernels | None = None  # removed from the model by an open update
        self._loading = ""  # name of the last tensor passed to a model

    def init_transfer_engine(self, init_info: StagingInfo) -> None:
        """Map the actor's shared memory. The actor calls it again whenever the memory has grown."""
        self.shared_chunks.map(init_info.path, init_info.nbytes)
        if self._verdicts is not None:
            self._verdicts.close()
        self._verdicts = VerdictSender(init_info.verdicts, self._rank)

    # --- before anything is opened ------------------------------------------------------------------

    def choose(self, *, in_place: bool) -> str:
        """Choose how the releases of a new layout are loaded.

        Return why loading concurrently with decoding is impossible, or an empty string.
        """
        if self._obstacle is None:
            on_cpu = self.device.type == "cpu"
            self._obstacle = obstacle(self.model) if on_cpu else "a GPU has no room twice"
        problem = "it is to be in place" if in_place else self._obstacle
        self._in_place = bool(problem)
        return problem

    def begin(self, epoch: int, chunks: int, bring: Callable[[threading.Event], Groups]) -> None:
        """Begin to bring and verify a release.

        Args:
            epoch: Epoch of the transfer.
            chunks: Number of chunks in which the tensors come.
            bring: Returns the verified tensors by chunk, in the background thread. The event is set
                when the transfer has been given up.
        """
        self.forget()
        self._epoch, self._chunks = epoch, chunks
        given_up = self._given_up = threading.Event()
        self._verified = self._do_beside(VERIFIED, lambda: bring(given_up))

    def _do_beside(self, work: str, does: Callable[[], T]) -> Future[T]:
        """Run work in the background thread and report its result to the actor."""
        epoch, verdicts = self._epoch, self._verdicts
        assert verdicts is not None  # noqa: S101 -- for the type checker: the actor gives it first

        def run_and_report() -> T:
            try:
                done = does()
            except TransferRefused as refused:
                verdicts.send_refusal(epoch, work, refused)
                raise
            except TransferFailed as failure:
                verdicts.send_failure(epoch, work, failure)
                raise
            except Exception as error:
                said = f"{type(error).__name__} {error}".strip()
                verdicts.send_refusal(epoch, work, TransferRefused(epoch, work, said, "done"))
                raise
            verdicts.done(epoch, work)
            return done

        return self._beside.submit(run_and_report)

    # --- vLLM's three calls -------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        if self._verified is None:
            raise TransferRefused(_NOBODY, "staged transfer", "none", "one")
        self._groups = self._verified.result()  # the actor has waited for it
        self._verified = None
        if self._in_place:
            layerwise.initialize_layerwise_reload(self.model)
            if self.device.type == "cpu":  # work-around: packed_experts
                self._kernels = ExpertKernels(self.model)
        else:
            self._twin = self._beside.submit(ShadowModel, self.model)

    def receive_weights(self, update_info: ChunkInfo) -> None:
        got, want = (update_info.epoch, update_info.index), (self._epoch, self._next)
        if got != want:
            raise TransferRefused(self._epoch, "epoch and chunk", str(got), str(want))
        self._next += 1
        if self._in_place:
            self._load(update_info, self.model.load_weights)
        else:
            self._prepare(update_info)

    def _prepare(self, info: ChunkInfo) -> None:
        """Load the chunk in the background thread, and close the shadow after the last chunk.

        After a failed chunk, later ones are skipped. The last one reports the error.
        """
        before, twin, last = self._prepared, self._twin, self._next == self._chunks
        assert twin is not None  # noqa: S101 -- for the type checker: it was started

        def load() -> None:
            if before is not None:
                before.result()
            if info.epoch != self._epoch:
                return  # given up in the meantime
            self._load(info, twin.result().load)
            if last:
                twin.result().close()

        self._prepared = self._do_beside(PREPARED, load) if last else self._beside.submit(load)

    def _load(self, info: ChunkInfo, load: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> None:
        try:
            load(self._tensors(info.index))
        except Exception as error:  # wrapped: vLLM passes on only its text, maybe empty
            where = f"chunk {info.index}, tensor {self._loading}, in worker {self._rank}"
            said = f"{type(error).__name__} {error}".strip()
            raise TransferRefused(info.epoch, where, said, "loaded") from error

    def _tensors(self, index: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._groups[index]:
            self._loading = name
            yield name, tensor.to(self.device)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.device.type == "cpu":  # work-around: no_accelerator_to_synchronize
            self.receive_weights(self.parse_update_info(update_info))
        else:
            super().update_weights(update_info)

    def finish_weight_update(self) -> None:
        if self._next != self._chunks:
            raise TransferRefused(self._epoch, "chunks", str(self._next), str(self._chunks))
        if self._in_place:
            layerwise.finalize_layerwise_reload(self.model, self.model_config)
            if self.device.type == "cpu":  # work-around: tied_head
                pack_tied(self.model)
        elif self._twin is not None and self._prepared is not None:
            self._prepared.result()  # the actor has waited for it
            self._twin.result().exchange()
        self.forget()
        torch.cuda.empty_cache()  # of tensors that were loaded; nothing without CUDA

    # --- comparison -------------------------------------------------------------------------------

    def compare(self, read: Callable[[], Iterable[tuple[str, Tensor]]]) -> Comparison:
        """Compare the model's weights with tensors of the served release."""
        recording = self.worker_fetch.recording
        if recording is None:
            return ["its loader was not recorded"]
        try:
            found = WorkerWeights(self.model, recording).first_difference(read())
        except NotComparable as problem:
            return [str(problem)]
        return [] if found is None else list(found)

    # --- the end of a transfer ----------------------------------------------------------------------

    def forget(self) -> None:
        """End the open transfer; free its shadow in the background thread."""
        if self._twin is not None:
            self._beside.submit(_drop, self._twin)
        if self._kernels is not None:
            self._kernels.give_back()
        self._given_up.set()
        self._epoch, self._chunks, self._next = _NOBODY, 0, 0
        self._verified = self._twin = self._prepared = self._kernels = None
        self._groups = ()

    def shutdown(self) -> None:
        self._beside.shutdown(cancel_futures=True)


def _own_device() -> str:
    """Return the device of this worker, which vLLM has made current in this thread."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _drop(twin: Future[ShadowModel]) -> None:
    if twin.exception() is None:
        twin.result().drop()


def place_back(model: nn.Module) -> int:
    """Close every layer that an update left open, with its previous tensors; return their number.

    Layers that the update had completed keep the new values. The model is then a mixture that can
    run, and a complete update makes it exact.
    """
    opened = 0
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
            opened += 1
        info.reset()
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    layerwise.LOADING_LAYERS.clear()
    return opened
