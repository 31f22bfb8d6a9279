"""The public names of the package: each resolves, its stub declares it, and nothing is loaded early."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

import offbeat
from offbeat import interfaces

FACES = [offbeat, interfaces]


def declared(face: ModuleType) -> dict[str, str]:
    """Module of each name that the stub of a package imports."""
    assert face.__file__ is not None
    stub = ast.parse(Path(face.__file__).with_suffix(".pyi").read_text())
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_every_public_name_is_what_the_stub_says(face: ModuleType) -> None:
    names = declared(face)
    assert sorted(names) == sorted(face.__all__) == dir(face)
    for name, module in names.items():
        assert getattr(face, name) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_a_name_that_is_not_public_is_an_attribute_error(face: ModuleType) -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = face.Nonsense


def test_importing_the_package_loads_neither_ray_nor_torch() -> None:
    program = "import sys, offbeat; print(*{'ray', 'torch'} & {*sys.modules})"
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert finished.stdout.split() == []


def test_the_hook_of_an_engine_server_has_public_types() -> None:
    types = get_type_hints(interfaces.EngineServer._load_release)  # noqa: SLF001 - plug-ins override it
    assert {kind.__name__ for kind in types.values()} <= set(interfaces.__all__)


PACKAGES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("package", ["engine", "plugin"])
def test_a_package_of_plugins_needs_public_names_alone(package: str) -> None:
    imports = {
        (node.module, alias.name)
        for path in (PACKAGES / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "offbeat"
        for alias in node.names
    }
    public = {"offbeat", "offbeat.interfaces", "offbeat.testing"}
    assert {module for module, _ in imports} <= public
