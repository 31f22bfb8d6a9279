"""Defines section ``environment`` of a recipe."""

from typing import Annotated, Final

from pydantic import Field

from offbeat.config.base import Config, Options, SectionName
from offbeat.config.environment_name import ENVIRONMENT_NAMES, EnvironmentName
from offbeat.config.environment_traits import find_traits
from offbeat.config.sections.images import ImagesConfig

MEDIA_LIMIT: Final = "environment.images.max_mib"
"""Key of the limit of the media of a prompt."""


class RewardConfig(Config):
    """One of several functions that score each sample."""

    target: str
    """`module:name` of the function, or `math_verify`, as in `environment.target`."""

    weight: float = 1.0
    """Factor of this value in the sum over all functions. Negative punishes; 0 makes it only a
    metric."""

    options: Options = {}
    """Keyword arguments of the function."""


class EnvironmentConfig(Config):
    """Environment that turns a prompt and a model into rewarded samples."""

    name: Annotated[EnvironmentName, Field(description=ENVIRONMENT_NAMES)] = "arithmetic"

    target: str | None = None
    """`module:name` of the reward function, Environment class or agent, importable from the working
    directory; or `math_verify`. A function runs in a killable child. A class can have several
    turns, but runs in the worker, which its bugs can block."""

    command: tuple[str, ...] = ()
    """name=agent: program and arguments, instead of `target`. It reads its task from standard input
    and calls OPENAI_BASE_URL. Each episode is one process."""

    rewards: dict[SectionName, RewardConfig] = {}
    """name=function: several functions by name, instead of `target`. The reward is their weighted
    sum; `rewards/NAME` is the mean of each. Each has separate processes and these limits."""

    options: Options = {}
    """Keyword arguments of the environment. They are fixed for a run and its resumes; a custom
    environment must validate them."""

    reward_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Limit for the call of one sample, or of a whole group if the reward is async, after which
    the process is killed. Agents have `rollout.deadline_s`. Raise it for slow graders."""

    reward_start_s: Annotated[float, Field(gt=0)] = 120.0
    """Limit for starting a reward process and importing `target`, after which the run ends. Raise
    it for heavy imports."""

    reward_workers: Annotated[int, Field(ge=1)] = 1
    """Killable child processes per environment worker. With name=agent or verifiers each runs
    `episodes_per_child` episodes. Each takes a core and memory for its imports."""

    episodes_per_child: Annotated[int, Field(ge=1)] | None = None
    """name=agent: episodes that share a child process and event loop. null: 64 for a function, 1
    for a program. More save memory; a crash or blocking code then interrupts, and repeats, more
    episodes."""

    renderer: Options = {}
    """name=agent or verifiers: renderer of the package renderers, such as `{name: qwen3}`, for
    messages, reasoning and tool calls of a model family. Empty: the chat template, or with
    verifiers its choice by model name, which fails for local directories. A renderer also continues
    turns that a template rewrites (`thinking_retention: all`)."""

    reward_concurrency: Annotated[int, Field(ge=1)] = 64
    """Concurrent calls of an async reward per reward process."""

    reward_retries: Annotated[int, Field(ge=0)] = 0
    """Retries of an async reward that raised `EnvironmentUnavailable` or an error in
    `reward_retry_on`, with growing waits, within `reward_deadline_s`."""

    reward_retry_on: tuple[str, ...] = ()
    """Names of error classes, or their bases, for which an async reward is retried, such as
    ClientError."""

    reward_calls_per_s: Annotated[float, Field(gt=0)] | None = None
    """Calls of an async reward per second, retries included, over the whole run. null: no limit.
    Set it to the limit of the judge's provider."""

    reward_memory_mib: Annotated[int, Field(ge=64)] = 2048
    """Address space limit of a reward process, in MiB."""

    variables: tuple[str, ...] = ()
    """name=agent or verifiers: environment variables to inherit, besides PATH, HOME, locale and
    certificates. Code that a model wrote can read them."""

    max_turns: Annotated[int, Field(ge=1)] = 1
    """Model calls per episode, at most. An episode that needs more ends there."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Environment worker actors, each for many episodes. One is enough until its core is busy."""

    images: ImagesConfig | None = None
    """Pictures in prompts, for a model that reads them. null: rows with pictures are refused."""

    @property
    def has_media(self) -> bool:
        """Return whether prompts may have media."""
        return self.images is not None

    @property
    def max_media_bytes(self) -> int:
        """Return the most bytes of the media of a prompt; a worker refuses a prompt with more."""
        return 0 if self.images is None else int(self.images.max_mib * 2**20)

    @property
    def is_agent(self) -> bool:
        """Return whether episodes call the model over HTTP, from processes of their own."""
        return find_traits(self.name).is_agent

    @property
    def makes_prompts(self) -> bool:
        """Return whether the environment reads no file of prompts."""
        return find_traits(self.name).makes_prompts

    @property
    def renders_messages(self) -> bool:
        """Return whether an agent sends tokens to its endpoint, not messages."""
        return find_traits(self.name).renders_messages

    @property
    def reads_any_row(self) -> bool:
        """Return whether a row of the file of prompts may have any keys."""
        return find_traits(self.name).reads_any_row

    @property
    def targets(self) -> dict[str, str]:
        """The user's functions and classes, by the key of the recipe that names them."""
        named = {
            f"environment.rewards.{name}.target": each.target for name, each in self.rewards.items()
        }
        return named if self.target is None else {"environment.target": self.target, **named}
