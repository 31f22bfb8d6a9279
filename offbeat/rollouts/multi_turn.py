"""Runs multi-turn episodes: one per sample of the group, all concurrently.

Every turn sends the whole token history as prompt.
"""

import time
from dataclasses import dataclass, replace

from offbeat.environments.protocol import EncodedPrompt, Episode, MultiTurn, Response
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import OUT_OF_TOKENS, OUT_OF_TURNS, Receipt
from offbeat.rollouts.calls import (
    EngineClient,
    Generate,
    check_answers,
    check_reward,
    check_tokens,
    environment_code,
)
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import Draw, SampleDraws, pack_samples, seed_of_turn
from offbeat.rollouts.transcript import Transcript


async def run_multi_turn(
    environment: MultiTurn,
    engine: EngineClient,
    draws: SampleDraws,
    prompt: EncodedPrompt,
    max_turns: int,
) -> tuple[Receipt, Columns]:
    """Run the group of a multi-turn environment. Guarantees and errors are as in ``run_group``."""
    task = engine.task
    prompt_ids, engine = prompt.token_ids, replace(engine, media=prompt.media)
    engine.check_room(prompt_ids)  # before any sample: a retry would not find more room

    def make_draw(sample: int) -> Draw:
        async def draw(transcript: Transcript, retry: int, generate: Generate) -> None:
            watched = replace(engine, generate=generate)
            await _EpisodeRun(watched, sample, retry, transcript).play(
                environment, prompt_ids, max_turns
            )

        return draw

    return pack_samples(task, prompt_ids, await draws.draw_all(make_draw), prompt.media)


@dataclass(frozen=True, slots=True)
class _EpisodeRun:
    engine: EngineClient
    sample: int
    retry: int
    transcript: Transcript

    async def play(
        self, environment: MultiTurn, prompt_ids: tuple[int, ...], max_turns: int
    ) -> None:
        task = self.engine.task
        with environment_code(task):
            episode = environment.begin(task, self.sample)
        await self._turns(episode, prompt_ids, max_turns)
        began = time.perf_counter()
        with environment_code(task):
            value = await episode.reward()
        self.transcript.reward_s += time.perf_counter() - began
        self.transcript.reward = check_reward(task, value, self.sample)
        if task.evaluation:
            with environment_code(task):
                answer = episode.answer()
            if answer is not None:
                (self.transcript.answer,) = check_answers(task, [answer], 1)

    async def _turns(self, episode: Episode, prompt_ids: tuple[int, ...], max_turns: int) -> None:
        transcript, task = self.transcript, self.engine.task
        observation_ids: tuple[int, ...] = ()
        for turn in range(max_turns):
            history = (*prompt_ids, *transcript.token_ids, *observation_ids)
            if turn > 0 and self.engine.room(len(history)) < 1:
                transcript.finish_reason = OUT_OF_TOKENS  # no room after the observation
                return
            began = time.perf_counter()
            request_id = f"{task.request_prefix}-{self.sample}-{turn}"
            seed = seed_of_turn(task.seed, self.sample, turn, self.retry)
            result = await self.engine.sample(request_id, history, 1, seed)
            transcript.generate_s += time.perf_counter() - began
            transcript.add_turn(observation_ids, result)
            answer = await self._step(episode, result)
            if answer is None:
                return
            observation_ids = answer
        transcript.finish_reason = OUT_OF_TURNS

    async def _step(self, episode: Episode, result: GenerateResult) -> tuple[int, ...] | None:
        response = Response(tuple(result.token_ids.tolist()), result.finish_reasons[0])
        began = time.perf_counter()
        with environment_code(self.engine.task):
            observation_ids = await episode.step(response)
        self.transcript.reward_s += time.perf_counter() - began
        if observation_ids is None:
            return None
        checked = check_tokens(self.engine.task, observation_ids, "an observation")
        self.engine.check_text(checked, "an observation")
        return checked
