"""Error, with installation advice, for a missing package that a command needs."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from offbeat.messages.failures import OffbeatError, ShortInNotebooks

_FIXES: Final = {
    "ray": "Install it: pip install 'offbeat[ray]'. One process needs no Ray: runtime=local, or --local",
    "torch": "Install it with transformers: pip install torch transformers",
    "transformers": "Install it: pip install transformers",
    "tensordict": "Install it: pip install tensordict",
    "safetensors": "Install it: pip install safetensors",
    "tokenizers": "Install it: pip install tokenizers",
    "pyarrow": "Install it: pip install pyarrow",
    "cloudpickle": "Install it: pip install cloudpickle",
    "matplotlib": "Install it: pip install 'offbeat[notebook]'",
}
"""Packages that parts of offbeat need, and the advice if one is missing."""


class PackageMissing(ShortInNotebooks, OffbeatError):
    """A package that is needed now is not installed.

    Fix: install the package that the message names.
    """

    package: str

    @property
    def problem(self) -> str:
        """Return the error without its fix."""
        return f"the package {self.package} is needed here and is not installed"

    @property
    def fix(self) -> str:
        """Return the installation advice."""
        return _FIXES.get(self.package, f"Install it: pip install {self.package}")

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


@contextmanager
def name_missing_package() -> Generator[None]:
    """Raise ``PackageMissing`` if the block imports a known package that is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_package(error) or error from None


def missing_package(error: ModuleNotFoundError) -> PackageMissing | None:
    """Return the error for a failed import of a known package, or None for an unknown package."""
    package = (error.name or "").partition(".")[0]
    return PackageMissing(package) if package in _FIXES else None
