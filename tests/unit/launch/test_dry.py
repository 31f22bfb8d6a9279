from pathlib import Path

import pytest

from offbeat.config.crosschecks import clashes
from offbeat.config.limits import trainer_ranks
from offbeat.config.loader import load_recipe
from offbeat.config.mixture import environment_views
from offbeat.config.problems import ConfigError
from offbeat.config.run import RunConfig
from offbeat.launch.dry_run import dry

ROOT = Path(__file__).parents[3]
STEPS, ENGINES, TOKENS = 10, 4, 64
"""What a laptop bears; written down here, not read from the code under test."""

RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))


def name_of(recipe: Path) -> str:
    return recipe.relative_to(ROOT / "recipes").as_posix()


def check(dried: RunConfig) -> None:
    assert (dried.trainer.backend, dried.generator.backend) == ("stub", "stub")
    for view in environment_views(dried).values():
        assert view.environment.name == "stub"
    assert dried.steps <= STEPS
    assert dried.generator.engines <= ENGINES
    assert dried.generator.sampling.max_new_tokens <= TOKENS
    assert trainer_ranks(dried) == 1
    reserved = (dried.trainer, dried.generator)
    assert all(section.cpus == 0 and section.gpus == 0 for section in reserved)


@pytest.mark.plugins
@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_every_recipe_can_be_dried(recipe: Path) -> None:
    config = load_recipe(recipe, (), dry_run=True).config
    dried = dry(config)
    check(dried)
    assert dried.name == f"{config.name}-dry"
    kept = (
        "groups_per_step",
        "samples_per_group",
        "sampler",
        "algorithm",
        "sync",
        "buffer",
        "seed",
    )
    assert all(getattr(dried, key) == getattr(config, key) for key in kept)


@pytest.mark.plugins
def test_a_large_recipe_shrinks_to_what_a_laptop_bears() -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    large = (
        *("steps=100000", "generator.engines=64", "generator.sampling.max_new_tokens=400"),
        *("generator.gpus=8", "generator.device=cuda", "trainer.gpus=8", "trainer.device=cuda"),
        *("environment.workers=32", "wandb.mode=online"),
    )
    dried = dry(load_recipe(recipe, large, dry_run=True).config)
    check(dried)
    assert (dried.steps, dried.generator.engines, dried.environment.workers) == (STEPS, ENGINES, 1)
    assert dried.generator.sampling.max_new_tokens == TOKENS


def test_a_small_recipe_stays_small() -> None:
    recipe = ROOT / "recipes" / "quickstart.yaml"
    small = load_recipe(recipe, ("steps=2",), dry_run=True).config
    dried = dry(small)
    check(dried)
    assert (dried.steps, dried.generator.engines) == (2, small.generator.engines)
    assert dried.generator.sampling == small.generator.sampling


@pytest.mark.plugins
@pytest.mark.parametrize(
    "sizes",
    [
        ("trainer.encoder.data_parallel=1", "sync.transport=reshard"),
        ("trainer.data_parallel=4", "trainer.encoder.data_parallel=2"),
        ("trainer.tensor_parallel=2", "trainer.encoder.tensor_parallel=2"),
    ],
    ids=" ".join,
)
def test_one_stub_stands_for_encoder_ranks_too(sizes: tuple[str, ...]) -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    config = load_recipe(recipe, sizes, dry_run=True).config
    assert trainer_ranks(config) > 1
    dried = dry(config)
    check(dried)
    assert list(clashes(dried, dry_run=True)) == []
    assert dried.sync.transport == config.sync.transport


@pytest.mark.plugins
def test_a_dry_run_refuses_encoder_ranks_that_do_not_divide_the_lanes() -> None:
    recipe = ROOT / "recipes" / "quickstart-images.yaml"
    sizes = ("trainer.data_parallel=4", "trainer.encoder.data_parallel=3")
    with pytest.raises(ConfigError, match=r"not divisible by trainer\.encoder\.data_parallel=3"):
        load_recipe(recipe, sizes, dry_run=True)
