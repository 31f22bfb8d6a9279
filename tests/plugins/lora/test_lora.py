"""Adapters of a torch trainer: what is trained, saved, released and exported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.plugins.lora.adapters import Adapters
from offbeat.trainers.checkpoints.store import CheckpointStore
from offbeat.trainers.errors import CheckpointMismatch, UntrainableModel
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.state import read_saved_names
from offbeat.trainers.torch.torch_trainer import TorchParts
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk
from tests.support.model_families import family_model
from tests.support.plain_passes import plain_logprobs_of_group
from tests.support.split_steps import Step, run_step, state_of
from tests.support.trainer_fixtures import compute_norms_in_float64

peft = pytest.importorskip("peft", reason="the extra `lora` is not installed")

MakeLora = Callable[..., TorchTrainer]
PULLED = LossSpec(ClippedPgLossConfig(old_logprobs="policy", kl_coef=0.1))
SMALL: dict[str, Any] = {"rank": 4, "alpha": 8.0}


@pytest.fixture
def lora_of(qwen3: Path) -> MakeLora:
    def make(
        path: Path = qwen3, dtype: Any = "float32", lora: dict[str, Any] | None = None
    ) -> TorchTrainer:
        return TorchTrainer(
            path,
            parts=TorchParts(trained=Adapters),
            trainer=TorchTrainerConfig.model_validate(
                {"optimizer": {"learning_rate": 1e-2}, "lora": lora or SMALL}
            ),
            model=ModelConfig(path=str(path), dtype=dtype),
            total_steps=10,
            max_model_len=512,
        )

    return make


def base_weights(trainer: TorchTrainer) -> dict[str, Tensor]:
    return {
        name: each.clone()
        for name, each in trainer.module.state_dict().items()
        if "lora_" not in name
    }


def test_only_adapters_are_trained_and_the_base_keeps_every_bit(
    lora_of: MakeLora, step_data: Step
) -> None:
    trainer = lora_of()
    before, adapters = base_weights(trainer), dict(trainer.iterate_weights())
    adapters = {name: each.clone() for name, each in adapters.items()}
    assert run_step(trainer, step_data, PULLED, chunks=2).applied
    after = base_weights(trainer)
    assert all(torch.equal(before[name], after[name]) for name in before)
    moved = {
        name for name, each in trainer.iterate_weights() if not torch.equal(each, adapters[name])
    }
    assert moved == {name for name in adapters if ".lora_B." in name}  # A: its gradient is B's sum
    assert len(adapters) == 2 * 2 * 7  # A and B of 7 modules in 2 layers
    moments = {name for name in state_of(trainer).tensors() if name.startswith("exp_avg/")}
    assert len(moments) == len(adapters)


def test_a_reset_returns_the_load_of_experts_to_equal_shares_as_at_the_start(
    lora_of: MakeLora, step_data: Step, tmp_path: Path
) -> None:
    family_model("Qwen3Moe").save_pretrained(tmp_path)
    trainer = lora_of(tmp_path, lora={**SMALL, "target_modules": ["q_proj", "v_proj"]})
    load = trainer.expert_load
    assert load is not None
    first = load.state().clone()
    run_step(trainer, step_data, PULLED, chunks=1)
    assert not torch.equal(load.state(), first)
    trainer.reset()
    assert torch.equal(load.state(), first)


def test_the_gradient_is_that_of_plain_peft(
    lora_of: MakeLora, qwen3: Path, step_data: Step
) -> None:
    trainer = lora_of(dtype="float64")
    compute_norms_in_float64(trainer.module)
    with torch.no_grad():  # the gradient of A is 0 while B is
        for name, each in trainer.module.named_parameters():
            if "lora_B" in name:
                each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(1)) / 9)
    base = Qwen3ForCausalLM.from_pretrained(qwen3, dtype=torch.float64).eval()
    compute_norms_in_float64(base)
    plain: Any = peft.get_peft_model(
        base,
        peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    peft.set_peft_model_state_dict(plain, dict(trainer.iterate_weights()))
    groups, advantages = step_data
    loss, tokens = torch.zeros((), dtype=torch.float64), 0
    for group, values in zip(groups, advantages, strict=True):
        offsets = group["response_offsets"]
        for sample, each in enumerate(plain_logprobs_of_group(plain, group)):
            part = slice(offsets[sample], offsets[sample + 1])
            valid, old = torch.tensor(group["loss_mask"][part]), each.detach()
            loss = loss - (values[sample] * (each - old).exp() * valid).sum()
            tokens += int(valid.sum())
    (loss / tokens).backward()
    wanted = {
        name.removeprefix("base_model.model."): each.grad
        for name, each in plain.named_parameters()
        if each.grad is not None
    }
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, LossSpec(ClippedPgLossConfig(old_logprobs="current")))
    trainer.train_microbatch(key.next(), build_chunk(groups), advantages)
    got = {
        name: each.grad / tokens
        for name, each in trainer.module.named_parameters()
        if each.grad is not None
    }
    assert got.keys() == wanted.keys()
    assert max(float((got[n] - wanted[n]).abs().max() / wanted[n].abs().max()) for n in got) < 1e-10


def test_the_reference_of_adapters_is_their_base_bit_for_bit(
    lora_of: MakeLora, trainer_of: Callable[..., TorchTrainer], step_data: Step
) -> None:
    trainer, groups = lora_of(), step_data[0]
    run_step(trainer, step_data, PULLED, chunks=1)
    asked = {"policy": True, "reference": True, "temperature": 1.0}
    got = trainer.prepare_logprobs(build_chunk(groups), **asked)
    want = trainer_of(dtype="float32").prepare_logprobs(build_chunk(groups), **asked)
    for ours, theirs in zip(got, want, strict=True):
        assert np.array_equal(ours["reference_logprobs"], theirs["policy_logprobs"])
        assert not np.array_equal(ours["policy_logprobs"], theirs["policy_logprobs"])


def test_canaries_in_bfloat16_are_of_the_rounded_sums_that_engines_serve(
    tmp_path: Path, lora_of: MakeLora, trainer_of: Callable[..., TorchTrainer], step_data: Step
) -> None:
    trainer = lora_of(dtype="bfloat16")
    run_step(trainer, step_data, PULLED, chunks=1)
    before = {name: each.clone() for name, each in trainer.module.state_dict().items()}
    trainer.save(tmp_path / "model")
    served = trainer_of(path=tmp_path / "model", dtype="bfloat16")
    asked = ((2, 5, 14, 8, 17), (3, 9, 4, 11, 6))
    assert trainer.top_logprobs(asked, 8) == served.top_logprobs(asked, 8)
    trained = trainer.prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=False, temperature=1.0
    )
    merged = served.prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=False, temperature=1.0
    )
    assert not np.array_equal(trained[0]["policy_logprobs"], merged[0]["policy_logprobs"])
    after = trainer.module.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_adapter_goes_on_bit_for_bit_and_its_checkpoint_holds_no_base(
    tmp_path: Path, lora_of: MakeLora, step_data: Step, dtype: str
) -> None:
    undisturbed = lora_of(dtype=dtype)
    run_step(undisturbed, step_data, PULLED, chunks=1)
    undisturbed.save_state(tmp_path)
    restored = lora_of(dtype=dtype)
    restored.load_state(tmp_path)
    assert restored.weights_digest() == undisturbed.weights_digest()
    steps = [run_step(each, step_data, PULLED, 1, number=2) for each in (undisturbed, restored)]
    assert steps[0].grad_norm == steps[1].grad_norm
    assert restored.weights_digest() == undisturbed.weights_digest()
    weights = {name for name in read_saved_names(tmp_path) if name.startswith("weight/")}
    assert len(weights) == len(dict(undisturbed.iterate_weights()))
    assert all(".lora_" in name for name in weights)


def test_a_reset_adapter_is_a_new_one(lora_of: MakeLora, step_data: Step) -> None:
    trainer = lora_of()
    first = trainer.weights_digest()
    result = trainer.train(*in_chunk(step_data), PULLED)
    assert trainer.weights_digest() != first
    trainer.reset()
    assert trainer.weights_digest() == first
    again = trainer.train(*in_chunk(step_data), PULLED)
    assert (again.loss, again.grad_norm) == (result.loss, result.grad_norm)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"lora": {"rank": 8, "alpha": 8.0}}, "adapters of rank 8"),
        ({"lora": {"rank": 4, "alpha": 16.0}}, "alpha 16"),
        ({"lora": {**SMALL, "target_modules": ["q_proj"]}}, "on q_proj of"),
        ({"path": "another"}, "base "),
    ],
    ids=["rank", "alpha", "modules", "base"],
)
def test_a_checkpoint_of_other_adapters_is_refused_by_what_differs(
    tmp_path: Path, lora_of: MakeLora, qwen3: Path, other: dict[str, Any], named: str
) -> None:
    trainer = lora_of()
    store = CheckpointStore(tmp_path / "run", trainer.identity, keep=1)
    store.save(1, trainer.weights_digest(), trainer.state_nbytes, trainer.save_state)
    if "path" in other:
        model: Any = AutoModelForCausalLM.from_pretrained(qwen3)
        model.lm_head.weight.data += 1
        model.save_pretrained(tmp_path / "another")
        other = {"path": tmp_path / "another"}
    with pytest.raises(CheckpointMismatch, match=f"this trainer has .*{named}.*trainer.lora"):
        CheckpointStore(tmp_path / "run", lora_of(**other).identity, keep=1).newest(1)


def test_a_resume_recognises_the_base_and_leaves_adapters_to_their_checkpoint(
    tmp_path: Path, lora_of: MakeLora, qwen3: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(qwen3)
    model.lm_head.weight.data += 1
    model.save_pretrained(tmp_path)
    wider = lora_of(lora={"rank": 8, "alpha": 8.0})
    assert lora_of().initial_digest == wider.initial_digest != lora_of(tmp_path).initial_digest


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        (["q_proj", "w_proj"], "no module w_proj"),
        (["layers"], "is not a linear module but ModuleList"),
        (["embed_tokens"], "embed_tokens, which is not a linear module but Embedding"),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused_by_name(
    lora_of: MakeLora, targets: list[str], named: str
) -> None:
    with pytest.raises(UntrainableModel, match=named):
        lora_of(lora={**SMALL, "target_modules": targets})


def test_a_head_that_is_tied_to_the_embeddings_is_refused(lora_of: MakeLora, llama: Path) -> None:
    with pytest.raises(UntrainableModel, match="tied to the embeddings"):
        lora_of(llama, lora={**SMALL, "target_modules": ["lm_head"]})


def test_a_router_that_answers_with_more_than_logits_gets_no_adapter(
    lora_of: MakeLora, tmp_path: Path
) -> None:
    family_model("Phimoe").save_pretrained(tmp_path)
    assert not [name for name in lora_of(tmp_path).weights.local_tensors() if "router" in name]
    with pytest.raises(UntrainableModel, match="not a linear module but PhimoeTopKRouter"):
        lora_of(tmp_path, lora={**SMALL, "target_modules": ["router"]})


@pytest.mark.parametrize(
    ("family", "unsupported"),
    [
        ("DeepseekV3", "gate_proj"),
        ("Qwen3Next", "down_proj"),
        ("NemotronH", "out_proj"),
        ("FalconH1", "out_proj"),
        ("Mamba2", "out_proj"),
        ("Jamba", "dt_proj"),
        ("Mamba", "dt_proj"),
    ],
)
def test_modules_that_peft_cannot_adapt_get_no_adapter_and_are_refused_by_name(
    lora_of: MakeLora, step_data: Step, tmp_path: Path, family: str, unsupported: str
) -> None:
    family_model(family).save_pretrained(tmp_path / "base")
    trainer = lora_of(tmp_path / "base")
    assert run_step(trainer, step_data, PULLED, chunks=1).applied
    trainer.save(tmp_path / "model")
    adapted: Any = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "model" / "adapter"
    )
    loaded = peft.get_peft_model_state_dict(adapted)
    trained = dict(trainer.iterate_weights())
    assert not [name for name, each in trained.items() if not each.any()], "without a gradient"
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], each) for name, each in trained.items())
    assert not [name for name in trained if f".{unsupported}." in name]
    with pytest.raises(UntrainableModel, match=f"{unsupported}, which PEFT cannot adapt"):
        lora_of(tmp_path / "base", lora={**SMALL, "target_modules": [unsupported]})


@pytest.mark.parametrize("targets", [[], ["q_proj"]])
def test_modules_that_share_a_matrix_are_refused(
    lora_of: MakeLora, tmp_path: Path, targets: list[str]
) -> None:
    family_model("Zamba2").save_pretrained(tmp_path)
    with pytest.raises(
        UntrainableModel, match=r"layers\.1\..*, whose matrix is that of .*layers\.3\."
    ):
        lora_of(tmp_path, lora={**SMALL, "target_modules": targets})


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_the_export_is_a_merged_model_beside_an_adapter_that_plain_peft_loads(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    lora_of: MakeLora,
    step_data: Step,
    architecture: str,
) -> None:
    path: Path = request.getfixturevalue(architecture)
    trainer, group = lora_of(path), step_data[0][0]
    run_step(trainer, step_data, PULLED, chunks=1)
    trainer.save(tmp_path / "model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    adapted: Any = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path), tmp_path / "model" / "adapter"
    ).eval()
    loaded = peft.get_peft_model_state_dict(adapted)
    for name, each in trainer.iterate_weights():
        assert torch.equal(loaded[name], each)
    with torch.no_grad():
        want = torch.cat(plain_logprobs_of_group(trainer.module, group))
        assert torch.allclose(torch.cat(plain_logprobs_of_group(adapted, group)), want, atol=1e-5)
        assert torch.allclose(torch.cat(plain_logprobs_of_group(merged, group)), want, atol=1e-5)
    assert not list((tmp_path / "model").rglob("*.bin"))


def test_a_model_of_transposed_matrices_is_refused(lora_of: MakeLora, gpt2: Path) -> None:
    with pytest.raises(UntrainableModel, match="transposed axes"):
        lora_of(gpt2)
