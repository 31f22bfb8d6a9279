"""What ``offbeat check`` says of ``trainer.freeze`` beside the megatron trainer."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.launch.checks.model_proof import check_model_proof, count_trained_parameters
from offbeat.messages.finding import Finding, Level, size
from offbeat.plugins.encoder_ranks.checks import check_encoder
from offbeat.plugins.megatron.checks import check_layout
from tests.support.image_text_models import make
from tests.support.model_families import family_model
from tests.support.recipes import make_config

VISION, PROJECTOR = "model.vision_model.*", "model.connector.*"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("idefics3")
    make("idefics3").save_pretrained(path)
    return path


def recipe(path: Path, *freeze: str, **trainer: Any) -> RunConfig:
    return make_config(
        path,
        environment={"name": "digits", "images": {"max_mib": 0.02}},
        generator={"backend": "stub"},
        trainer={"backend": "megatron", "freeze": freeze, **trainer},
    )


def said_of_trained(config: RunConfig) -> Finding:
    (found,) = (each for each in check_model_proof(config) if each.subject == "trained parameters")
    return found


def elements(*within: str) -> int:
    """Of the weights whose names begin so; of all without any."""
    return sum(
        p.numel() for n, p in make("idefics3").named_parameters() if n.startswith(within or "")
    )


def test_the_check_says_how_much_is_trained_beside_a_frozen_tower(model: Path) -> None:
    config = recipe(model, VISION, PROJECTOR)
    left = elements() - elements("model.vision_model.", "model.connector.")
    assert said_of_trained(config).level is Level.OK
    assert said_of_trained(config).message.startswith(f"{left:,} of {elements():,}, ")
    assert count_trained_parameters(config) == left


@pytest.mark.parametrize("encoder", [None, {"data_parallel": 1}], ids=["alone", "encoder ranks"])
@pytest.mark.parametrize(
    ("pattern", "problem", "fix"),
    [
        ("model.text_model.layers.0.*", "in its language model", "set trainer.backend to torch."),
        ("model.conector.*", "no parameter whose name matches", "The nearest name is "),
        ("*", "in its language model", "model.vision_model. or model.connector., or set "),
    ],
    ids=["a layer", "nothing", "everything"],
)
def test_what_is_not_of_the_tower_is_an_error_with_a_way_out(
    model: Path, encoder: dict[str, int] | None, pattern: str, problem: str, fix: str
) -> None:
    config = recipe(model, PROJECTOR, pattern, encoder=encoder)
    found = said_of_trained(config)
    assert found.level is Level.ERROR
    assert problem in found.message
    assert repr(pattern) in found.message
    assert fix in found.fix
    assert all(each.level is Level.OK for each in check_layout(config))


def test_a_text_model_is_sent_to_the_torch_trainer(tmp_path: Path) -> None:
    family_model("Llama").save_pretrained(tmp_path)
    given = {"steps": 1, "model": {"path": str(tmp_path)}, "generator": {"backend": "stub"}}
    trainer = {"backend": "megatron", "freeze": ["lm_head.*"]}
    found = said_of_trained(make_config(**given, trainer=trainer))
    assert found.level is Level.ERROR
    assert found.fix == "Leave the pattern out, or set trainer.backend to torch."


def test_a_rank_that_holds_both_sides_has_gradients_and_moments_of_what_is_trained(
    model: Path,
) -> None:
    (found,) = check_layout(recipe(model, PROJECTOR))
    trained = 4 * (elements() - elements("model.connector."))
    assert f"weights {size(4 * elements())}, gradients {size(trained)}, " in found.message
    assert f"optimizer {size(2 * trained)};" in found.message


def test_encoder_ranks_of_a_frozen_tower_have_weights_alone_and_language_ranks_are_as_without(
    model: Path,
) -> None:
    config = recipe(model, VISION, PROJECTOR, encoder={"data_parallel": 1})
    (tower,) = check_encoder(config, None)
    assert "gradients 0 bytes, optimizer 0 bytes" in tower.message
    without = recipe(model, encoder={"data_parallel": 1})
    assert list(check_layout(config)) == list(check_layout(without))
