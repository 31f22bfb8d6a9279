"""A loss of the user's own in a recipe: how it is chosen, and what does not go with it."""

from pathlib import Path

import pytest

from offbeat.config.loader import load_recipe
from offbeat.config.problems import ConfigError
from offbeat.config.sections.loss import CustomLossConfig

MODEL = ("model.path=m", "steps=1", "data.path=p", "environment.name=function", "environment.target=a:b")  # fmt: skip


def loss_of(*overrides: str) -> object:
    return load_recipe(None, [*MODEL, *overrides]).config.algorithm.loss


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loss_of(*overrides)
    assert len(caught.value.problems) == 1, str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.loss.target=my_loss:loss"],
        ["algorithm.loss={target: 'my_loss:loss'}"],
        ["algorithm.loss.name=custom", "algorithm.loss.target=my_loss:loss"],
    ],
)
def test_a_target_chooses_the_custom_loss(overrides: list[str]) -> None:
    assert loss_of(*overrides) == CustomLossConfig(target="my_loss:loss")


def test_a_target_drops_the_keys_that_the_recipe_has_for_another_loss(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: {loss: {clip_low: 0.1, normalize: sequences}}\n")
    loaded = load_recipe(recipe, [*MODEL, "algorithm.loss.target=my_loss:loss"])
    assert loaded.config.algorithm.loss == CustomLossConfig(
        target="my_loss:loss", normalize="sequences"
    )


def test_keys_of_policy_gradients_go_on_working() -> None:
    loss = loss_of(
        "algorithm.loss.target=my_loss:loss",
        "algorithm.loss.old_logprobs=policy",
        "algorithm.loss.tis_cap=2",
        "algorithm.loss.options.beta=0.1",
    )
    assert isinstance(loss, CustomLossConfig)
    assert (loss.tis_cap, loss.options) == (2.0, {"beta": 0.1})
    assert loss.needs_policy_logprobs and not loss.needs_reference_logprobs
    text = refused("algorithm.loss.target=my_loss:loss", "algorithm.loss.tis_cap=2")
    assert "has nothing to correct" in text


def test_the_function_gets_the_reference_without_a_penalty_if_it_is_asked_for() -> None:
    loss = loss_of("algorithm.loss.target=my_loss:loss", "algorithm.loss.reference=true")
    assert isinstance(loss, CustomLossConfig)
    assert loss.needs_reference_logprobs and not loss.kl_coef


@pytest.mark.parametrize("target", ["gspo", "mine:", ":loss", "a b:loss"])
def test_a_custom_loss_names_a_function_in_a_module(target: str) -> None:
    text = refused(f"algorithm.loss.target={target!r}")
    assert "does not name a function in a module" in text
    assert "Write module:function, as in my_loss:loss" in text


def test_a_custom_loss_without_a_target_is_refused() -> None:
    assert "algorithm.loss.target: required and missing" in refused("algorithm.loss.name=custom")


def test_a_preset_that_chooses_a_loss_is_refused_once() -> None:
    text = refused("algorithm.preset=grpo", "algorithm.loss.target=my_loss:loss")
    assert "algorithm.loss.name=custom has no `clip_high`, which algorithm.preset=grpo sets" in text


def test_next_to_keys_of_other_losses_it_is_refused_once_as_well() -> None:
    custom = "algorithm.preset=grpo", "algorithm.loss.target=my_loss:loss"
    assert "which algorithm.preset=grpo sets" in refused(*custom, "algorithm.loss.clip_low=0.1")
    with pytest.raises(ConfigError) as caught:
        loss_of(*custom, "algorithm.loss.tau_positive=1")
    _, other = caught.value.problems
    assert "algorithm.loss.name=clipped_pg has no `tau_positive`" in other.message


def test_an_advantage_is_a_name_of_the_package_or_a_function_in_a_module() -> None:
    config = load_recipe(None, [*MODEL, "algorithm.advantage=mine:centred"]).config
    assert config.algorithm.advantage_target == "mine:centred"
    assert load_recipe(None, MODEL).config.algorithm.advantage_target is None
    text = refused("algorithm.advantage=grppo")
    assert "has to be: one of grpo, " in text and "or text, of the form module:function" in text


def test_the_deviation_of_a_step_needs_advantages_that_are_known_to_cancel() -> None:
    text = refused("algorithm.advantage=mine:centred", "algorithm.loss.step_std=true")
    assert "advantages of algorithm.advantage=mine:centred may not cancel" in text
