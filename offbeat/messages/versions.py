"""Compares versions of packages by major and minor number."""

import re


def read_minor(version: str) -> tuple[int, int] | None:
    """Return major and minor number, or None for the version of a custom build."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def is_within(version: str, first: str, last: str) -> bool:
    """Return whether the minor version is in a range. True for a custom build.

    Args:
        version: The version of an installed package.
        first: Major and minor number of the oldest version, such as ``2.11``.
        last: Major and minor number of the newest version.
    """
    minor = read_minor(version)
    oldest, newest = read_minor(first), read_minor(last)
    return minor is None or oldest is None or newest is None or oldest <= minor <= newest
