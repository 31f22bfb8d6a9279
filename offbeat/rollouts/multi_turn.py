"""Episodes of several model calls: each sample of the group runs its own, all at once.

Every turn sends the whole token history as prompt. An observation between two turns becomes
response tokens with ``loss_mask`` False and logprob 0.0. It is stamped with the weight version of
the first token of the turn that follows, the first to be computed with the observation in view.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field

import numpy as np

from offbeat.environments.protocol import Episode, MultiTurn, Response
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import OUT_OF_TOKENS, OUT_OF_TURNS, Receipt, RolloutTask, VersionSpans
from offbeat.rollouts.calls import (
    EngineClient,
    checked_rewards,
    checked_tokens,
    environment_code,
)
from offbeat.rollouts.columns import Columns, Rollout, packed


@dataclass(slots=True)
class Transcript:
    """The response tokens of one sample, as they come."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    mask: list[bool] = field(default_factory=list[bool])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    finish_reason: str = ""
    incarnation: str = ""
    reward: object = None
    generate_s: float = 0.0
    reward_s: float = 0.0
    kept_kv: int = 0
    truncated_turns: int = 0

    def add_turn(self, observation_ids: tuple[int, ...], result: GenerateResult) -> None:
        """An observation (empty before the first turn) and the turn that answered it."""
        turn_spans = result.version_spans[0]
        for version, count in ((turn_spans[0][0], len(observation_ids)), *turn_spans):
            self._add_span(version, count)
        generated = len(result.token_ids)
        self.token_ids += [*observation_ids, *result.token_ids.tolist()]
        self.logprobs += [0.0] * len(observation_ids) + result.logprobs.tolist()
        self.mask += [False] * len(observation_ids) + [True] * generated
        self.finish_reason, self.incarnation = result.finish_reasons[0], result.incarnation
        self.truncated_turns += self.finish_reason == OUT_OF_TOKENS
        self.kept_kv += sum(result.kept_kv)

    def _add_span(self, version: int, count: int) -> None:
        if count == 0:
            return
        if self.spans and self.spans[-1][0] == version:
            count += self.spans.pop()[1]
        self.spans.append((version, count))


async def run_multi_turn(
    task: RolloutTask, environment: MultiTurn, engine: EngineClient, max_turns: int
) -> tuple[Receipt, Columns]:
    """The group of a multi-turn environment; promises and errors are those of ``run_group``.

    The first sample that fails ends the group and cancels the others.
    """
    with environment_code(task):
        encoded = environment.encode(task.prompt)
    prompt_ids = checked_tokens(task, encoded, "the prompt")
    try:
        async with asyncio.TaskGroup() as samples:
            running = [
                samples.create_task(
                    _EpisodeRun(task, environment, engine, sample).play(prompt_ids, max_turns),
                    name=f"episode-{task.prompt_index}-{sample}",
                )
                for sample in range(task.samples)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    transcripts = [run.result() for run in running]
    rewards = checked_rewards(task, [one.reward for one in transcripts], task.samples)
    return packed(task, _joined(prompt_ids, transcripts), rewards)


@dataclass(frozen=True, slots=True)
class _EpisodeRun:
    task: RolloutTask
    environment: MultiTurn
    engine: EngineClient
    sample: int

    async def play(self, prompt_ids: tuple[int, ...], max_turns: int) -> Transcript:
        with environment_code(self.task):
            episode = self.environment.begin(self.task, self.sample)
        transcript = Transcript()
        await self._turns(episode, transcript, prompt_ids, max_turns)
        began = time.perf_counter()
        with environment_code(self.task):
            transcript.reward = await episode.reward()
        transcript.reward_s += time.perf_counter() - began
        return transcript

    async def _turns(
        self, episode: Episode, transcript: Transcript, prompt_ids: tuple[int, ...], max_turns: int
    ) -> None:
        observation_ids: tuple[int, ...] = ()
        for turn in range(max_turns):
            history = (*prompt_ids, *transcript.token_ids, *observation_ids)
            if turn > 0 and self.engine.room(len(history)) < 1:
                transcript.finish_reason = OUT_OF_TOKENS  # no room after the observation
                return
            result = await self._ask(turn, history, transcript)
            transcript.add_turn(observation_ids, result)
            answer = await self._step(episode, result, transcript)
            if answer is None:
                return
            observation_ids = answer
        transcript.finish_reason = OUT_OF_TURNS

    async def _ask(
        self, turn: int, history: tuple[int, ...], transcript: Transcript
    ) -> GenerateResult:
        task, began = self.task, time.perf_counter()
        request_id = f"{task.request_prefix}-{self.sample}-{turn}"
        seed = random.Random(f"{task.seed}:{self.sample}:{turn}").getrandbits(31)
        result = await self.engine.ask(request_id, history, 1, seed)
        transcript.generate_s += time.perf_counter() - began
        return result

    async def _step(
        self, episode: Episode, result: GenerateResult, transcript: Transcript
    ) -> tuple[int, ...] | None:
        response = Response(tuple(result.token_ids.tolist()), result.finish_reasons[0])
        began = time.perf_counter()
        with environment_code(self.task):
            observation_ids = await episode.step(response)
        transcript.reward_s += time.perf_counter() - began
        if observation_ids is None:
            return None
        return checked_tokens(self.task, observation_ids, "an observation")


def _joined(prompt_ids: tuple[int, ...], transcripts: list[Transcript]) -> Rollout:
    lengths = [0, *(len(one.token_ids) for one in transcripts)]
    spans: tuple[VersionSpans, ...] = tuple(tuple(one.spans) for one in transcripts)
    kept = tuple(one.kept_kv for one in transcripts)
    truncated = tuple(one.truncated_turns for one in transcripts)
    return Rollout(
        prompt_ids=prompt_ids,
        response_ids=np.array([i for one in transcripts for i in one.token_ids], dtype=np.int32),
        logprobs=np.array([p for one in transcripts for p in one.logprobs], dtype=np.float32),
        loss_mask=np.array([m for one in transcripts for m in one.mask], dtype=np.bool_),
        offsets=np.cumsum(lengths, dtype=np.int64),
        version_spans=spans,
        finish_reasons=tuple(one.finish_reason for one in transcripts),
        engine_incarnation=transcripts[0].incarnation,
        generate_s=max(one.generate_s for one in transcripts),
        reward_s=max(one.reward_s for one in transcripts),
        kept_kv=kept if any(kept) else (),
        truncated_turns=truncated if any(truncated) else (),
    )
