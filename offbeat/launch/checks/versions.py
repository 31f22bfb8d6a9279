"""The lines that a bug report needs: versions of this Python, of its packages, of this machine."""

import platform
import re
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Final

from offbeat.doors import installed_version
from offbeat.launch.checks.machine import this_machine
from offbeat.messages.finding import size

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_NAME: Final = re.compile(r"[\w.-]+")
_ABSENT: Final = "not installed"
_HEADING: Final = "versions, for a bug report"


def versions() -> str:
    """Return the block of text: no path, no name of a machine or a user."""
    machine = this_machine()
    lines = [
        ("offbeat", installed_version("offbeat") or _ABSENT),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("machine", f"{machine.cores} cores, {size(machine.memory_bytes)} of memory"),
        ("gpu driver", _gpu_driver()),
        *_packages(),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join([_HEADING, *(f"  {name:<{width}}  {value}" for name, value in lines)])


def _packages() -> Iterator[tuple[str, str]]:
    """Yield what offbeat requires and, if installed, what its extras do; no development tools."""
    is_optional = {
        match.group(): "extra ==" in text
        for text in reversed(requires("offbeat") or [])
        if not text.rstrip("\"'").endswith("dev") and (match := _NAME.match(text)) is not None
    }
    for name in sorted(is_optional, key=str.casefold):
        version = installed_version(name)
        if version is not None or not is_optional[name]:
            yield name, version or _ABSENT


def _gpu_driver() -> str:
    try:
        return _DRIVER.read_text(errors="replace").partition("\n")[0].strip()
    except OSError:
        return "none"
