"""A real run against a plain loop over the same engine and trainer: one process, no Ray, no controller."""

import asyncio
from dataclasses import dataclass, field

import torch
from transformers import AutoTokenizer

from offbeat.algorithms.advantages import ESTIMATORS
from offbeat.config.base import of_kind
from offbeat.config.loader import load_recipe
from offbeat.config.loss_spec import LossSpec
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import EmbeddedGeneratorConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.controller.events import Committed, Released, StepApplied
from offbeat.controller.rollouts import group_seed
from offbeat.environments.factory import make_environment, make_prompts
from offbeat.generators.embedded.engine import EmbeddedEngine
from offbeat.generators.embedded.model import load_model
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.trainers.torch.torch_trainer import TorchTrainer
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.tensordict_codec import build_chunk
from offbeat.weight_sync.manifest import release_digest
from tests.support.plain_modules import ModuleSource
from tests.support.run_records import RunRecords
from tests.support.starting import ROOT, Start

RECIPE = ROOT / "recipes" / "deterministic.yaml"
SMALL = ("steps=6", "groups_per_step=4", "samples_per_group=4")


@dataclass
class Told:
    """What a run did, step by step."""

    rewards: list[list[tuple[float, ...]]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)  # digests, the initial weights' first


class Synchronous:
    """Generate a batch, train on it, copy the weights; nothing happens at the same time."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._path = config, config.model.path
        sampling = config.generator.sampling
        self._sampling = SamplingParams(
            sampling.temperature, max_new_tokens=sampling.max_new_tokens
        )
        self._prompts = make_prompts(config)
        tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        self._environment = make_environment(config.environment, tokenizer, ROOT)
        self._trainer = TorchTrainer(
            self._path,
            trainer=of_kind(TorchTrainerConfig, config.trainer),
            model=config.model,
            total_steps=config.steps,
            max_model_len=config.generator.max_model_len,
            seed=config.seed,
        )
        model = load_model(self._path, torch.float32, "cpu", trust_remote_code=False)
        self._engine = EmbeddedEngine(
            model,
            name="generator-0",
            incarnation="the only one",
            eos_token_ids=[model.generation_config.eos_token_id],
            max_sequences=of_kind(EmbeddedGeneratorConfig, config.generator).max_sequences,
            max_model_len=config.generator.max_model_len,
            deterministic=True,
            seed=config.seed,
            device="cpu",
        )
        self._source = ModuleSource(self._trainer.module, int(config.sync.chunk_mib * 2**20))

    def run(self) -> Told:
        config, told = self._config, Told(releases=[self._digest()])
        estimator, size = ESTIMATORS[config.algorithm.advantage], config.groups_per_step
        for step in range(config.steps):
            groups = [self._rolled_out(step * size + place) for place in range(size)]
            rewards = [receipt.rewards for receipt, _ in groups]
            result = self._trainer.train(
                build_chunk([columns for _, columns in groups]),
                [estimator(each, (True,) * len(each)) for each in rewards],
                LossSpec.of(config),
            )
            assert result.applied
            self._engine.model.load_state_dict(self._trainer.module.state_dict())
            told.rewards.append(rewards)
            told.losses.append(result.loss)
            told.releases.append(self._digest())
        return told

    def _rolled_out(self, prompt_index: int) -> tuple[Receipt, Columns]:
        prompt = self._prompts.prompt(prompt_index)
        assert prompt is not None
        config = self._config
        seed = group_seed(config.seed, prompt_index)
        task = RolloutTask(prompt, 1, config.samples_per_group, "generator-0", seed, 60.0)
        return asyncio.run(
            run_group(
                task,
                self._environment,
                self._generate,
                self._sampling,
                max_turns=1,
                max_model_len=config.generator.max_model_len,
                policy=SampleFailurePolicy(),
            )
        )

    async def _generate(self, request: GenerateRequest) -> GenerateResult:
        self._engine.submit(request)
        while not (finished := self._engine.step()):
            pass
        return finished[0]

    def _digest(self) -> str:
        digests = [digest for _, digest in self._source.chunks()]
        return release_digest(self._source.manifest, digests)


def told_by(run: RunRecords) -> Told:
    """Released weights, in the order in which the journal has them."""
    told, receipts = Told(losses=[line["train/loss"] for line in run.metrics]), dict[int, Receipt]()
    for event in run.events:
        match event:
            case Committed():
                receipts[event.receipt.prompt_index] = event.receipt
            case StepApplied():
                told.rewards.append(
                    [receipts[each].rewards for each in sorted(event.prompt_indices)]
                )
            case Released():
                told.releases.append(event.digest)
            case _:
                pass
    return told


def test_a_real_run_in_order_without_look_ahead_equals_a_plain_loop_to_the_last_bit(
    start: Start,
) -> None:
    with start("real", RECIPE, *SMALL) as run:
        assert run.exit_code() == 0
        found = RunRecords.read(run.run_dir)
    torch.set_num_threads(1)
    expected = Synchronous(load_recipe(RECIPE, SMALL).config).run()
    assert any(expected.losses), "losses that are all zero prove nothing"
    assert told_by(found) == expected
    assert found.summary.weights_digest == expected.releases[-1]
