"""Packages of somebody else with plug-ins, installed into a folder of the path."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.loaded_modules import ROOT
from tests.support.warm_commands import WarmCommands


@dataclass(frozen=True, slots=True)
class InstalledExample:
    """A package of ``examples/``, installed by pip beside this one."""

    source: Path
    site: Path
    commands: WarmCommands

    @classmethod
    def install(cls, source: Path, site: Path) -> "InstalledExample":
        """Install a package without a download."""
        pytest.importorskip("setuptools")  # builds it
        copied = site / "source"
        ignored = shutil.ignore_patterns("build", "*.egg-info")
        shutil.copytree(source, copied, ignore=ignored)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--no-index", "--target", site, copied], check=True)
        return cls(source, site, WarmCommands(cwd=source, environment=_seeing(site)))

    def python(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python in the directory of the example."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=self.source,
            env=_seeing(self.site),
            capture_output=True,
            text=True,
            check=False,
        )

    def command(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the local runtime in the directory of the example."""
        return self.commands.run(self.source, *arguments)

    def offbeat(self, *arguments: str | Path) -> str:
        """Run such a command, which has to succeed; return what it prints."""
        done = self.command(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def test(self) -> subprocess.CompletedProcess[str]:
        """Run the tests of the package."""
        return self.python("-m", "pytest", "-p", "no:cacheprovider", ".")


def _seeing(site: Path) -> dict[str, str]:
    """Return the environment of a process that finds what is installed in a folder."""
    inherited = os.environ.get("PYTHONPATH", str(ROOT))
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(site), inherited])}


def install_package(folder: Path, package: str, sources: Mapping[str, str]) -> None:
    """Write a package with one module per entry point; each module defines ``PLUGIN``.

    ``sources``: the source of each module by its entry point, such as ``tracker.board``.
    """
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    points = [f"{name} = {module_of(package, name)}:PLUGIN" for name in sources]
    (metadata / "entry_points.txt").write_text("\n".join(["[offbeat.plugins]", *points]))
    for name, source in sources.items():
        (folder / f"{module_of(package, name)}.py").write_text(source)


def module_of(package: str, name: str) -> str:
    """Return the name of the module of an entry point."""
    return f"{package}_{name}".replace(".", "_").replace("-", "_")


TRACKER = """
from pathlib import Path

from offbeat.config.base import Config
from offbeat.messages.finding import ok
from offbeat.telemetry.tracker import Tracker


class BoardConfig(Config):
    '''A board of somebody else.'''

    path: str
    '''File of the board.'''

    dry: bool = False
    '''Whether this is a dry run.'''


class BoardSink:
    def __init__(self, path):
        self.name, self.path = "board", Path(path)

    def open(self):
        pass

    def write(self, record):
        with self.path.open("a") as file:
            file.write(f"{record.step} {sorted(record.metrics)}\\n")

    def close(self):
        pass


class Board(Tracker):
    section = BoardConfig

    def make_sink(self, section, run):
        return BoardSink(section.path)

    def check(self, section, environ):
        yield ok("board", section.path)

    def for_dry_run(self, section):
        return {"dry": True}


PLUGIN = Board()
"""
"""Source of a module with a tracker."""
