"""Versions of megatron-core that the suites of this backend were run with, and the bound that follows."""

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
TRIED = ("0.16.1",)
"""Versions under which tests/parity/megatron_backend passes. Newer ones need Python 3.12: docs/megatron.md."""


def test_the_extra_takes_the_versions_that_were_tried_and_no_later_minor() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (bound,) = (Requirement(each) for each in extras["megatron"])
    assert all(each in bound.specifier for each in TRIED)
    assert not list(bound.specifier.filter(["0.15.3", "0.17.0", "0.18.0", "0.19.2"]))


def test_the_pin_is_a_version_that_was_tried() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = (line.partition("==")[2] for line in lines if line.startswith("megatron-core=="))
    assert pinned in TRIED


def test_the_installed_version_is_one_that_was_tried() -> None:
    pytest.importorskip("megatron.core", reason="needs the extra megatron")
    assert version("megatron-core") in TRIED
