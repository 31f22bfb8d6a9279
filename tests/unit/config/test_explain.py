import re
from pathlib import Path
from typing import Final

import pytest

from offbeat.config.explain import NoSuchKey, explain
from offbeat.config.peer_keys import NOTES, PEER_KEYS
from offbeat.config.schema import known_keys

PAGE: Final = Path(__file__).parents[3] / "docs/coming-from.md"


def test_a_key_is_explained_by_type_range_default_and_docstring() -> None:
    assert explain("generator.sampling.top_p").startswith(
        "generator.sampling.top_p: number, above 0, at most 1; default 1.0\n"
        "    Nucleus mass to draw from; logprobs are of the full distribution. "
    )


def test_a_choice_lists_its_names_and_the_keys_of_all_of_them() -> None:
    text = explain("sampler")
    assert "in_order: Train exactly the prompts of each batch" in text
    assert "sampler.max_lookahead" in text


def test_a_key_of_one_choice_says_so() -> None:
    assert "Only with sampler.name=in_order." in explain("sampler.max_lookahead")


def test_defaults_that_differ_between_choices_are_all_named() -> None:
    text = explain("sampler.max_staleness")
    assert "default 0 (in_order), 1 (ready_first, weight_fifo, windowed, custom)" in text


def test_without_a_key_the_whole_recipe_is_listed() -> None:
    text = explain()
    assert all(key in text for key in known_keys() if "." not in key)


@pytest.mark.parametrize("key", list(known_keys()))
def test_every_key_says_what_it_does(key: str) -> None:
    assert known_keys()[key].doc
    assert explain(key)


def test_an_unknown_key_is_told_its_nearest() -> None:
    with pytest.raises(NoSuchKey, match=r"sync\.intervall: unknown key. Did you mean `interval`"):
        explain("sync.intervall")


def test_an_unknown_section_is_told_where_the_key_belongs() -> None:
    with pytest.raises(NoSuchKey, match="`max_staleness` belongs in `sampler`"):
        explain("nowhere.max_staleness")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("samplr.nonsense", "Did you mean `sampler`?"),
        ("trainer.optimzer.nonsense", "Did you mean `optimizer`?"),
        ("trainer..nonsense", "`trainer` has: activation_checkpointing, "),
        ("sampler.max_staleness.nonsense", "`sampler.max_staleness` is no section."),
    ],
)
def test_a_key_below_what_is_no_section_is_told_about_that(key: str, hint: str) -> None:
    with pytest.raises(NoSuchKey, match=re.escape(hint)):
        explain(key)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("num_generations", "`num_generations` is `samples_per_group` here"),
        ("beta", "`beta` is `algorithm.loss.kl_coef` here"),
        ("grpo.val_period", "`grpo.val_period` is `eval.interval` here"),
        ("actor_rollout_ref.rollout.n", "is `samples_per_group` here"),
        ("rollout.name", "`rollout.name` is `generator.backend` here"),
        ("trainer.lr", "is `trainer.optimizer.learning_rate` here"),
        ("trainer.n_gpus_per_node", "is `trainer.data_parallel` or `generator.engines` here"),
        ("tensor_model_parallel_size", "`generator.vllm.tensor_parallel` or `trainer.tensor_par"),
        ("gpu_memory_utilization", "is `generator.vllm.engine_args.gpu_memory_utilization` here"),
    ],
)
def test_a_key_of_another_library_is_translated(key: str, hint: str) -> None:
    with pytest.raises(NoSuchKey, match=re.escape(hint)):
        explain(key)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("policy.generation.stop_strings", "is `generator.sampling.stop` here"),
        ("actor_rollout_ref.rollout.top_k", "is `generator.sampling.top_k` here"),
        ("repetition_penalty", "It has no key here: probabilities are those of the model"),
        ("trainer.nnodes", "It has no key here: Ray places"),
        ("deepspeed", "It has no key here: the torch backend cuts"),
        ("gradient_accumulation_steps", "It is not needed here"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "is `eval.samples` here"),
        ("per_device_train_batch_size", "divided by num_generations, it is `groups_per_step`"),
        ("loss_type", "is `algorithm.loss.name` or `algorithm.loss.normalize` here"),
        ("scale_rewards", "is `algorithm.advantage` here"),
        ("bf16", "is `model.dtype` here"),
        ("use_vllm", "is `generator.backend` here"),
        ("adam_beta2", "is `trainer.optimizer.betas` here"),
        ("reward_weights", "is `environment.rewards.NAME.weight` here"),
        ("log_completions", "every sample is in `rollouts/`"),
        ("peft_config", "is `trainer.lora.rank` here"),
        ("actor_rollout_ref.actor.use_kl_loss", "is `algorithm.loss.kl_coef` here"),
        ("importance_sampling_level", "Its `sequence` is `algorithm.preset=gspo`"),
    ],
)
def test_a_key_of_another_library_is_not_answered_with_one_that_is_spelt_alike(
    key: str, hint: str
) -> None:
    with pytest.raises(NoSuchKey, match=re.escape(hint)) as refused:
        explain(key)
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize("key", ["frobnicate", "nodes", "generator.sampling.mop"])
def test_a_key_that_is_like_no_other_gets_the_names_of_its_section(key: str) -> None:
    with pytest.raises(NoSuchKey, match=r"has: ") as refused:
        explain(key)
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize("peer", NOTES)
def test_each_key_without_a_counterpart_is_on_the_page(peer: str) -> None:
    assert f"`{peer}`" in PAGE.read_text()


@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p", "stop"])
def test_the_last_part_of_a_key_suffices_if_no_other_key_ends_with_it(key: str) -> None:
    assert explain(key) == explain(f"generator.sampling.{key}")


def test_a_last_part_that_several_keys_have_is_sent_to_their_sections() -> None:
    with pytest.raises(NoSuchKey, match="`backend` belongs in `generator` or `trainer`"):
        explain("backend")


def test_a_misspelt_key_of_this_section_is_not_taken_for_one_of_another_library() -> None:
    with pytest.raises(NoSuchKey, match="Did you mean `betas`"):
        explain("trainer.optimizer.beta")


@pytest.mark.plugins
@pytest.mark.parametrize("ours", PEER_KEYS)
def test_what_a_key_is_translated_to_can_be_set(ours: str) -> None:
    above = ours.rpartition(".")[0]
    assert ours in known_keys() or known_keys()[above].kind == "mapping"


@pytest.mark.parametrize(
    ("ours", "peer"), [(ours, peer) for ours, peers in PEER_KEYS.items() for peer in peers]
)
def test_each_key_of_another_library_is_translated_as_the_page_does(ours: str, peer: str) -> None:
    page, named = PAGE.read_text(), {ours, ours.rpartition(".")[0]}
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    theirs = [row[2:] for row in rows if named & set(re.findall(r"`([\w.]+)`", row[1]))]
    in_table = any(f"`{peer}`" in "|".join(cells) for cells in theirs)
    assert in_table or f"`{peer}` is `{ours}`" in page
