"""Tutorials: pages whose code blocks a test runs, in order, in an empty folder.

A block with a ``title`` is a file. A block of bash or Python without one is run, and a block of text
right after it is what it prints. HTML comments before a block say how the test differs from a reader::

    <!-- test: steps=20 -->          fewer steps: changes the value in the block, or overrides the recipe
    <!-- not run: needs a GPU -->    the test leaves the block out, and the page's last line counts it
    <!-- exit code: 2 -->            the last command of the block refuses something on purpose
    <!-- test: in a checkout -->     once in a page: it starts in the root of the repository
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tests.support.loaded_modules import ROOT
from tests.support.warm_commands import warm_commands

LINKED: Final = ("docs", "examples", "models", "recipes")
LIMIT_S: Final = 1000
"""Seconds after which a command is killed. It takes a few, and much longer on a machine that others use."""

RUN: Final = ("bash", "python")
OUTPUT: Final = "text"
MODULES: Final = {"offbeat": "-m offbeat", "python": "", "pip": "-m pip", "pytest": "-m pytest"}
"""Programs of a page, and how this Python runs each: others on the path belong to another one."""

IN_A_CHECKOUT: Final = "<!-- test: in a checkout -->"

_PART: Final = re.compile(
    r"^<!-- (?P<kind>test|not run|exit code): (?P<said>[^\n]+?) -->$"
    r"|^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_SHELL: Final = frozenset("|&;<>$`")
_NUMBERS: Final = (
    (re.compile(r"[\u2580-\u259f]+"), " "),  # bars
    (re.compile(r"\b(\w+)-[0-9a-f]{8}\b"), r"\1-0"),  # a run's id
    (re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"), "0"),
    (re.compile(r"\b0 min 0 s\b|\b0 ms\b"), "0 s"),
    (re.compile(r"\b0 [kMG]i?B\b"), "0 B"),
    (re.compile(r"\s+"), " "),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    line: int
    language: str
    title: str
    text: str
    changes: Mapping[str, str]
    """Values that the test uses instead of the page's, by key."""

    not_run: str
    """Why the test leaves the block out; empty if it does not."""

    exit_code: int
    """Exit code of the last command."""

    output: str = ""
    """What the page says that the block prints."""

    def read(self) -> str:
        """Return the text of the block with the test's own values.

        Raises:
            ValueError: a value is not in the block and cannot be an override.
        """
        text = self.text
        for key, value in self.changes.items():
            found = re.compile(rf"\b({re.escape(key)}(?:=|: ))[\w.]+")
            if found.search(text):
                text = found.sub(rf"\g<1>{value}", text)
            elif self.language == "bash" and "offbeat train" in text:
                text = re.sub(
                    r"^(offbeat train [^#\n]*)", rf"\1 {key}={value} ", text, flags=re.MULTILINE
                )
            else:
                raise ValueError(f"line {self.line}: the block has no {key}")
        return text


@dataclass(frozen=True, slots=True)
class Page:
    """A tutorial."""

    path: Path
    blocks: Sequence[Block]

    @classmethod
    def read(cls, path: Path) -> "Page":
        """Read a page of the repository."""
        return cls(path, parse_blocks(path.read_text()))

    @property
    def is_in_a_checkout(self) -> bool:
        """Whether the page starts in the root of the repository."""
        return IN_A_CHECKOUT in self.path.read_text()

    def describe_test(self) -> str:
        """Return the last line that the page must have: how much of it a test runs."""
        left_out = Counter(block.not_run for block in self.blocks if block.not_run)
        run = len(self.blocks) - left_out.total()
        said = f"*Tested: {run} block{'' if run == 1 else 's'}."
        if left_out:
            reasons = ", ".join(f"{count} ({why})" for why, count in left_out.items())
            said += f" Not run: {reasons}."
        return f"{said}*"


def parse_blocks(page: str) -> list[Block]:
    """Return the blocks of a page in order, each with its output.

    Raises:
        ValueError: the test would neither run a block, nor write it, nor compare it.
    """
    blocks, changes, not_run, code, end = list[Block](), dict[str, str](), "", 0, -1
    for part in _PART.finditer(page):
        line = page.count("\n", 0, part.start()) + 1
        if part["kind"]:
            if part["kind"] == "not run":
                not_run = part["said"]
            elif part["kind"] == "exit code":
                code = int(part["said"])
            elif part[0] != IN_A_CHECKOUT:
                changes = dict(each.split("=", 1) for each in part["said"].split())
            continue
        language, title = part["language"], part["title"] or ""
        if language == OUTPUT and not title:
            if not blocks or page[end : part.start()].strip():
                raise ValueError(f"line {line}: output that follows no command")
            blocks[-1] = replace(blocks[-1], output=part["text"])
        elif title or language in RUN or not_run:
            blocks.append(Block(line, language, title, part["text"], changes, not_run, code))
        else:
            raise ValueError(f"line {line}: a block of {language or 'nothing'} without a title")
        changes, not_run, code, end = {}, "", 0, part.end()
    return blocks


