"""``config explain`` knows the names and the keys that installed packages of others bring."""

import sys
from pathlib import Path

import pytest

from offbeat.config.explain import NoSuchKey, explain
from tests.support.installed_package import TRACKER, install_package, module_of

RAPID = """
from typing import Literal

from offbeat.interfaces import Config, EnginePlugin, PluginGeneratorConfig


class Drafts(Config):
    count: int = 4
    '''Drafts at once.'''


class RapidConfig(PluginGeneratorConfig):
    '''Engines of somebody else.'''

    backend: Literal["rapid"] = "rapid"
    '''Sampling backend.'''

    depth: int = 1
    '''Depth of the drafts.'''

    drafts: Drafts = Drafts()
    '''Settings of drafts.'''

    share_weights: str = "never"
    '''Whose weights these engines use.'''


class RapidPlugin(EnginePlugin):
    section = RapidConfig

    def server_class(self):
        return dict


PLUGIN = RapidPlugin()
"""
BROKEN = "raise RuntimeError('imported')"
SUMMARY = "integer; default 1\n    Depth of the drafts."


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


@pytest.fixture
def sprinter(site: Path) -> str:
    """Install a package with an engine; return the name of its module."""
    install_package(site, "sprinter", {"engine.rapid": RAPID})
    return module_of("sprinter", "engine.rapid")


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("algorithm.advantage", "advantage"),
        ("algorithm.loss.name", "loss"),
        ("environment.name", "environment"),
        ("environment.target", "grader"),
        ("generator.backend", "engine"),
        ("plugins", "tracker"),
        ("sampler.name", "sampler"),
    ],
)
def test_a_key_lists_the_names_that_packages_bring_and_imports_none(
    site: Path, key: str, kind: str
) -> None:
    install_package(site, "lab", {f"{kind}.one": BROKEN, f"{kind}.two": BROKEN})
    assert explain(key).endswith("\n    Of installed packages: one (lab), two (lab).")


def test_a_name_of_the_core_is_not_listed_for_a_package(site: Path) -> None:
    install_package(site, "copy", {"sampler.in_order": BROKEN, "engine.stub": BROKEN})
    assert "Of installed packages" not in explain("sampler.name") + explain("generator.backend")


def test_a_key_that_an_engine_of_a_package_alone_has_is_explained(sprinter: str) -> None:
    only = "Only with generator.backend=rapid."
    assert explain("generator.depth") == f"generator.depth: {SUMMARY}\n    {only}"
    section = explain("generator.drafts")
    assert section.startswith(f"generator.drafts: Settings of drafts.\n    {only}\n\n")
    assert "generator.drafts.count\n    integer; default 4\n    Drafts at once." in section
    assert sprinter in sys.modules


@pytest.mark.plugins  # names vllm
def test_a_key_of_every_engine_names_those_of_packages_without_their_import(site: Path) -> None:
    install_package(site, "torn", {"engine.torn": BROKEN})
    shown = explain("generator.engines")
    assert "Only with generator.backend=embedded or vllm or stub or torn.\n" in shown
    assert shown.endswith("Another package may set another default: torn.")


@pytest.mark.usefixtures("sprinter")
def test_a_key_of_another_form_in_an_engine_of_a_package_is_explained_as_both() -> None:
    shown = explain("generator.share_weights")
    assert "true or false; default false" in shown
    assert "Only with generator.backend=embedded or rapid.\n" in shown
    assert shown.endswith(
        "With generator.backend=rapid: text; default never. Whose weights these engines use."
    )


@pytest.mark.usefixtures("sprinter")
def test_the_section_of_engines_has_those_of_packages_and_their_keys() -> None:
    shown = explain("generator")
    assert "\n    rapid: Engines of somebody else.\n" in shown
    assert "generator.depth\n    integer; default 1\n    Depth of the drafts.\n" in shown
    assert shown.count("Only with generator.backend=rapid.") == 3


@pytest.mark.usefixtures("sprinter")
def test_a_misspelt_key_of_an_engine_of_a_package_is_suggested() -> None:
    with pytest.raises(NoSuchKey, match=r"generator.dept: unknown key. Did you mean `depth`\?"):
        explain("generator.dept")


def test_an_engine_that_cannot_be_imported_is_named_where_its_keys_would_be(site: Path) -> None:
    install_package(site, "torn", {"engine.torn": BROKEN, "tracker.board": TRACKER})
    told = "engine torn: its import fails with RuntimeError: imported"
    assert told in explain("generator")
    assert told in explain("generator.share_weights")
    with pytest.raises(NoSuchKey, match=told):
        explain("generator.depth")
    assert told not in explain("trainer") + explain() + explain("plugins.board")


def test_a_dash_in_the_name_of_a_plug_in_stays(site: Path) -> None:
    install_package(site, "lab", {"tracker.my-board": TRACKER})
    assert explain("plugins.my-board.path") == explain(" plugins.my-board.path")
    assert explain("plugins.my-board.path").startswith("plugins.my-board.path: text; required\n")
