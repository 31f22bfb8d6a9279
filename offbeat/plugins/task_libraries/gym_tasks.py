"""Tasks of the library reasoning-gym: the item of each prompt, and the scoring of responses.

An item is a pure function of the task, its parameters, the seed of the run and the row number. So a
prompt is two integers. The worker creates the question from them. A reward child creates the same
item again to score a response. Importing reasoning-gym takes seconds, so this module imports it
only when needed.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# reasoning-gym is an extra, unknown if it is not installed, and declares few types.

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec

from offbeat.environments.frames import RewardTarget
from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.prompts import RowPrompts
from offbeat.environments.text import Tokenizer, encode_prompt
from offbeat.messages.failures import OffbeatError
from offbeat.messages.groups import Prompt

REWARD: Final = "offbeat.plugins.task_libraries.gym_score:gym_reward"
"""The reward function, for a reward child."""


class GymOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``environment.options`` of ``environment.name: reasoning_gym``."""

    task: str
    """Name of the task, as in ``reasoning_gym.create_dataset``."""

    parameters: dict[str, Any] = {}
    """Keyword arguments of the task, except ``size`` and ``seed``."""

    rows: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """Items in an epoch."""

    threshold: float | None = 1.0
    """Minimum score of the library for a reward of 1; a lower score is 0. The library also scores a
    verbose or a partly right answer above 0. null uses its scores as rewards.
    """

    question: str = "{question}"
    """The prompt, with fields of the item in braces: ``question``, and its metadata fields."""

    chat: bool = True
    """Whether the question goes through the model's chat template."""

    def get_question(self, item: Mapping[str, Any]) -> str:
        """Return the prompt of an item.

        Raises:
            GymUnusable: ``question`` names a field that the item does not have.
        """
        fields = {**item["metadata"], "question": item["question"]}
        try:
            return self.question.format_map(fields)
        except (KeyError, ValueError) as error:
            raise GymUnusable(
                self.task, f"options.question: {error!r}; its fields are {', '.join(fields)}"
            ) from error


class GymUnusable(OffbeatError):
    """A task of reasoning-gym cannot be created: the package, the name or a parameter is wrong.

    Fix: install the extra, or correct the name or parameter of the task.
    """

    task: str
    problem: str

    def __str__(self) -> str:
        return f"reasoning-gym cannot make task {self.task!r}: {self.problem}"


class GymPrompts(RowPrompts):
    """Prompts that identify an item of the task."""

    def _data(self, row: int) -> dict[str, Any]:
        return {"seed": self._seed, "item": row}


class ReasoningGym(FunctionReward):
    """Asks the items of one task, and scores responses in killable children."""

    def __init__(
        self, tokenizer: Tokenizer, target: RewardTarget, workers: int, options: GymOptions
    ) -> None:
        super().__init__(tokenizer, target, workers, ignores_thinking=True)
        self._options, self._texts = options, tokenizer

    async def start(self) -> None:
        make_items(self._options, seed=0)  # raises on bad options, before any process starts
        await super().start()

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        question = self._options.get_question(find_item(self._options, prompt.data))
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": question}]}
            if self._options.chat
            else {"prompt": question}
        )
        return encode_prompt(msgspec.structs.replace(prompt, data=asked), self._texts)


def make_items(options: GymOptions, seed: int) -> Any:  # noqa: ANN401 - a dataset of the library
    """Return the items of a task.

    Raises:
        GymUnusable: The package is not installed, no task has the name, or a parameter is wrong.
    """
    return _made(msgspec.json.encode(options), seed)


def find_item(options: GymOptions, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the item that a row names."""
    return make_items(options, row["seed"])[row["item"]]


@lru_cache(maxsize=4)
def _made(encoded_options: bytes, seed: int) -> Any:  # noqa: ANN401 - a dataset of the library
    options = msgspec.json.decode(encoded_options, type=GymOptions)
    try:
        import reasoning_gym  # noqa: PLC0415 - the extra, and seconds
        from reasoning_gym.factory import DATASETS  # noqa: PLC0415
    except ImportError as error:
        raise GymUnusable(
            options.task, f"{error}. Install it: pip install 'offbeat[reasoning-gym]'"
        ) from error
    if options.task not in DATASETS:
        raise GymUnusable(
            options.task, f"no task has this name; there are {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(
            options.task, size=options.rows, seed=seed, **options.parameters
        )
    except (TypeError, ValueError, AssertionError) as error:  # how configs refuse a value
        raise GymUnusable(options.task, f"options.parameters: {error}") from error
