"""Server of a vLLM engine.

Also sets the environment variables that vLLM reads in an engine's process.
"""

import asyncio
import contextlib
import os
from collections.abc import Generator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import structlog

from offbeat.config.base import of_kind
from offbeat.generators.embedded.request import RequestLimits
from offbeat.generators.end_tokens import end_ids_of, warn_of_end_ids
from offbeat.generators.engine_server import EngineServer, LoadOutcome
from offbeat.generators.incoming import IncomingRelease
from offbeat.generators.spec import EngineSpec
from offbeat.messages.failures import DeadlineExceeded
from offbeat.messages.fences import Fence
from offbeat.messages.weights import EngineState, WeightRelease
from offbeat.models.media_rules import media_rules
from offbeat.plugins.vllm.arguments import (
    TRANSFER_BACKEND,
    check_engine_args,
    collect_fields,
    engine_arguments,
)
from offbeat.plugins.vllm.calls import CallRefused
from offbeat.plugins.vllm.coverage import read_coverage
from offbeat.plugins.vllm.engine import VllmEngine
from offbeat.plugins.vllm.lazy_import import Library, load_library, vllm_version
from offbeat.plugins.vllm.load_comparison import NotCompared
from offbeat.plugins.vllm.owner_watch import own_engine_processes
from offbeat.plugins.vllm.rope import check_rope
from offbeat.plugins.vllm.section import VllmGeneratorConfig
from offbeat.plugins.vllm.served_families import check_family
from offbeat.plugins.vllm.staging import StagingArea
from offbeat.plugins.vllm.workarounds import TESTED, was_tested
from offbeat.run_files.sharing import WriteLocation
from offbeat.telemetry.logs import new_incarnation
from offbeat.weight_sync.background import in_thread
from offbeat.weight_sync.engine_layout import EngineLayout, write_layout
from offbeat.weight_sync.errors import TransferRefused
from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.served import ServedWeights, TensorDifference

if TYPE_CHECKING:
    from offbeat.plugins.vllm.adapter_base import FileBase


