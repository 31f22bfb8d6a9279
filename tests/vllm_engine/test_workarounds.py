"""Each work-around is still needed with the vLLM that is installed. One that fails here may go."""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from releases import TINY, released, weights
from shared_engine import ANYTHING, PROMPT, Shared, TakenOver, ask, load, serve

from offbeat.plugins.vllm import workarounds
from offbeat.plugins.vllm.lazy_import import vllm_version
from offbeat.weight_sync.manifest import plan

SLEEP_S = 0.02


def test_the_installed_version_is_one_of_the_tested() -> None:
    assert workarounds.was_tested(vllm_version())


def test_unlabelled_tokens() -> None:
    """Only the versions of its range need it."""
    outputs = importlib.import_module("vllm.outputs")
    reported = hasattr(outputs.CompletionOutput, "weight_versions")
    assert reported is not workarounds.UNLABELLED_TOKENS.applies_to(vllm_version())


def test_pause_sleep(shared: Shared) -> None:
    """``pause_generation`` takes its sleep longer than the engine core's own pause."""

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 0)
        took = list[float]()
        for pausing in (
            shared.llm.pause_generation(mode="keep", clear_cache=True),
            shared.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True),
        ):
            began = time.perf_counter()
            await pausing
            took.append(time.perf_counter() - began)
            await shared.llm.resume_generation()
        assert took[0] >= SLEEP_S, "no sleep any more: call pause_generation again"

    shared.play(story)
    assert "asyncio.sleep" in inspect.getsource(type(shared.llm).pause_generation)


def test_no_accelerator_to_synchronize() -> None:
    with pytest.raises(RuntimeError):
        torch.accelerator.synchronize()


