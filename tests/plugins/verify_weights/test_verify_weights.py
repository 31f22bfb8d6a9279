"""`offbeat verify-weights`: which tensor and region differ first, and in which leg."""

import asyncio
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner, Result

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.generator import EmbeddedGeneratorConfig, StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.generators.embedded.server import EmbeddedEngineServer
from offbeat.generators.spec import EngineSpec
from offbeat.launch.commands.main import app
from offbeat.launch.read_backs import answer, take_questions
from offbeat.messages.weights import WeightRelease
from offbeat.plugins.lora.adapters import Adapters
from offbeat.plugins.lora.section import LoraConfig
from offbeat.plugins.megatron.mapping import TensorBox
from offbeat.plugins.megatron.state import save_share
from offbeat.plugins.verify_weights.legs import Leg, LegResult, VerifiedRun, verify_engines
from offbeat.runs.directory import CONFIG, SUMMARY
from offbeat.trainers.checkpoints.store import CheckpointStore
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.weight_sync.chunks import GatheredSource
from offbeat.weight_sync.manifest import Adapter, release_digest
from offbeat.weight_sync.region import Region
from offbeat.weight_sync.served import ServedWeights
from tests.support.loading import load
from tests.support.random_groups import make_step
from tests.support.split_steps import run_step

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
    }
    Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).save_pretrained(path)
    return path


MakeTrainer = Callable[..., TorchTrainer]


@pytest.fixture
def trained(tiny: Path) -> MakeTrainer:
    """A trainer in bfloat16, whose float32 masters are one step away from the loaded model."""

    def make(lora: LoraConfig | None = None) -> TorchTrainer:
        if lora:
            pytest.importorskip("peft", reason="the extra `lora` is not installed")
        trainer = TorchTrainer(
            tiny,
            parts=TorchParts(trained=Adapters) if lora else None,
            trainer=TorchTrainerConfig.model_validate(
                {"optimizer": {"learning_rate": 1e-3}, "lora": lora}
            ),
            model=ModelConfig(path=str(tiny), dtype="bfloat16"),
            total_steps=10,
            max_model_len=64,
        )
        assert run_step(trainer, make_step(), LossSpec(), chunks=1).applied
        return trainer

    return make


def checkpoints_of(trainer: TorchTrainer, run: Path, version: int = 3) -> Path:
    """The state and the export of a version, as a run leaves them."""
    state = run / "checkpoints" / f"state_{version}"
    state.mkdir(parents=True)
    trainer.save_state(state)
    trainer.save(state.with_name(f"step_{version}"))
    return state


