import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from offbeat.models.tiny_model import tiny_model
from offbeat.trainers.batches.packing import padding_microbatch
from offbeat.trainers.batches.planner import MicrobatchPlanner
from offbeat.trainers.errors import UntrainableModel
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.forward import compute_packed_logprobs
from offbeat.trainers.torch.proof import (
    prove_kind,
    prove_model,
    prove_rows,
    prove_sharding,
)
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.model_families import FAMILIES, LONG_ROPES, VOCABULARY, family_model
from tests.support.random_groups import Group, make_group

MakeTrainer = Callable[..., TorchTrainer]
EXACT = 1e-3  # of any token, in standard deviations
IN_EVERY_SUITE = {
    "Llama",
    "GPT2",
    "Qwen3Moe",
    "Mistral",
    "Gemma2",
    "Gemma4Text",
    "Falcon",
    "Llama4Text:tuned",
    "GPTNeo",
    "Bloom",
    "Falcon:alibi",
    "Mamba2",
    "FalconH1:multiplied",
    "Rwkv",
    "RecurrentGemma",
    "Jamba",
}
TABLE = [
    pytest.param(name, marks=[] if name in IN_EVERY_SUITE else pytest.mark.long)
    for name in FAMILIES
]


def groups_beyond_every_window() -> list[Group]:
    rng = np.random.default_rng(0)
    return [make_group(rng, 9, [20, 3, 14]), make_group(rng, 3, [30, 30])]