def test_a_loader_that_copies_twice_is_counted_once_without_a_workaround() -> None:
    """Else a layer of vLLM's would be taken for loaded before its last parameter."""
    reload = importlib.import_module("vllm.model_executor.model_loader.reload.meta")
    parameter = torch.nn.Parameter(torch.zeros(3))

    def load_twice(param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        param.data.copy_(loaded_weight)
        param.data.copy_(-param.data.exp())

    given = inspect.signature(load_twice).bind(parameter, torch.zeros(3))
    counted, _ = reload.get_numel_loaded(load_twice, given)
    assert counted == parameter.numel()
    assert parameter.tolist() == [-1.0] * 3


def test_packed_experts() -> None:
    """Experts that are loaded where a kernel is are not packed for it."""
    fused = importlib.import_module(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method"
    )
    packed, layer = list[object](), torch.nn.Module()
    layer.w13_weight, layer.w2_weight = (
        torch.nn.Parameter(torch.ones(2, 32, 32), requires_grad=False) for _ in range(2)
    )
    layer.__dict__["moe_config"] = None
    experts = SimpleNamespace(process_weights_after_loading=packed.append)
    method = SimpleNamespace(
        moe_kernel=SimpleNamespace(fused_experts=experts),
        unquantized_backend=fused.UnquantizedMoeBackend.CPU,
    )
    setup = fused.UnquantizedFusedMoEMethod._setup_kernel  # noqa: SLF001 -- what an update calls
    setup(method, layer, layer.w13_weight, layer.w2_weight)
    assert not packed, "an update packs them: leave the kernels where they are"


def test_seeded_chunked_prefill() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator("cpu").get_offset()
    assert "get_offset()" in inspect.getsource(
        importlib.import_module("vllm.v1.worker.gpu_model_runner")
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_silent_coverage(shared: Shared, in_place: bool) -> None:
    """vLLM finishes an update without a tensor, and serves what nobody sent."""

    async def story(actor: TakenOver) -> None:
        whole = await serve(actor, 1, 1)
        other = weights(2).release
        by_name = {spec.name: spec for spec in other.manifest.tensors}
        kept = [name for name in by_name if "layers.0.mlp.down_proj" not in name]
        manifest = plan([(name, by_name[name].shape, by_name[name].dtype) for name in kept], 2**30)
        packed = other.chunks[0].__class__((manifest.chunk_nbytes[0],), other.chunks[0].dtype)
        for spec in manifest.tensors:
            source = by_name[spec.name]
            data = other.chunks[source.chunk][source.offset : source.offset + source.nbytes]
            packed[spec.offset : spec.offset + spec.nbytes] = data
        coverage, actor.updates.coverage = actor.updates.coverage, ANYTHING
        ack = await load(actor, 2, released(2, manifest, [packed]))
        assert ack.version == 2, "vLLM refuses it: coverage may be left to vLLM"
        gap = weights(2).worst_error(PROMPT, await ask(actor))
        assert gap > 1e-2, "vLLM served the right weights without having them"
        actor.updates.coverage = coverage
        assert whole.release.version == 1
        healed = await serve(actor, 3, 3)
        assert healed.worst_error(PROMPT, await ask(actor)) < 1e-4

    shared.play(story, in_place=in_place)


def test_abort_update(shared: Shared) -> None:
    """After an update that raised, layers of the model lie on the meta device."""

    async def story(actor: TakenOver) -> None:
        await serve(actor, 1, 1)
        llm = shared.llm
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.collective_rpc("ws_stage", args=(2, []))
        await llm.start_weight_update()
        wrong = {"epoch": 2, "index": 7}
        with pytest.raises(Exception, match="epoch and chunk"):
            await llm.update_weights(shared.started[0].WeightTransferUpdateRequest(wrong))
        opened = (await llm.collective_rpc("ws_abort"))[0]
        assert opened > 0, "vLLM closes its layers itself: ws_abort may go"
        await llm.resume_generation()
        assert weights(1).worst_error(PROMPT, await ask(actor)) < 1e-4

    shared.play(story, in_place=True)


def test_tied_head(tied: Shared, tmp_path: Path) -> None:
    """vLLM's own reload leaves an output head that is the embedding as it was packed first."""
    model = Path(tied.spec.model.path)
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    weights(2, model=model).model.save_pretrained(tmp_path)

    async def story(actor: TakenOver) -> None:
        await load(actor, 1, weights(1, model=model).release)
        reload = {"weights_path": str(tmp_path)}
        await tied.llm.collective_rpc("reload_weights", kwargs=reload)
        gap = weights(2, model=model).worst_error(PROMPT, await ask(actor))
        assert gap > 1e-2, "vLLM packs the head again: pack_tied may go"
        await load(actor, 2, weights(3, model=model).release)
        assert weights(3, model=model).worst_error(PROMPT, await ask(actor)) < 1e-4

    tied.play(story)


ORPHAN = """
import os, pathlib, signal, sys
from offbeat.plugins.vllm.server import prepare_environment
from offbeat.plugins.vllm.section import VllmGeneratorConfig

def main():
    prepare_environment(VllmGeneratorConfig())
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    import psutil
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(
        model=sys.argv[1], enforce_eager=True, max_model_len=128, skip_tokenizer_init=True))
    pids = [p.pid for p in psutil.Process().children(recursive=True)
            if "VLLM::" in " ".join(p.cmdline())]
    pathlib.Path(sys.argv[2]).write_text(" ".join(map(str, pids)))
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""


def test_surviving_core(tmp_path: Path) -> None:
    """Without the watch, an engine lives on after its owner was killed."""
    script, told = tmp_path / "owner.py", tmp_path / "pids"
    script.write_text(ORPHAN)
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(TINY), str(told)]
    quiet = subprocess.DEVNULL  # no pipe: the survivors would keep it open
    subprocess.run(command, stdout=quiet, stderr=quiet, env=path, check=False)
    survivors = [psutil.Process(int(pid)) for pid in told.read_text().split()]
    try:
        _, alive = psutil.wait_procs(survivors, timeout=3)
        assert alive, "vLLM ends with its owner: owner_watch may go"
    finally:
        for each in survivors:
            if each.is_running():
                each.kill()
