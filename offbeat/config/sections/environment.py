"""Defines section ``environment`` of a recipe."""

from typing import Annotated, Final, Literal

from pydantic import Field

from offbeat.config.base import Config, Options, SectionName
from offbeat.config.sections.images import ImagesConfig

MAKE_PROMPTS: Final = ("arithmetic", "digits", "reasoning_gym", "verifiers")
"""Environments that read no file of prompts."""

AGENTS: Final = ("agent", "verifiers")
"""Environments whose episodes call the model over HTTP, from processes of their own."""

EPISODES_PER_CHILD: Final = 64
"""Episodes that share a child process, of an agent that is a function."""


class RewardConfig(Config):
    """One of several functions that score each sample."""

    target: str
    """``module:name`` of the function, or ``math_verify``, as `environment.target` has it."""

    weight: float = 1.0
    """Factor of its value in the reward of a sample, which is the sum over all functions. Below 0 it
    punishes; with 0 the value is a metric alone."""

    options: Options = {}
    """Keyword arguments of the function."""


class EnvironmentConfig(Config):
    """Environment that turns a prompt and a model into rewarded samples."""

    name: Literal[
        "arithmetic",
        "digits",
        "gsm8k",
        "reasoning_gym",
        "function",
        "custom",
        "agent",
        "verifiers",
        "demonstrations",
        "stub",
    ] = "arithmetic"
    """arithmetic: built-in addition; digits: a digit to read in a picture, drawn from the seed and the
    row; gsm8k: questions with one number as answer, from a file;
    reasoning_gym: ``options.task`` of the library reasoning-gym;
    function: a Python function as reward; custom: ``target`` is an Environment class;
    agent: ``target`` is an async function that calls the model over HTTP; verifiers: an environment
    of the library verifiers, ``options.env``; demonstrations: rows
    with a prompt and its completion, or a conversation, which are trained on as they are, without
    a generator."""

    target: str | None = None
    """``module:name`` of the reward function, Environment class or agent, importable from the working directory;
    or ``math_verify``, a reward function of this package. A function is the least to write, and runs in a child that
    can be killed; a class plays several turns, in the worker itself, which its bugs can block."""

    command: tuple[str, ...] = ()
    """name=agent: program and its arguments, in place of ``target``; it reads its task from standard
    input and calls the model at OPENAI_BASE_URL. For agents in another language or environment
    of packages, at a process more for each episode."""

    rewards: dict[SectionName, RewardConfig] = {}
    """name=function: several functions by name in place of ``target``; the reward of a sample is the sum of
    their values by weight, and the mean of each is the metric `rewards/NAME`. Each has processes of
    its own, and the limits of this section for itself."""

    options: Options = {}
    """Keyword arguments of the environment. What stands here varies between recipes without a change of code,
    and is fixed for a run and its resumes; a custom environment has to check its own options."""

    reward_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest one call of user reward code may take before its process is killed; an agent has
    ``rollout.deadline_s`` instead. Raise it for
    slow graders; code that hangs then blocks a process longer."""

    reward_start_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest a reward process may take to start and import ``target``; past it the run ends.
    Raise it for heavy imports."""

    reward_workers: Annotated[int, Field(ge=1)] = 1
    """Killable child processes that run user reward code, for each environment worker; with
    name=agent or verifiers, each plays one episode at a time, or ``episodes_per_child``. More grade in parallel, at a core and the memory of
    their imports each."""

    episodes_per_child: Annotated[int, Field(ge=1)] | None = None
    """name=agent: episodes that share a child process, on one event loop; None: 64 of a function,
    and always one of a program. More take less memory; a crash, or code that blocks, then
    interrupts more of them, which are played again."""

    renderer: Options = {}
    """name=agent or verifiers: renderer of the library renderers, such as ``{name: qwen3}``, which
    writes and reads messages in the format of a family of models; empty: the model's chat template
    with name=agent, and verifiers' choice by the model's name, which a local directory does not
    have. A renderer reads reasoning and tool calls of its family and continues turns that a template
    rewrites, as ``thinking_retention: all`` says; a template needs no package and fits any model."""

    reward_concurrency: Annotated[int, Field(ge=1)] = 64
    """Calls of an async reward that each reward process has open at once. More wait for a slow judge
    together, and load it more."""

    reward_retries: Annotated[int, Field(ge=0)] = 0
    """Further tries of one call of an async reward that raised ``EnvironmentUnavailable`` or an error
    of ``reward_retry_on``, with growing waits, within ``reward_deadline_s``. More sit out a judge
    that refuses now and then, at the price of later rewards."""

    reward_retry_on: tuple[str, ...] = ()
    """Names of error classes, or of their bases, after which a call of an async reward is tried
    again, such as ClientError and TimeoutError."""

    reward_calls_per_s: Annotated[float, Field(gt=0)] | None = None
    """Calls of an async reward that the run starts in a second, tries included, shared evenly by all
    reward processes; None: no limit. Set it to what the judge's provider allows."""

    reward_memory_mib: Annotated[int, Field(ge=64)] = 2048
    """Address space in MiB that a reward process may use before the operating system refuses it
    more. Raise it for graders that load much; a leak then takes more from the machine."""

    variables: tuple[str, ...] = ()
    """name=agent or verifiers: environment variables that its processes inherit besides PATH, HOME, locale
    and certificates. Name the keys of services that the agent needs; code that a model wrote can
    read them."""

    max_turns: Annotated[int, Field(ge=1)] = 1
    """Model calls in one episode at most. More let an episode finish longer tasks and make its
    rollout longer; one that needs more ends as it stands."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Environment worker actors; each runs many episodes at once. More spread the work of
    environments and graders over cores; one is enough while its core is not busy."""

    images: ImagesConfig | None = None
    """Pictures that rows name, for a model that reads them; None: such rows are refused."""

    @property
    def is_agent(self) -> bool:
        """Return whether episodes call the model over HTTP, from processes of their own."""
        return self.name in AGENTS

    @property
    def episodes_at_once(self) -> int:
        """Return how many episodes of an agent share a child process."""
        if self.command or self.name != "agent":
            return 1
        return self.episodes_per_child or EPISODES_PER_CHILD

    @property
    def targets(self) -> dict[str, str]:
        """The user's functions and classes, by the key of the recipe that names them."""
        named = {
            f"environment.rewards.{name}.target": each.target for name, each in self.rewards.items()
        }
        return named if self.target is None else {"environment.target": self.target, **named}
