"""Computes digests of a run's input files other than the recipe: prompts and user code.

A run may last days and be continued by new processes. Each process reads these files again and
compares their content with the content at the start of the run.
"""

import ast
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from offbeat.config.by_value import digest_in_name, is_by_value
from offbeat.doors import find_module
from offbeat.messages.failures import OffbeatError

DATA: Final = "data.path"
ENVIRONMENT: Final = "environment.target"
SAMPLER: Final = "sampler.target"
ADVANTAGE: Final = "algorithm.advantage"
LOSS: Final = "algorithm.loss.target"


def eval_key(name: str) -> str:
    """Return the recipe key that names the file of an evaluation set."""
    return f"eval.sets.{name}.path" if name else "eval.path"


class InputChanged(OffbeatError):
    """An input file has changed since the run began.

    Fix: restore it and resume, or start a new run; if only code changed, add ``--changed-code``.
    """

    key: str
    value: str

    def __str__(self) -> str:
        return (
            f"{self.key}={self.value} changed after the run began. Restore its content and "
            "resume the run, or start a new one"
        )


def check_same(key: str, value: str, digest: str | None, began_with: Mapping[str, str]) -> None:
    """Raise if this input has changed since the run began. Do nothing if a digest is unknown.

    Raises:
        InputChanged: The digests differ.
    """
    if digest is not None and began_with.get(key, digest) != digest:
        raise InputChanged(key, value)


def digest_contents(contents: Iterable[bytes]) -> str:
    """Return one SHA-256 digest of several contents, in this order."""
    whole = hashlib.sha256()
    for content in contents:
        whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()


def source_digest(target: str, working_dir: Path) -> str | None:
    """Return the digest of the source of ``module:name``, or None without a source file.

    The digest covers the module and, recursively, the modules below ``working_dir`` that it imports
    by ``import`` and ``from`` statements. Installed packages do not count as the user's source. The
    name of an object that was passed by value contains its digest.
    """
    if is_by_value(target):
        return digest_in_name(target)
    try:
        files = _sources(target.partition(":")[0], working_dir)
        return digest_contents(file.read_bytes() for file in files) if files else None
    except OSError:
        return None  # the import itself reports the problem


def resolve_program(name: str, working_dir: Path) -> str | None:
    """Return a program's path: below ``working_dir`` if the name has a folder, else on the PATH."""
    return shutil.which(str(working_dir / name) if os.sep in name else name)


def _sources(module: str, working_dir: Path) -> list[Path]:
    """Return the files of the module and of all modules below ``working_dir`` that it imports.

    They are sorted by module name, so the order does not depend on their location.
    """
    first = find_module(module, working_dir)
    if first is None or not first.is_file():
        return []
    files, waiting = {module: first}, [module]
    while waiting:
        name = waiting.pop()
        for imported in sorted(set(_imports(name, files[name]))):
            file = _own(imported, working_dir)
            if file is not None and imported not in files:
                files[imported] = file
                waiting.append(imported)
    return [files[name] for name in sorted(files)]


def _own(module: str, working_dir: Path) -> Path | None:
    """Return the source file of a module below ``working_dir``, or None for any other module."""
    folder = working_dir
    *packages, last = module.split(".")
    for package in packages:
        folder /= package
    for file in (folder / last / "__init__.py", folder / f"{last}.py"):
        if file.is_file():
            return file
    return None


def _imports(module: str, file: Path) -> Iterator[str]:
    """Yield every module that a source imports, and the packages that contain it."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # the import itself reports the problem
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for name in _find_module_names(node, package):
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def _find_module_names(node: ast.AST, package: str) -> Iterator[str]:
    """Yield names in an import statement: modules, and names that may be modules."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        around = package.split(".") if node.level else []
        around = around[: len(around) - max(0, node.level - 1)]
        base = ".".join(part for part in (*around, node.module or "") if part)
        if base:
            yield base
        yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)
