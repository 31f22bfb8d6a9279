import re
from pathlib import Path
from typing import Final

import pytest

from offbeat.config.explain import NoSuchKey, explain
from offbeat.config.peer_keys import matching_keys
from offbeat.config.peer_keys_doc import document
from offbeat.config.peer_tables import NOTES, PEER_KEYS
from offbeat.config.schema import known_keys

PAGE: Final = Path(__file__).parents[3] / "docs/peer-keys.md"


def test_a_key_is_explained_by_type_range_default_and_docstring() -> None:
    assert explain("generator.sampling.top_p").startswith(
        "generator.sampling.top_p: number, above 0, at most 1; default 1.0\n"
        "    Draw only from the most probable tokens, up to this total probability. "
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


@pytest.mark.parametrize(
    ("written", "key"),
    [
        (" sampler.max_staleness", "sampler.max_staleness"),
        ("sampler.max_staleness\t", "sampler.max_staleness"),
        ("sampler.max-staleness", "sampler.max_staleness"),
        (" top-p ", "top_p"),
        (" ", ""),
    ],
)
def test_blanks_around_a_key_and_dashes_for_underscores_are_understood(
    written: str, key: str
) -> None:
    assert explain(written) == explain(key)


def test_a_dash_in_a_name_that_a_recipe_chose_stays() -> None:
    key = "environment.rewards.my-reward.weight"
    assert explain(key).startswith(f"{key}: ")


def test_a_misspelt_key_with_dashes_is_told_its_nearest() -> None:
    with pytest.raises(NoSuchKey, match="Did you mean `max_staleness`"):
        explain("sampler.max-stalenes")


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
        ("sampler.max_staleness.nonsense", "`sampler.max_staleness` is not a section."),
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
        ("tensor_model_parallel_size", "`trainer.tensor_parallel` or `generator.vllm.tensor_par"),
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
        ("repetition_penalty", "No key here: only `generator.sampling.temperature` changes"),
        ("trainer.nnodes", "No key here: Ray places"),
        ("deepspeed", "No key here: the torch backend shards"),
        ("gradient_accumulation_steps", "Not needed"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "is `eval.samples` here"),
        ("per_device_train_batch_size", "divide by num_generations to get `groups_per_step`"),
        ("loss_type", "is `algorithm.loss.name` or `algorithm.loss.normalize` here"),
        ("scale_rewards", "is `algorithm.advantage` here"),
        ("bf16", "is `model.dtype` here"),
        ("use_vllm", "is `generator.backend` here"),
        ("adam_beta2", "is `trainer.optimizer.betas` here"),
        ("reward_weights", "is `environment.rewards.NAME.weight` here"),
        ("log_completions", "every sample is in the run directory's `rollouts/`"),
        ("peft_config", "is `trainer.lora.rank` here"),
        ("actor_rollout_ref.actor.use_kl_loss", "is `algorithm.loss.kl_coef` here"),
        ("importance_sampling_level", "Its `sequence` corresponds to `algorithm.preset=gspo`"),
    ],
)
def test_a_key_of_another_library_is_not_answered_with_one_that_is_spelt_alike(
    key: str, hint: str
) -> None:
    with pytest.raises(NoSuchKey, match=re.escape(hint)) as refused:
        explain(key)
    assert "Did you mean" not in str(refused.value)


@pytest.mark.parametrize("key", ["frobnicate", "widgets", "generator.sampling.mop"])
def test_a_key_that_is_like_no_other_gets_the_names_of_its_section(key: str) -> None:
    with pytest.raises(NoSuchKey, match=r"has: ") as refused:
        explain(key)
    assert "Did you mean" not in str(refused.value)


def test_the_page_of_other_libraries_keys_is_what_the_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "docs/peer-keys.md is out of date; run: python -m offbeat.config.peer_keys_doc"
    )


def test_the_page_has_each_key_of_another_library() -> None:
    page = PAGE.read_text(encoding="utf-8")
    peers = [peer for keys in PEER_KEYS.values() for peer in keys]
    assert not [peer for peer in (*peers, *NOTES) if f"`{peer}`" not in page]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("async_grpo.enabled", "engines always sample while the trainer trains"),
        ("trainer.fully_async.enabled", "engines always sample while the trainer trains"),
        ("data.max_prompt_length", "Add the longest response to get `generator.max_model_len`"),
        ("trainer.max_prompt_length", "Add the longest response to get `generator.max_model_len`"),
        ("valid_dataset.num_workers", "no process is started to read rows"),
        ("logger.mlflow_enabled", "`offbeat export`"),
        ("actor_rollout_ref.ref.strategy", "the trainer's ranks also compute the reference"),
        ("reward_model.strategy", "let your reward function call the reward model"),
        ("reward_model.reward_manager", "is `environment.target` here"),
        ("policy.draft.model_name", "engines do not draft tokens"),
        ("policy.megatron_cfg.peft.dim", "is `trainer.lora.rank` here"),
        ("train_dataset.batch_size", "is `groups_per_step` here"),
        ("generator.sampling_params.max_generate_length", "`generator.sampling.max_new_tokens`"),
        ("actor.ppo_n_minibatches", "is `algorithm.minibatches` here"),
        ("rollout_max_response_len", "is `generator.sampling.max_new_tokens` here"),
    ],
)
def test_a_key_with_a_common_last_part_has_an_answer_for_its_section(key: str, hint: str) -> None:
    with pytest.raises(NoSuchKey, match=re.escape(hint)):
        explain(key)


@pytest.mark.parametrize(
    "key",
    [
        "deployment.type",
        "policy.generation.val_seed",
        "perf_tracer.enabled",
        "data.custom_cls.path",
        "reward_penalties.token_ids",
    ],
)
def test_a_key_without_a_known_counterpart_is_sent_to_no_other_key(key: str) -> None:
    with pytest.raises(NoSuchKey) as refused:
        explain(key)
    assert not re.search(r"belongs in|Did you mean|is `", str(refused.value))


def test_a_key_of_this_library_names_the_other_meaning_that_it_has_elsewhere() -> None:
    assert explain("delta").endswith(
        "`delta` of another library is `algorithm.loss.dual_clip` here."
    )
    assert "of another library" not in explain("top_p")


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
@pytest.mark.parametrize(
    "ours", sorted({each for keys in PEER_KEYS.values() for ours in keys.values() for each in ours})
)
def test_what_a_key_is_translated_to_can_be_set(ours: str) -> None:
    above = ours.rpartition(".")[0]
    assert ours in known_keys() or known_keys()[above].kind == "mapping"


@pytest.mark.parametrize("library", PEER_KEYS)
def test_each_key_of_another_library_is_answered_as_its_table_says(library: str) -> None:
    others = {peer: ours for keys in PEER_KEYS.values() for peer, ours in keys.items()}
    for peer, ours in PEER_KEYS[library].items():
        if any(each.rpartition(".")[2] == peer for each in ours):
            continue  # called the same here
        found = matching_keys(peer, least=2)
        assert set(found) >= set(ours), peer
        assert "." not in peer or set(found) == {*others[peer], *ours}, peer