def alone(model: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    """Log-probabilities of all response tokens, a sample at a time, by transformers alone."""
    parts = list[Tensor]()
    for group in groups:
        prompt, offsets = group["prompt_ids"], group["response_offsets"]
        for first, end in itertools.pairwise(offsets.tolist()):
            tokens = np.concatenate([prompt, group["response_ids"][first:end]])
            row = torch.from_numpy(tokens).long()[None]
            with torch.no_grad():
                logprobs = model(input_ids=row, use_cache=False).logits[0].log_softmax(-1)
            targets = row[0, len(prompt) :]
            parts.append(logprobs[len(prompt) - 1 : -1].gather(1, targets[:, None])[:, 0])
    return torch.cat(parts)


def attending_eagerly(model: PreTrainedModel) -> PreTrainedModel:
    """The model made anew: not every class can be switched."""
    config = copy.deepcopy(model.config)
    other = type(model)._from_config(config, attn_implementation="eager")  # noqa: SLF001
    other.load_state_dict(model.state_dict())
    return other.eval()


def trainer_or_refusal(trainer_of: MakeTrainer, path: Path) -> TorchTrainer | UntrainableModel:
    try:
        return trainer_of(path, dtype="float32", max_model_len=128)
    except UntrainableModel as refused:
        return refused


def trained(trainer: TorchTrainer, groups: Sequence[Group]) -> Tensor:
    columns = trainer.prepare_logprobs(
        build_chunk(groups), policy=True, reference=False, temperature=1.0
    )
    return torch.from_numpy(np.concatenate([each["policy_logprobs"] for each in columns]))


def distance_if_shared(model: PreTrainedModel, groups: Sequence[Group], want: Tensor) -> float:
    """How far the samples of a group are from what they should be, were they made to share a row."""
    cutting = MicrobatchPlanner(10_000, shared_prompt=True, ratio_tokens=1e9, vocabulary=VOCABULARY)
    _, microbatches = cutting.cut(groups, only_trained=False)
    got = torch.empty_like(want)
    try:
        for packed in microbatches:
            assert not packed.one_branch_a_row
            with torch.no_grad():
                got[torch.from_numpy(packed.source_N)] = compute_packed_logprobs(model, packed, 1.0)
    except (RuntimeError, ValueError):
        return float("inf")
    return (got - want).abs().max().item()


def largest(gap: Tensor) -> float:
    return gap.abs().max().item()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # some families' own
@pytest.mark.parametrize("family", TABLE)
def test_every_family_is_trained_on_what_its_samples_compute_alone(
    family: str, tmp_path: Path, trainer_of: MakeTrainer
) -> None:
    model, groups = family_model(family), groups_beyond_every_window()
    model.save_pretrained(tmp_path)
    trainer = trainer_or_refusal(trainer_of, tmp_path)
    want = alone(attending_eagerly(model), groups)
    if isinstance(trainer, UntrainableModel):
        assert largest(alone(model, groups) - want) > EXACT * float(want.std())
        return
    exact = EXACT * float(want.std())
    assert largest(trained(trainer, groups) - want) < exact
    assert trainer.shares_prompts == (distance_if_shared(model, groups, want) < exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shared_prompt", [True, False])
def test_multipliers_of_a_recurrent_model_hide_no_mistake_of_its_rows(
    dtype: str, shared_prompt: bool, tmp_path: Path, trainer_of: MakeTrainer
) -> None:
    model, groups = _multiplied(tmp_path, dtype), groups_beyond_every_window()
    trainer = trainer_of(tmp_path, dtype=dtype, max_model_len=128, shared_prompt=shared_prompt)
    want = alone(model.float(), groups)
    gap = (trained(trainer, groups) - want).abs().mean() / want.std()
    assert gap < (1e-5 if dtype == "float32" else 0.03)  # a plain pass in bfloat16 is 0.008 off
    assert not trainer.shares_prompts


def _multiplied(path: Path, dtype: str) -> PreTrainedModel:
    """A Falcon-H1 whose weights make up for its multipliers, as training makes them do."""
    model = family_model("FalconH1:multiplied")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name == "lm_head.weight":
                weight.div_(model.config.lm_head_multiplier)
            elif name.endswith("mamba.out_proj.weight"):
                weight.div_(model.config.ssm_out_multiplier)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(path)
    return attending_eagerly(model)


def _add_magnitude(_: nn.Module, __: object, embedded_RTH: Tensor) -> Tensor:
    return embedded_RTH + embedded_RTH.square().mean(-1, keepdim=True).sqrt()


def test_padding_brings_no_embedding_of_zeros_at_which_a_model_has_no_gradient() -> None:
    model = family_model("Llama", pad_token_id=None)
    with torch.no_grad():
        model.model.embed_tokens.get_parameter("weight")[0] = 0
    model.model.embed_tokens.register_forward_hook(_add_magnitude)
    rng = np.random.default_rng(0)
    groups = [make_group(rng, 9, [20, 3]), make_group(rng, 3, [5, 1])]
    for group, name in itertools.product(groups, ("prompt_ids", "response_ids")):
        group[name] = np.maximum(group[name], 1)
    planner = MicrobatchPlanner(
        10_000, shared_prompt=False, ratio_tokens=1e9, vocabulary=VOCABULARY
    )
    _, (packed,) = planner.cut(groups, only_trained=False)
    assert (packed.segments_RT < 0).any()
    for each in packed, padding_microbatch(packed.padding_token):
        compute_packed_logprobs(model, each, 1.0).sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())


def test_samples_share_a_prompt_where_no_sample_is_longer_than_the_window(
    tmp_path: Path, trainer_of: MakeTrainer
) -> None:
    family_model("Mistral", sliding_window=64).save_pretrained(tmp_path)
    assert trainer_of(tmp_path, dtype="float32", max_model_len=64).shares_prompts
    assert not trainer_of(tmp_path, dtype="float32", max_model_len=65).shares_prompts


def test_prompts_are_shared_only_where_the_recipe_asks_for_it(
    trainer_of: MakeTrainer,
) -> None:
    assert trainer_of().shares_prompts
    assert not trainer_of(shared_prompt=False).shares_prompts


def test_a_position_that_the_model_does_not_have_is_refused(
    tmp_path: Path, trainer_of: MakeTrainer
) -> None:
    family_model("GPT2").save_pretrained(tmp_path)
    for shared_prompt in (True, False):
        trainer_of(tmp_path, max_model_len=128, shared_prompt=shared_prompt)
        with pytest.raises(UntrainableModel, match="has no position 128"):
            trainer_of(tmp_path, max_model_len=129, shared_prompt=shared_prompt)


@pytest.mark.parametrize("rope", LONG_ROPES)
@pytest.mark.parametrize("shared_prompt", [True, False])
def test_a_sample_does_not_depend_on_the_length_of_the_samples_beside_it(
    rope: str, shared_prompt: bool, tmp_path: Path, trainer_of: MakeTrainer
) -> None:
    bound = 16 if rope == "dynamic" else 64
    model = family_model("Llama", rope_parameters=LONG_ROPES[rope], max_position_embeddings=bound)
    model.save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path, dtype="float32", max_model_len=64, shared_prompt=shared_prompt)
    rng = np.random.default_rng(0)
    short, longest = make_group(rng, 4, [5]), make_group(rng, 20, [44])
    together = trained(trainer, [short, longest])
    assert largest(together[:5] - trained(trainer, [short])) < 1e-5
    assert largest(together[5:] - alone(model, [longest])) < EXACT
    assert trainer.shares_prompts == shared_prompt


