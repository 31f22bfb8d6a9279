"""An image-text model that vLLM does not serve is refused by name, by the check and at the start."""

import json
from pathlib import Path

import pytest

from offbeat.messages.finding import Level
from offbeat.plugins.images.families import FAMILIES
from offbeat.plugins.vllm.checks import check_vllm_model
from offbeat.plugins.vllm.errors import PicturesUnserved
from offbeat.plugins.vllm.served_families import SERVED, check_family
from tests.support.recipes import make_config

UNSERVED = sorted(set(FAMILIES) - set(SERVED))


def model_of(family: str, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    return str(folder)


def test_smolvlm2_is_among_the_families_that_vllm_does_not_serve() -> None:
    assert "smolvlm" in UNSERVED


@pytest.mark.parametrize("family", UNSERVED)
def test_the_start_of_an_engine_refuses_a_family_by_name_and_says_what_serves_it(
    family: str, tmp_path: Path
) -> None:
    with pytest.raises(PicturesUnserved) as refused:
        check_family(model_of(family, tmp_path))
    told = str(refused.value)
    assert f"model_type={family}: vLLM serves image-text models of idefics3" in told
    assert "Use generator.backend=embedded" in told


@pytest.mark.parametrize("family", [*SERVED, "llama"])
def test_a_served_family_and_a_model_of_text_pass(family: str, tmp_path: Path) -> None:
    check_family(model_of(family, tmp_path))


def test_the_check_of_a_recipe_names_the_family_and_the_other_backend(tmp_path: Path) -> None:
    config = make_config(
        model_of("smolvlm", tmp_path), generator={"backend": "vllm", "max_model_len": 64}
    )
    (finding,) = check_vllm_model(config)
    assert finding.level is Level.ERROR
    assert "model_type=smolvlm" in finding.message
    assert finding.fix == "Use generator.backend=embedded."
