import re
from pathlib import Path
from typing import Final

import pytest

from offbeat.config.explain import NoSuchKey, explain
from offbeat.config.peer_keys import PEER_KEYS
from offbeat.config.schema import known_keys

PAGE: Final = Path(__file__).parents[3] / "docs/coming-from.md"


def test_a_key_is_explained_by_type_range_default_and_docstring() -> None:
    assert explain("generator.sampling.top_p").startswith(
        "generator.sampling.top_p: number, above 0, at most 1; default 1.0\n"
        "    Nucleus mass to draw from; logprobs are of the untruncated distribution. "
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


def test_a_misspelt_key_of_this_section_is_not_taken_for_one_of_another_library() -> None:
    with pytest.raises(NoSuchKey, match="Did you mean `betas`"):
        explain("trainer.optimizer.beta")


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