class Recurrent(LlamaForCausalLM):
    """A family that nobody knows: each token also sees the mean of all tokens before it in its row."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(_add_mean_so_far)


def _add_mean_so_far(_: nn.Module, __: object, embedded_RTH: Tensor) -> Tensor:
    count_T = torch.arange(1, embedded_RTH.shape[1] + 1)
    return embedded_RTH + embedded_RTH.cumsum(1) / count_T[:, None]


class Crowded(LlamaForCausalLM):
    """A family whose tokens depend on how long the longest row of their batch is."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(_scale_by_width)


def _scale_by_width(_: nn.Module, __: object, embedded_RTH: Tensor) -> Tensor:
    return embedded_RTH + embedded_RTH.shape[1] / 10


def test_a_family_that_nobody_knows_is_found_out_by_what_it_computes() -> None:
    config = family_model("Llama").config
    assert prove_kind(LlamaForCausalLM, config, 64, shared_prompt=True).shared_prompt
    proof = prove_kind(Recurrent, config, 64, shared_prompt=True)
    assert not proof.shared_prompt
    assert "is off by" in proof.problem


def test_a_family_whose_samples_depend_on_their_company_is_refused() -> None:
    config = family_model("Llama").config
    with pytest.raises(UntrainableModel, match="differently next to a longer one than by itself"):
        prove_kind(Crowded, config, 64, shared_prompt=False)


class Stubborn(Gemma2ForCausalLM):
    """A capped model that stays with the attention it was loaded with."""

    def set_attn_implementation(self, *_: object, **__: object) -> None:
        """As classes have it that do not attend through transformers' interface."""


@pytest.mark.skipif(
    not Gemma2ForCausalLM._supports_sdpa,  # noqa: SLF001 -- where transformers has it
    reason="since transformers 5.24 a capped model is loaded with eager attention, which is exact",
)
def test_a_model_that_cannot_be_switched_to_the_attention_that_is_exact_is_refused() -> None:
    model = Stubborn(family_model("Gemma2").config)
    with pytest.raises(UntrainableModel, match="cannot be switched to it"):
        prove_rows(model, 64, shared_prompt=False, dtype=torch.float32)


def test_weights_that_compute_otherwise_than_their_class_promises_are_refused() -> None:
    model = family_model("Llama")
    proof = prove_kind(type(model), model.config, 64, shared_prompt=True)
    prove_model(model, 64, proof, torch.float32, 1e-3)
    model.model.embed_tokens.register_forward_hook(_add_mean_so_far)
    with pytest.raises(UntrainableModel, match=r"Set trainer\.shared_prompt to false"):
        prove_model(model, 64, proof, torch.float32, 1e-3)


