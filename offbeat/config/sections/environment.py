"""Defines sections ``environment`` and ``environments`` of a recipe, and the rules of an environment."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeVar, cast

from pydantic import (
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from offbeat.config.base import Config, Options, SectionName, with_fields
from offbeat.config.environment_traits import (
    CORE_ENVIRONMENTS,
    find_environment_plugin,
    find_traits,
    known_environments,
)
from offbeat.config.graders import GRADERS
from offbeat.config.problems import Clash, target_clashes
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.eval import EvalSetConfig
from offbeat.doors import NoSuchPlugin, PluginUnusable, find_only, find_plugins

if TYPE_CHECKING:
    from offbeat.config.run import RunConfig


C = TypeVar("C", bound=Config)


class MediaLimits(Protocol):
    """The section of media: limits of a prompt."""

    @property
    def max_bytes(self) -> int:
        """Return the maximum number of media bytes of a prompt."""
        ...


class _MediaPlugin(Protocol):
    key: str
    section: type[Config]
    doc: str

    def find_clashes(self, config: "RunConfig") -> Iterator[Clash]: ...


def with_media(core: type[C]) -> type[C]:
    """Return section ``environment`` with the sections of media plug-ins."""
    fields: dict[str, Any] = {
        plugin.key: (plugin.section | None, Field(default=None, description=plugin.doc))
        for plugin in _plugins()
    }
    return with_fields(core, fields)


def find_media_limits(environment: Config) -> MediaLimits | None:
    """Return the limits of media in prompts, or None if prompts have no media."""
    given = (getattr(environment, plugin.key) for plugin in _plugins())
    return next((section for section in given if section is not None), None)


def media_clashes(config: "RunConfig") -> Iterator[Clash]:
    """Yield settings that cannot be combined with media in prompts."""
    for plugin in _plugins():
        yield from plugin.find_clashes(config)


def _plugins() -> list[_MediaPlugin]:
    return [cast("_MediaPlugin", plugin) for plugin in find_plugins("media").values()]


PLUGIN_UNUSABLE: Final = "plugin_unusable"
"""Type of the pydantic error for an installed but broken plug-in."""


def _accept_plugin(name: object, is_known: ValidatorFunctionWrapHandler) -> object:
    """Accept a known environment, or an environment of another package."""
    try:
        return is_known(name)
    except ValidationError:
        if not isinstance(name, str) or _is_absent(name):
            raise
        return name


def _is_absent(name: str) -> bool:
    try:
        find_environment_plugin(name)
    except NoSuchPlugin:
        return True
    except PluginUnusable as unusable:
        raise unusable_error(unusable) from None
    return False


def unusable_error(unusable: PluginUnusable, fix: str = "") -> PydanticCustomError:
    """Return the error of a value that names an unusable plug-in; ``fix`` replaces its fix."""
    problem = f"{unusable.subject}: {unusable.problem}"
    context = {"problem": problem, "fix": f"{fix or unusable.fix}."}
    return PydanticCustomError(PLUGIN_UNUSABLE, "{problem}", context)


if TYPE_CHECKING:
    EnvironmentName = str
else:
    EnvironmentName = Annotated[
        Literal[tuple(known_environments())],
        WrapValidator(_accept_plugin),
        PlainSerializer(str),  # a literal's serializer warns about the name of a plug-in
    ]

ENVIRONMENT_NAMES: Final = " ".join(
    f"{name}: {traits.doc}" for name, traits in known_environments().items() if traits.doc
)
"""Documentation of ``environment.name``."""


_CALL_KEYS: Final = {
    "reward_concurrency",
    "reward_retries",
    "reward_retry_on",
    "reward_calls_per_s",
}
"""Keys that only an async reward reads."""

_REWARD_DEADLINE_S: Final = 10.0


class RewardConfig(Config):
    """One of several functions that score each sample."""

    target: str
    """`module:name` of the function, or `math_verify`, as in `environment.target`."""

    weight: float = 1.0
    """Factor of this reward in the weighted sum. Negative punishes; 0 only logs it as a metric."""

    options: Options = {}
    """Keyword arguments of the function."""


class EnvironmentConfig(Config):
    """Environment that turns a prompt and a model into rewarded samples."""

    name: Annotated[EnvironmentName, Field(description=ENVIRONMENT_NAMES)] = "arithmetic"

    target: str | None = None
    """`module:name` of the reward function, Environment class or agent, importable from the working
    directory; or `math_verify`. A function runs in a child process that can be killed. A class can
    have several turns, but its bugs can block the worker in which it runs."""

    command: tuple[str, ...] = ()
    """With `environment.name=agent`: program and arguments, instead of `target`. Each episode is
    one process. It reads its task from standard input and calls the model at OPENAI_BASE_URL."""

    rewards: dict[SectionName, RewardConfig] = {}
    """With `environment.name=function`: several named functions, instead of `target`. The reward is
    their weighted sum, and the metric `rewards/NAME` is the mean of function NAME. Each function
    runs in separate processes, under the limits in this section."""

    options: Options = {}
    """Keyword arguments of the environment, fixed for a run and its resumes. A custom environment
    must validate them."""

    reward_deadline_s: Annotated[float, Field(gt=0)] = _REWARD_DEADLINE_S
    """Seconds to score one sample, or a whole group if the reward is async. A process that exceeds
    this is killed. Raise it for slow graders. Agents have `episode_deadline_s`."""

    reward_start_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds to start a reward process and import `target`, after which the run ends. Raise it for
    heavy imports."""

    reward_workers: Annotated[int, Field(ge=1)] = 1
    """Killable child processes per environment worker. Each needs a core, and memory for its
    imports. With `environment.name=agent`, each process runs `episodes_per_child` episodes at once;
    with `verifiers`, one episode."""

    episodes_per_child: Annotated[int, Field(ge=1)] | None = None
    """With `environment.name=agent`: episodes that share a child process and event loop. null: 64
    for a function, 1 for a program. More episodes save memory, but a crash or blocking code
    interrupts and repeats all of them."""

    episode_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """With `environment.name=agent` or `verifiers`: seconds for one episode, including its model
    calls. A late episode is stopped and its sample fails (`rollout.on_failed_sample`), but the
    other samples of its group continue. Must be below `rollout.deadline_s`. null: only
    `rollout.deadline_s` limits an episode."""

    renderer: Options = {}
    """With `environment.name=agent` or `verifiers`: settings of a renderer from the package
    `renderers`, such as `{name: qwen3}`. A renderer writes the messages, reasoning and tool calls
    of a model family. With `thinking_retention: all`, it also continues turns that a chat template
    would rewrite. If this is empty, agents use the chat template. verifiers picks a renderer by the
    model's name, which fails for a local directory."""

    reward_concurrency: Annotated[int, Field(ge=1)] = 64
    """Concurrent calls to an async reward, per reward process."""

    reward_retries: Annotated[int, Field(ge=0)] = 0
    """Retries of an async reward after `EnvironmentUnavailable` or an error in `reward_retry_on`.
    Waits grow, within `reward_deadline_s`."""

    reward_retry_on: tuple[str, ...] = ()
    """Names of error classes after which an async reward is retried, such as ClientError. The name
    of a base class also covers its subclasses."""

    reward_calls_per_s: Annotated[float, Field(gt=0)] | None = None
    """Maximum calls per second of an async reward, including retries, over the whole run. null: no
    limit. Set it to the limit of the judge's provider."""

    reward_memory_mib: Annotated[int, Field(ge=64)] | None = None
    """Address space limit of a reward process, in MiB. null: 2048, or no limit with `command`,
    because some programs reserve far more than they use: Node.js 20 needs 12288."""

    variables: tuple[str, ...] = ()
    """With `environment.name=agent` or `verifiers`: environment variables to inherit, in addition
    to PATH, HOME, locale and certificates. Code that a model wrote can read them."""

    max_turns: Annotated[int, Field(ge=1)] = 1
    """Maximum model calls per episode. An episode is cut off at this limit. Not for agents: your
    agent decides how often it calls the model."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Environment worker actors. Each runs many episodes, so one is enough until its core is
    busy."""

    @property
    def has_media(self) -> bool:
        """Return whether prompts may have media."""
        return find_media_limits(self) is not None

    @property
    def max_media_bytes(self) -> int:
        """Return the maximum media bytes of a prompt. A worker refuses a prompt with more."""
        limits = find_media_limits(self)
        return 0 if limits is None else limits.max_bytes

    @property
    def is_agent(self) -> bool:
        """Return whether episodes call the model over HTTP, from separate processes."""
        return find_traits(self.name).is_agent

    @property
    def makes_prompts(self) -> bool:
        """Return whether the environment reads no prompt file."""
        return find_traits(self.name).makes_prompts

    @property
    def renders_messages(self) -> bool:
        """Return whether an agent sends tokens to its endpoint, not messages."""
        return find_traits(self.name).renders_messages

    @property
    def reads_any_row(self) -> bool:
        """Return whether a row of the prompt file may have any keys."""
        return find_traits(self.name).reads_any_row

    @property
    def targets(self) -> dict[str, str]:
        """Return the user's functions and classes, by the recipe key that names them."""
        named = {
            f"environment.rewards.{name}.target": each.target for name, each in self.rewards.items()
        }
        return named if self.target is None else {"environment.target": self.target, **named}

    def reward_call_keys(self) -> list[str]:
        """Return the keys for async reward calls that are not at their default."""
        return [
            f"environment.{key}"
            for key in self.model_dump(include=_CALL_KEYS, exclude_defaults=True)
        ]

    def find_clashes(self) -> Iterator[Clash]:
        if self.rewards:
            yield from self._rewards_are_functions()
        else:
            yield from self._user_code_is_named()
        yield from self._calls_are_made()
        yield from self._keys_of_agents_have_an_agent()
        if self.name not in CORE_ENVIRONMENTS:
            yield from find_environment_plugin(self.name).find_clashes(self)
        if self.is_agent:
            yield from self._an_agent_is_played()

    def _reject_key(self, key: str, value: object, why: str, fix: str) -> Clash:
        """Return a clash for a key that the environment does not read."""
        named = f"environment.{key}"
        return Clash((named, "environment.name"), f"{named}={value} is not used: {why}", fix)

    def _user_code_is_named(self) -> Iterator[Clash]:
        name, target = self.name, self.target
        user_code = find_traits(name).user_code
        if user_code and target is None and not self.command:
            yield Clash(
                ("environment.target", "environment.name"),
                f"environment.name={name} needs environment.target: nothing names {user_code}",
                "Set environment.target to module:name, importable from the working directory.",
            )
        elif user_code and target is not None and not (name == "function" and target in GRADERS):
            hint = (
                "Write module:name, as in rewards.math:exact_match; built-in rewards of "
                f"environment.name=function: {', '.join(GRADERS)}."
            )
            yield from target_clashes("environment.target", target, "an object", hint)
        elif not user_code and target is not None:
            *others, last = (
                each for each, traits in known_environments().items() if traits.user_code
            )
            yield self._reject_key(
                "target",
                target,
                f"environment.name={name} is built in",
                f"Set environment.name to {', '.join(others)} or {last}, or leave environment.target out.",
            )

    def _rewards_are_functions(self) -> Iterator[Clash]:
        if self.name != "function":
            yield Clash(
                ("environment.rewards", "environment.name"),
                f"environment.rewards is not used: environment.name={self.name} computes the "
                "reward itself",
                "Set environment.name to function, or leave environment.rewards out.",
            )
        for key in ("target", "options"):
            if getattr(self, key):
                yield Clash(
                    (f"environment.{key}", "environment.rewards"),
                    f"environment.{key} is not used: environment.rewards names the functions",
                    f"Write it below one of them, as in environment.rewards.NAME.{key}.",
                )
        if not any(each.weight for each in self.rewards.values()):
            first = next(iter(self.rewards))
            yield Clash(
                (f"environment.rewards.{first}.weight",),
                "every weight of environment.rewards is 0: each sample has a reward of 0, so nothing would be learned",
                f"Give the reward to train on a weight, as in environment.rewards.{first}.weight=1.",
            )
        for name, each in self.rewards.items():
            if each.target not in GRADERS:
                key = f"environment.rewards.{name}.target"
                hint = f"Write module:name, as in rewards.math:exact_match; built in: {', '.join(GRADERS)}."
                yield from target_clashes(key, each.target, "a function", hint)

    def _calls_are_made(self) -> Iterator[Clash]:
        """Yield limits of async reward calls if this environment makes none."""
        if self.name == "function" and self.target not in GRADERS:
            return
        chosen, value = "environment.target", self.target
        if self.name != "function":
            chosen, value = "environment.name", self.name
        for key in self.reward_call_keys():
            yield Clash(
                (key, chosen),
                f"{key} is not used: {chosen}={value} calls no async reward",
                f"Leave {key} out, or name an async reward function with environment.name=function.",
            )

    def _keys_of_agents_have_an_agent(self) -> Iterator[Clash]:
        own_keys = find_traits(self.name).keys
        if self.command and "command" not in own_keys:
            yield self._reject_key(
                "command",
                list(self.command),
                "only an agent may be a program",
                "Set environment.name to agent, or leave environment.command out.",
            )
        if self.episodes_per_child is not None and "episodes_per_child" not in own_keys:
            yield self._reject_key(
                "episodes_per_child",
                self.episodes_per_child,
                "only the processes of name=agent play several episodes at once",
                "Leave environment.episodes_per_child out; environment.reward_concurrency is for calls "
                "of an async reward.",
            )
        if self.renderer and not self.is_agent:
            known = known_environments().items()
            agents = " and ".join(f"name={name}" for name, traits in known if traits.is_agent)
            yield self._reject_key(
                "renderer",
                self.renderer,
                f"only the conversations of {agents} are rendered by it",
                "Leave environment.renderer out.",
            )
        if self.is_agent and self.reward_deadline_s != _REWARD_DEADLINE_S:
            yield self._reject_key(
                "reward_deadline_s",
                self.reward_deadline_s,
                "an agent computes its reward in its episode",
                "Set environment.episode_deadline_s instead.",
            )
        if self.is_agent and self.max_turns > 1:
            yield self._reject_key(
                "max_turns",
                self.max_turns,
                "an agent decides itself how often it calls the model",
                "Leave environment.max_turns out, and count in the agent.",
            )
        if self.episode_deadline_s is not None and not self.is_agent:
            yield self._reject_key(
                "episode_deadline_s",
                self.episode_deadline_s,
                "only the episodes of an agent have this limit",
                "Leave environment.episode_deadline_s out; environment.reward_deadline_s limits a "
                "reward function, rollout.deadline_s a group.",
            )
        if self.variables and not self.is_agent:
            yield self._reject_key(
                "variables",
                list(self.variables),
                "only an agent's processes do not inherit the worker's variables",
                "Leave environment.variables out.",
            )

    def _an_agent_is_played(self) -> Iterator[Clash]:
        """Yield a clash for an agent environment of another package if no plug-in plays agents."""
        try:
            find_only("agents")
        except PluginUnusable as unusable:
            yield Clash(
                ("environment.name",),
                f"environment.name={self.name} is played by a plug-in: {unusable.subject}: {unusable.problem}",
                f"{unusable.fix}.",
            )


if not TYPE_CHECKING:  # lets a type checker show that the core reads no plug-in section
    EnvironmentConfig = with_media(EnvironmentConfig)


class MixedEnvironmentConfig(Config):
    """One of several environments that a run trains on."""

    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    """Relative share of the prompts. Of two environments with weights 3 and 1, the first gets three
    of every four prompts."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Settings of this environment."""

    data: DataConfig = DataConfig()
    """Prompts of this environment."""

    eval: EvalSetConfig = EvalSetConfig()
    """Evaluation set of this environment, under its name. Needs `eval.interval`."""
