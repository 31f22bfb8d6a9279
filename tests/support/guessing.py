"""A multi-turn environment: guess a digit, told ``<`` or ``>`` until it is right."""

from offbeat.environments.protocol import Episode, MultiTurn, Response
from offbeat.environments.text import Tokenizer
from offbeat.messages.groups import Prompt, RolloutTask


class Guessing(MultiTurn):
    """Reward 1.0 for a right guess, less 0.25 for each wrong one before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt.data["prompt"]))

    def begin(self, task: RolloutTask, sample: int) -> Episode:
        return Guess(self.tokenizer, secret=task.prompt.data["secret"])


class Guess(Episode):
    def __init__(self, tokenizer: Tokenizer, secret: int) -> None:
        self.tokenizer, self.secret = tokenizer, secret
        self.wrong, self.solved = 0, False

    async def step(self, response: Response) -> tuple[int, ...] | None:
        guess = int(self.tokenizer.decode(response.content_ids))
        self.solved = guess == self.secret
        if self.solved:
            return None
        self.wrong += 1
        return tuple(self.tokenizer.encode("<?" if guess > self.secret else ">?"))

    async def reward(self) -> float:
        return float(self.solved) - 0.25 * self.wrong
