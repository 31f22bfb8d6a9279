"""Defines section ``environment`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, Options


class EnvironmentConfig(Config):
    """Environment that turns a prompt and a model into rewarded samples."""

    name: Literal["arithmetic", "gsm8k", "function", "custom", "stub"] = "arithmetic"
    """arithmetic: built-in addition; gsm8k: questions with one number as answer, from a file.

    Function: a Python function as reward; custom: ``target`` is an Environment class.
    """

    target: str | None = None
    """``module:name`` of the reward function or Environment class, importable from the working directory."""

    options: Options = {}
    """Keyword arguments of the environment."""

    reward_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest one call of user reward code may take before its process is killed."""

    reward_start_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest a reward process may take to start and import ``target``; past it the run ends."""

    reward_workers: Annotated[int, Field(ge=1)] = 1
    """Killable child processes that run user reward code, for each environment worker."""

    reward_memory_mib: Annotated[int, Field(ge=64)] = 2048
    """Address space a reward process may use before the operating system refuses it more."""

    max_turns: Annotated[int, Field(ge=1)] = 1
    """Model calls in one episode at most."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Environment worker actors; each runs many episodes at once."""