def find_missing_lines(expected: str, printed: str) -> list[str]:
    """Return the lines of the page's output from the first that was not printed on.

    Lines must follow each other, except around ``...``. A number stands for any number with its unit.
    """
    actual = [_without_numbers(line) for line in printed.splitlines()]
    after, follows = 0, False
    lines = expected.splitlines()
    for number, line in enumerate(lines):
        wanted = _without_numbers(line)
        if wanted == "...":
            follows = False
            continue
        places = range(after, min(after + 1, len(actual)) if follows else len(actual))
        found = next((place for place in places if actual[place] == wanted), None)
        if found is None:
            return lines[number:]
        after, follows = found + 1, True
    return []


def _without_numbers(line: str) -> str:
    for pattern, plain in _NUMBERS:
        line = pattern.sub(plain, line)
    return line.strip()


PROMPT: Final = """
import json, os, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    folder, source = json.loads(line)
    os.chdir(folder)
    sys.path[0] = folder
    exec(compile(source, "page", "exec"), names)
    print("\\0", flush=True)
"""
"""A Python that runs one block after the other, as a notebook does."""


@dataclass(slots=True)
class Reader:
    """Somebody who follows a page, in a folder: a shell, and a Python that lives as long."""

    home: Path
    """An empty folder for commands and installed packages."""

    folder: Path
    """Where the shell is."""

    _python: subprocess.Popen[str] | None = field(default=None, init=False)

    def follow(self, page: Page) -> None:
        """Write and run the blocks of a page.

        Raises:
            AssertionError: a block failed, or printed something else than the page shows.
        """
        for name in LINKED if page.is_in_a_checkout else ():
            (self.folder / name).symlink_to(ROOT / name)
        try:
            for block in page.blocks:
                if not block.not_run:
                    self._do(page, block)
        finally:
            self._close()

    def _do(self, page: Page, block: Block) -> None:
        text = block.read()
        if block.title:
            target = self.folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            return
        run = self._run_bash if block.language == "bash" else self._exec
        failed, printed = run(text, block.exit_code)
        place = f"{page.path.name}:{block.line}"
        assert not failed, f"{place}: {failed}\n{printed}"
        missing = find_missing_lines(block.output, printed)
        assert not missing, f"{place}: not printed:\n" + "\n".join([*missing, "", printed])

    def _run_bash(self, text: str, exit_code: int) -> tuple[str, str]:
        """Return the command that failed, if any, and what all of them printed."""
        printed, code, command = list[str](), 0, ""
        for command in text.replace("\\\n", " ").splitlines():
            words = shlex.split(command, comments=True)
            if not words:
                continue
            if words[0] == "cd":
                self.folder = (self.folder / words[1]).resolve()
                continue
            if words[0] == "offbeat" and not _SHELL & set(command.split(" #")[0]) and self._is_bare:
                done = warm_commands().run(self.folder, *words[1:], environment=self._own())
            else:
                done = subprocess.run(
                    ["bash", "-euo", "pipefail", "-c", command],
                    cwd=self.folder,
                    env={**os.environ, **self._own()},
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
            printed += [done.stdout, done.stderr]
            if code := done.returncode:
                break
        failed = "" if code == exit_code else f"exit code {code} of {command}"
        return failed, "\n".join(printed)

    @property
    def _is_bare(self) -> bool:
        """Whether the page has installed no package, which a fork would not find."""
        return not (self.home / "site").exists()

    def _exec(self, source: str, exit_code: int) -> tuple[str, str]:
        """Run a block of Python; return why it failed, if it did, and what it printed."""
        assert exit_code == 0
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-u", "-c", PROMPT],
                cwd=self.folder,
                env={**os.environ, **self._own()},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        asked, answers = self._python.stdin, self._python.stdout
        assert asked is not None and answers is not None
        asked.write(json.dumps([str(self.folder), source]) + "\n")
        asked.flush()
        printed = list[str]()
        for line in answers:
            if line == "\0\n":
                return "", "".join(printed)
            printed.append(line)
        return "Python ended", "".join(printed)

    def _close(self) -> None:
        if self._python is not None:
            self._python.communicate(timeout=LIMIT_S)  # it ends with its input

    def _own(self) -> dict[str, str]:
        """Return the environment of a reader without an account, a network or a cluster."""
        programs = self.home / "bin"
        if not programs.exists():
            programs.mkdir()
            for name, module in MODULES.items():
                program = programs / name
                program.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
                program.chmod(0o755)
        site = self.home / "site"
        return {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
            "COLUMNS": "100",
            "WANDB_MODE": "disabled",
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it the other way round
            "PIP_TARGET": str(site),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