def environment(config: VllmGeneratorConfig) -> Mapping[str, str]:
    """Return the variables to set before vllm is imported. Child processes inherit them."""
    quiet = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # a model is a directory here
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device != "cpu":
        return quiet
    return {
        **quiet,
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is a share of the whole machine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and other engines use the same cores
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def prepare_environment(
    config: VllmGeneratorConfig, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set the variables that are unset. The user's own values have precedence."""
    for name, value in environment(config).items():
        environ.setdefault(name, value)
    if config.device == "cpu":
        environ["OMP_NUM_THREADS"] = str(config.threads)  # Ray has set it to its CPUs


log = structlog.stdlib.get_logger()

Started = tuple[Library, Any]
"""The parts of vLLM in use, and an ``AsyncLLM``."""


class VllmEngineServer(EngineServer):
    """Server of a vLLM engine. Its first reply comes after a real request has passed through."""

    _transfer_failures = (
        *EngineServer._transfer_failures,  # noqa: SLF001 -- its base
        CallRefused,
        DeadlineExceeded,
    )

    def __init__(
        self, spec: EngineSpec, place: WriteLocation, started: Started | None = None
    ) -> None:
        """Start an engine and its server.

        Args:
            spec: Specification of the engine.
            place: Where this process writes files of the run.
            started: A running engine to use unchanged.
        """
        from offbeat.plugins.vllm.weights import WeightUpdates

        self._place = place
        library, llm = started or start(spec)
        incarnation = new_incarnation(spec.name)
        config = of_kind(VllmGeneratorConfig, spec.generator)
        warn_of_end_ids(spec.model.path, config.sampling.stop_token_ids, config.sampling.stop)
        self._vllm = VllmEngine(
            library,
            llm,
            name=spec.name,
            incarnation=incarnation,
            end_ids=end_ids_of(spec.model.path),
            limits=RequestLimits(
                config.max_sequences,
                config.max_model_len,
                llm.model_config.get_vocab_size(),
                media_rules(llm.model_config.hf_config),
            ),
            config=config.vllm,
        )
        self._coverage = read_coverage(spec.model.path, spec.model.dtype, spec.quantize)
        self._base: FileBase | None = None  # opened for the first adapters
        self._updates = WeightUpdates(
            self._vllm,
            library,
            self._coverage,
            config.vllm,
            StagingArea(),
            vllm_version=vllm_version(),
            loads_files=spec.quantize is None,
        )
        self._warm_up: asyncio.Future[None] | None = None
        super().__init__(spec, self._vllm, incarnation)

    async def state(self, fence: Fence) -> EngineState:
        """Return the engine's state. The first answer waits for the warm-up.

        Raises:
            EngineUnavailable: The process is alive, but the engine in it is not.
        """
        self._guard.check(fence)
        await self._wait_for_warm_up()
        return await super().state(fence)

    async def close(self) -> None:
        await super().close()
        self._updates.close()

    async def _wait_for_warm_up(self) -> None:
        if self._warm_up is None:
            self._warm_up = asyncio.ensure_future(self._vllm.warm_up())
        await asyncio.shield(self._warm_up)

    @contextlib.contextmanager
    def _classify_failures(self, epoch: int, version: int) -> Generator[None]:
        try:
            with super()._classify_failures(epoch, version):
                yield
        finally:
            if not self._vllm.serving:
                self._version = self._digest = None

    async def _load_release(self, incoming: IncomingRelease) -> LoadOutcome:
        await self._wait_for_warm_up()
        epoch, release = incoming.epoch, incoming.release
        if incoming.is_initial:
            await self._updates.name_loaded(epoch, release.version)
            return LoadOutcome(0.0, None)
        ranks = incoming.ranks if release.manifest.pieces else None
        if ranks is not None and await self._updates.layout.get() is not None:
            if release.delta is None:
                self._kept_base.forget()  # the workers drop their own base before they fetch
            return LoadOutcome(*await self._updates.load(epoch, release, ranks))
        chunks = await incoming.bring_whole(self._explain_whole_tensors())
        if incoming.release.manifest.adapter is None:
            return LoadOutcome(*await self._updates.load(epoch, incoming.release, chunks))
        merged = await self._merge(epoch, incoming.release, chunks)
        return LoadOutcome(*await self._updates.load(epoch, merged, merged.chunks))

    async def layout(self, fence: Fence) -> EngineLayout | None:
        """Return the regions that each worker loads, or None if they could not be recorded.

        Raises:
            DeadlineExceeded: The workers did not answer in time.
            EngineUnavailable: The process is alive, but the engine in it is not.
        """
        self._guard.check(fence)
        await self._wait_for_warm_up()
        layout = await self._updates.layout.get()
        if layout is not None and self._place.files is None:
            try:
                await asyncio.to_thread(write_layout, layout, self._place.directory)
            except OSError as error:  # other commands plan without the layout
                log.warning("weights.layout_unwritten", engine=self._name, error=str(error))
        return layout

    async def _read_back(self, version: int, manifest: Manifest) -> ServedWeights:
        try:
            found = await self._first_difference(manifest)
        except (NotCompared, CallRefused, DeadlineExceeded) as problem:
            return ServedWeights(self._name, version, manifest, problem=str(problem))
        if self._version is None or self._manifest is None:
            return ServedWeights(self._name, None)
        version, manifest = self._version, self._manifest  # another release may be served by now
        differences = () if found is None else (found,)
        digests = manifest.chunk_digests
        return ServedWeights(self._name, version, manifest, digests, differences=differences)

    async def _first_difference(self, manifest: Manifest) -> TensorDifference | None:
        if manifest.adapter is not None:
            raise NotCompared("adapters were added to its matrices")
        if await self._updates.layout.get() is None:
            raise NotCompared(self._explain_whole_tensors())
        return await self._updates.first_difference()

    def _explain_whole_tensors(self) -> str:
        return f"the engine's layout is not recorded: {self._updates.layout.problem}"

    async def _merge(
        self, epoch: int, release: WeightRelease, chunks: tuple[Bytes, ...]
    ) -> WeightRelease:
        """Add adapters to the model that the engine was loaded from, next to decoding."""
        from offbeat.plugins.vllm.adapter_base import FileBase

        def merge() -> WeightRelease:
            try:
                self._base = self._base or FileBase(self._model_path, self._coverage)
            except OSError as error:
                raise TransferRefused(epoch, "base", str(error), "readable files") from error
            return self._base.whole(epoch, release, chunks)

        return await in_thread(f"adapters {epoch}", merge)


def warn_of_version(version: str) -> None:
    """Log a warning for an untested version of vLLM."""
    if not was_tested(version):
        log.warning("vllm.untested_version", version=version, tested=TESTED)


def start(spec: EngineSpec) -> Started:
    """Import vLLM, start the engine's processes and load the model: 20 s and more.

    Raises:
        VllmMissing: vLLM is not installed.
        EngineArgsRefused: The recipe's ``engine_args`` do not exist in this vLLM.
        RopeDiffers: vLLM would use different rotary frequencies than the trainer.
        PicturesUnserved: The model reads pictures, and vLLM does not serve its family here.
    """
    config = of_kind(VllmGeneratorConfig, spec.generator)
    check_rope(spec.model.path, config.max_model_len)
    check_family(spec.model.path)
    prepare_environment(config)
    own_engine_processes()  # work-around: surviving_core
    library = load_library()
    warn_of_version(vllm_version())
    check_engine_args(config.vllm.engine_args, collect_fields(library.AsyncEngineArgs))
    arguments = library.AsyncEngineArgs(
        **engine_arguments(spec),
        weight_transfer_config=library.WeightTransferConfig(backend=TRANSFER_BACKEND),
    )
    return library, _async_llm(library).from_engine_args(arguments)


def _async_llm(library: Library) -> Any:  # noqa: ANN401 - vLLM may not be installed
    """Return vLLM's engine class, or ``LabelledLLM`` if vLLM does not report versions of tokens."""
    if hasattr(library.CompletionOutput, "weight_versions"):
        return library.AsyncLLM
    from offbeat.plugins.vllm.labelled_llm import LabelledLLM

    return LabelledLLM