def _add_a_little(_: nn.Module, __: object, embedded_RTH: Tensor) -> Tensor:
    return embedded_RTH + 0.1 * embedded_RTH.cumsum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_leave_the_class_by_a_little_share_no_row_in_any_dtype(
    dtype: torch.dtype,
) -> None:
    model = family_model("Llama")
    nn.Module.to(model, dtype)  # in place
    proof, _ = prove_rows(model, 64, shared_prompt=True, dtype=dtype)
    assert proof.split
    assert proof.shared_prompt
    model.model.embed_tokens.register_forward_hook(_add_a_little)
    proof, _ = prove_rows(model, 64, shared_prompt=True, dtype=dtype)
    assert not proof.split
    assert not proof.shared_prompt
    assert "off by" in proof.problem


def test_a_cut_model_that_computes_otherwise_than_before_is_refused() -> None:
    model = family_model("Llama")
    proof = prove_kind(type(model), model.config, 64, shared_prompt=True)
    witness = prove_model(model, 64, proof, torch.float32, 1e-3)
    prove_sharding(model, witness, torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.up_proj.weight").mul_(1.1)
    with pytest.raises(UntrainableModel, match=r"Set trainer\.data_parallel and"):
        prove_sharding(model, witness, torch.float32)


def test_a_proof_leaves_the_random_numbers_as_they_were() -> None:
    model = family_model("Llama", attention_dropout=0.0)
    before = torch.get_rng_state()
    proof = prove_kind(type(model), model.config, 63, shared_prompt=True)
    prove_model(model, 63, proof, torch.float32, 1e-3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.long
@pytest.mark.parametrize(
    "family",
    ["Llama", "Qwen3", "Qwen2Moe", "GptOss", "Gemma3Text", "DeepseekV3", "Mamba2", "NemotronH"],
)
def test_a_miniature_is_made_of_models_of_billions_of_weights(family: str) -> None:
    kind = type(family_model(family))
    made = tiny_model(kind, getattr(transformers, f"{family}Config")(), 4096)
    assert made is not None
    assert sum(each.numel() for each in made.parameters()) < 110_000_000


def test_a_model_of_few_tokens_is_proved_on_those_it_knows() -> None:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    assert prove_kind(LlamaForCausalLM, config, 64, shared_prompt=True).shared_prompt


class BandedLlama(LlamaForCausalLM):
    """Attends within a band whose width the config keeps in a list, one for each layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer, span in zip(self.model.layers, config.attention_spans, strict=True):
            attention = layer.get_submodule("self_attn")
            attention.register_forward_pre_hook(band_of(span), with_kwargs=True)


def band_of(span: int) -> Callable[..., tuple[tuple[object, ...], dict[str, Tensor]]]:
    def banded(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, Tensor]):  # noqa: ANN202
        hidden, mask = kwargs["hidden_states"], kwargs.get("attention_mask")
        low, place = torch.finfo(hidden.dtype).min, torch.arange(hidden.shape[1])
        near = (place[:, None] >= place) & (place[:, None] - place < span)
        band = torch.zeros(near.shape, dtype=hidden.dtype).masked_fill(~near, low)[None, None]
        if mask is not None:
            band = band + (torch.where(mask, 0.0, low) if mask.dtype == torch.bool else mask)
        return args, {**kwargs, "attention_mask": band.clamp(min=low)}

    return banded


def test_windows_that_a_config_keeps_in_a_list_of_its_layers_are_cut_and_seen() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    config.attention_spans = [200, 200]
    small = tiny_model(BandedLlama, config, 512)
    assert small is not None
    assert small.config.attention_spans == [16, 16]
    assert not prove_kind(BandedLlama, config, 512, shared_prompt=True).shared_prompt


class RefusesCuts(LlamaForCausalLM):
    """Cannot be made in other sizes than those of the test."""

    def __init__(self, config: LlamaConfig) -> None:
        raise RuntimeError("no sizes but its own")


def test_a_class_without_a_miniature_is_refused_and_not_trained_unproved() -> None:
    with pytest.raises(UntrainableModel, match="has no tiny model"):
        prove_kind(RefusesCuts, LlamaConfig(), 512, shared_prompt=False)