def plant(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    """Change a tensor of a directory of safetensors files."""
    file = next(file for file in folder.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    change(tensors[name])
    save_file(tensors, file, {"format": "pt"})


def verify(*args: object) -> Result:
    return CliRunner().invoke(app, ["verify-weights", *(str(arg) for arg in args)])


# --- export ---------------------------------------------------------------------------------------


def test_an_export_equals_the_state_of_its_version_rounded_as_it_is(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    state = checkpoints_of(trained(), tmp_path)
    for what in (state, tmp_path / "checkpoints" / "state_3"):
        result = verify(what)
        assert result.exit_code == 0, result.output
    assert "export" in result.output
    assert "equal" in result.output


def test_the_first_tensor_and_the_smallest_region_of_an_export_that_differ_are_named(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    state = checkpoints_of(trained(), tmp_path)
    plant(tmp_path / "checkpoints" / "step_3", QUERY, lambda each: each[3:5, 7].neg_())
    result = verify(state)
    assert result.exit_code == 1
    assert f"DIFFERS: {QUERY} [3:5, 7:8]: 2 of 1024 elements differ" in result.output


def test_another_directory_can_stand_for_the_export(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    state = checkpoints_of(trained(), tmp_path)
    result = verify(state, "--against", tiny)
    assert result.exit_code == 1
    assert "export" in result.output
    assert str(tiny) in result.output


def test_a_checkpoint_alone_is_refused_with_what_to_add(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    state = checkpoints_of(trained(), tmp_path)
    state.rename(state.with_name("state_4"))
    result = verify(state.with_name("state_4"))
    assert result.exit_code == 2
    assert "--against" in result.output


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    result = verify(tmp_path)
    assert result.exit_code == 2
    assert "holds no weights" in result.output


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_file_is_named_with_the_code_of_what_cannot_be_compared(
    tiny: Path, tmp_path: Path, name: str
) -> None:
    damaged = shutil.copytree(tiny, tmp_path / "damaged")
    (damaged / name).write_bytes(b"{{")
    found = verify(tiny, "--against", damaged)
    assert found.exit_code == 2
    assert str(damaged / name) in found.stderr
    assert found.stderr.count("\n") == 1


def test_a_damaged_shard_is_named_before_it_is_taken_for_a_weight_that_differs(
    tmp_path: Path, trained: MakeTrainer
) -> None:
    trainer, root = trained(), tmp_path / "checkpoints"
    CheckpointStore(root, trainer.identity, keep=2).save(3, "0" * 32, 1, trainer.save_state)
    trainer.save(root / "step_3")
    assert verify(root / "state_3").exit_code == 0
    shard = root / "state_3" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    found = verify(root / "state_3")
    assert found.exit_code == 2
    assert f"{shard} differs from the file that was written: its xxh3-128 digest is" in found.stderr
    assert found.stderr.count("\n") == 1


def test_the_adapters_of_an_export_are_compared_with_those_of_the_state(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    state = checkpoints_of(trained(LoraConfig(rank=4, alpha=8.0)), tmp_path)
    (tmp_path / CONFIG).write_text(
        f"steps: 3\nmodel: {{path: {tiny}, dtype: bfloat16}}\n"
        "trainer: {backend: torch, lora: {rank: 4, alpha: 8}}\n"
        "generator: {backend: embedded}\n"
    )
    result = verify(state)
    assert result.exit_code == 0, result.output
    assert result.output.count("equal") == 2  # the adapters, and the merged model
    name = f"base_model.model.{QUERY.removesuffix('.weight')}.lora_B.weight"
    export = tmp_path / "checkpoints" / "step_3"
    plant(export / "adapter", name, lambda each: each[0, 0].add_(1))
    plant(export, QUERY, lambda each: each[1, 1].add_(1))
    result = verify(state)
    assert result.exit_code == 1
    assert f"{name} [0:1, 0:1]" in result.output
    assert f"{QUERY} [1:2, 1:2]" in result.output


def test_masters_whose_weights_were_rounded_at_random_are_not_compared(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    trainer = trained()
    state = checkpoints_of(trainer, tmp_path)
    (tmp_path / CONFIG).write_text(
        f"steps: 3\nmodel: {{path: {tiny}, dtype: bfloat16}}\n"
        "trainer: {backend: torch, optimizer: {rounding: stochastic}}\n"
        "generator: {backend: embedded}\n"
    )
    result = verify(state)
    assert result.exit_code == 2, result.output
    assert "not compared" in result.output
    assert "DIFFERS" not in result.output
    wire = results_by_leg(tmp_path, served_after(trainer, tiny, tmp_path))[Leg.WIRE]
    assert "trainer.optimizer.rounding=stochastic" in wire.problem


def test_the_shares_of_several_megatron_ranks_are_one_state(tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(6, 4)
    state, export = tmp_path / "checkpoints" / "state_3", tmp_path / "checkpoints" / "step_3"
    for folder in (state, export):
        folder.mkdir(parents=True)
    for rank, (start, rows) in enumerate([(0, 4), (4, 2)]):
        region = Region((start, 0), (start + rows, 4))
        box = TensorBox("w", (6, 4), region, "local", Region.whole((rows, 4)))
        kinds = {"weight": {"local": weight[start : start + rows]}}
        save_share(state, rank, [box], kinds, 3)
    save_file({"w": weight.bfloat16()}, export / "model.safetensors")
    assert verify(state).exit_code == 0
    plant(export, "w", lambda each: each[5, 3].neg_())
    assert "w [5:6, 3:4]: 1 of 24 elements differ" in verify(state).output


# --- wire and load --------------------------------------------------------------------------------


class Torn(EmbeddedEngineServer):
    """An engine one of whose weights changes after the release was verified and committed."""

    def tear(self, name: str) -> None:
        with torch.no_grad():
            self._module.get_parameter(name)[0, 0] += 1


def served_after(
    trainer: TorchTrainer, model: Path, run: Path, version: int = 3, torn: str = ""
) -> ServedWeights:
    """What an engine answers after a release of a trainer's weights."""
    adapter: Adapter | None = (
        trainer.trained.adapter if isinstance(trainer.trained, Adapters) else None
    )
    source = GatheredSource(
        trainer.weights.metas(), trainer.weights.iterate, 8_000, adapter=adapter
    )
    chunks, digests = zip(*source.chunks(), strict=True)
    manifest = source.manifest.seal(digests)
    digest = release_digest(manifest, digests)

    async def main() -> ServedWeights:
        spec = EngineSpec(
            "generator-0",
            ModelConfig(path=str(model), dtype="bfloat16"),
            EmbeddedGeneratorConfig(),
            StubConfig(),
            0,
            str(run),
        )
        server = Torn(spec)
        try:
            before = await server.served_weights()
            assert (before.version, before.manifest) == (None, None)
            release = WeightRelease(version, digest, manifest, chunks, manifest.nbytes)
            await load(server, 1, release)
            if torn:
                server.tear(torn)
            return await server.served_weights()
        finally:
            await server.close()

    return asyncio.run(main())


def results_by_leg(run: Path, served: ServedWeights) -> dict[Leg, LegResult]:
    through_the_file = msgspec.msgpack.decode(msgspec.msgpack.encode(served), type=ServedWeights)
    results = verify_engines(VerifiedRun(run / "checkpoints" / "state_3"), [through_the_file])
    return {each.leg: each for each in results}


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8.0)], ids=["full", "adapters"])
def test_what_an_engine_serves_equals_its_release_and_the_checkpoint_of_its_version(
    tiny: Path, tmp_path: Path, trained: MakeTrainer, lora: LoraConfig | None
) -> None:
    trainer = trained(lora)
    checkpoints_of(trainer, tmp_path)
    results = results_by_leg(tmp_path, served_after(trainer, tiny, tmp_path))
    assert results[Leg.WIRE].is_equal, results
    assert results[Leg.LOAD].is_equal, results


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4, alpha=8.0)], ids=["full", "adapters"])
def test_a_weight_that_changed_in_the_engine_is_of_the_load_leg(
    tiny: Path, tmp_path: Path, trained: MakeTrainer, lora: LoraConfig | None
) -> None:
    trainer = trained(lora)
    checkpoints_of(trainer, tmp_path)
    results = results_by_leg(tmp_path, served_after(trainer, tiny, tmp_path, torn=QUERY))
    assert results[Leg.WIRE].is_equal, results
    found = results[Leg.LOAD].difference
    assert found is not None
    assert found.tensor == QUERY
    assert found.region.startswith("[0:")


def test_a_release_that_is_not_the_checkpoint_is_of_the_wire_leg(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    trainer = trained()
    checkpoints_of(trainer, tmp_path)
    with torch.no_grad():
        trainer.module.get_parameter(QUERY)[2, 2] += 1
    results = results_by_leg(tmp_path, served_after(trainer, tiny, tmp_path))
    found = results[Leg.WIRE].difference
    assert found is not None
    assert found.tensor == QUERY
    assert results[Leg.LOAD].is_equal


def test_a_release_that_lacks_a_weight_of_the_checkpoint_names_it(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    trainer = trained()
    state = checkpoints_of(trainer, tmp_path)
    served = served_after(trainer, tiny, tmp_path)
    saved = {name: each for name, each in trainer.iterate_weights() if name != QUERY}
    for file in state.iterdir():
        file.unlink()
    save_file(saved, state / "model.safetensors")
    found = results_by_leg(tmp_path, served)[Leg.WIRE].difference
    assert found is not None
    assert (found.tensor, found.detail) == (QUERY, "released, and no weight of the checkpoint")


def test_without_a_checkpoint_of_its_version_the_load_leg_alone_is_compared(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    trainer = trained()
    checkpoints_of(trainer, tmp_path)
    results = results_by_leg(tmp_path, served_after(trainer, tiny, tmp_path, version=4))
    assert "no checkpoint of version 4" in results[Leg.WIRE].problem
    assert "checkpoint.interval=1" in results[Leg.WIRE].problem
    assert results[Leg.LOAD].is_equal


# --- a live run -----------------------------------------------------------------------------------


def live_run(folder: Path) -> Path:
    (folder / CONFIG).write_text("name: live\n")
    return folder


def verify_while_answering(run: Path, served: list[ServedWeights]) -> Result:
    """Ask in another thread; answer as the driver does."""
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(verify, run, "--engine", "--wait", "20")
        while not (questions := take_questions(run)):
            assert not result.done(), result.result().output
        answer(run, questions[0], served)
        return result.result()


@pytest.mark.parametrize(
    ("served", "code", "said"),
    [
        ([ServedWeights("generator-0", None)], 2, "the engine serves no release of this run"),
        ([ServedWeights("generator-0", None, problem="died")], 2, "not compared: died"),
        ([], 2, "the run has none"),
    ],
)
def test_engines_that_cannot_be_compared_are_told_with_code_2(
    tmp_path: Path, served: list[ServedWeights], code: int, said: str
) -> None:
    result = verify_while_answering(live_run(tmp_path), served)
    assert result.exit_code == code
    assert said in result.output
    assert not list((tmp_path / "verify").iterdir())


def test_with_engines_an_export_that_is_missing_is_a_line_and_no_failure(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    trainer = trained()
    state = checkpoints_of(trainer, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "step_3")
    served = served_after(trainer, tiny, tmp_path)
    recipe = f"steps: 3\nmodel: {{path: {tiny}}}\ntrainer: {{backend: torch}}\n"
    (tmp_path / CONFIG).write_text(f"{recipe}generator: {{backend: embedded}}\n")
    result = verify_while_answering(tmp_path, [served])
    assert f"export  {state}: not compared: no export (" in result.output
    assert "wire    generator-0, version 3: equal" in result.output
    assert result.exit_code == 0, result.output
    assert verify(state).exit_code == 2, "without engines, the export is what was asked for"


def test_an_engine_of_a_live_run_is_compared_without_any_checkpoint(
    tiny: Path, tmp_path: Path, trained: MakeTrainer
) -> None:
    served = served_after(trained(), tiny, tmp_path, torn=QUERY)
    result = verify_while_answering(live_run(tmp_path), [served])
    assert result.exit_code == 1
    assert "load    generator-0, version 3: DIFFERS: " in result.output


def test_a_run_that_nobody_drives_does_not_answer(tmp_path: Path) -> None:
    result = verify(live_run(tmp_path), "--engine", "--wait", "0")
    assert result.exit_code == 2
    assert "no answer within 0 s" in result.output
    assert not list((tmp_path / "verify").iterdir())


def test_the_engines_of_a_run_that_has_ended_are_gone(tmp_path: Path) -> None:
    (live_run(tmp_path) / SUMMARY).write_text("{}")
    result = verify(tmp_path, "--engine")
    assert result.exit_code == 2
    assert "its run has ended" in result.output


def test_a_plain_module_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "model.pt")
    assert verify(tmp_path, "--against", tmp_path).exit_code == 2
