"""What the ranks of the benchmark of encoder ranks do. Runs in worker processes."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# megatron-core has no types; torch and transformers declare some functions without.

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from benchmarks.encoder_ranks_cases import (
    MERGE,
    PATCH,
    PLACEHOLDER,
    Layout,
    Size,
    Step,
    StepSeen,
    make_step,
)
from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.messages.fences import StepKey
from offbeat.plugins.encoder_ranks.bridge import Bridge, Header, ProcessGroupWire, Wire
from offbeat.plugins.encoder_ranks.loading import GridLoader
from offbeat.plugins.encoder_ranks.plugin import EncoderConfig
from offbeat.plugins.encoder_ranks.torch_parts import GridState, wrap_passes
from offbeat.plugins.megatron.section import MegatronTrainerConfig
from offbeat.trainers.memory import ResidentMeter
from offbeat.trainers.ranks.dispatch import Replicas
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.torch import TorchTrainer
from offbeat.trainers.torch.torch_trainer import TorchParts
from tests.support.grid_steps import feed

_CPU = torch.device("cpu")
_HEAD = 32  # width of an attention head, at most
_TOKENS = 4096  # of a microbatch of rows


class TimedBridge(Bridge):
    """A bridge whose ends meet before each message, and that measures the two apart.

    ``waited_s`` is what passed until both ends were there, ``inside_s`` what sending and receiving took
    from then on.
    """

    def __init__(
        self, rank: int, wire: Wire | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Measure nothing yet. Both ends of a wire have to be of this kind."""
        super().__init__(rank, _CPU, wire or ProcessGroupWire())
        self._clock = clock
        self.inside_s = self.waited_s = 0.0

    def send(self, header: Header, values: Tensor, rank: int) -> None:
        with self._met(rank, (self._wire.send, self._wire.receive)):
            super().send(header, values, rank)

    def receive(self, due: Header, rank: int) -> Tensor:
        with self._met(rank, (self._wire.receive, self._wire.send)):
            return super().receive(due, rank)

    @contextmanager
    def _met(self, rank: int, hands: tuple[Callable[[Tensor, int], None], ...]) -> Generator[None]:
        started, byte = self._clock(), torch.zeros(1, dtype=torch.uint8)
        for each in hands:
            each(byte, rank)
        met = self._clock()
        self.waited_s += met - started
        yield
        self.inside_s += self._clock() - met


def write_model(peers: Peers, size: Size, path: Path) -> None:
    """Write a random Idefics3 of this size."""
    del peers
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            image_token_id=PLACEHOLDER,
            scale_factor=MERGE,
            pad_token_id=0,
            tie_word_embeddings=False,
            text_config={
                "model_type": "llama",
                "vocab_size": size.vocabulary,
                "hidden_size": size.hidden,
                "intermediate_size": 3 * size.hidden,
                "num_hidden_layers": size.layers,
                "num_attention_heads": max(4, size.hidden // _HEAD),
                "num_key_value_heads": max(2, size.hidden // _HEAD // 2),
                "max_position_embeddings": 1024,
                "pad_token_id": 0,
            },
            vision_config={
                "hidden_size": size.tower_hidden,
                "intermediate_size": 4 * size.tower_hidden,
                "num_hidden_layers": size.tower_layers,
                "num_attention_heads": max(4, size.tower_hidden // _HEAD),
                "image_size": size.pixels,
                "patch_size": PATCH,
            },
        )
    )
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")


def measured(peers: Peers, layout: Layout, size: Size, path: Path, steps: int) -> list[StepSeen]:
    """Return what this rank saw of so many steps."""
    with _trainer_of(peers, layout, path, None) as (trainer, replicas):
        bridge, step, seen = TimedBridge(peers.rank), make_step(size, size.groups), []
        trainer.passes.exchange.bridge = bridge
        for number in range(1, steps + 1):
            bridge.inside_s = bridge.waited_s = 0.0
            peers.all_reduce_max([number])
            started = time.perf_counter()
            key = _fed(trainer, step, number, replicas)
            result = trainer.finish_train_step(key)
            wall = time.perf_counter() - started
            nbytes = int(result.metrics["train/bridge_bytes"])
            seen.append(StepSeen(wall, bridge.inside_s, bridge.waited_s, nbytes))
    return seen


def grown(peers: Peers, layout: Layout, size: Size, path: Path, max_tokens: int | None) -> int:
    """Return the bytes by which this rank grows, at most, in a chunk."""
    with _trainer_of(peers, layout, path, max_tokens) as (trainer, replicas):
        key = _fed(trainer, make_step(size, 1), 1, replicas)
        trainer.finish_train_step(key)
        step, meter = make_step(size, size.memory_groups), ResidentMeter()
        meter.start()
        before = meter.peak()
        key = _fed(trainer, step, 2, replicas)
        peak = meter.peak()
        trainer.finish_train_step(key)
    return peak - before


def _fed(trainer: Any, step: Step, number: int, replicas: Replicas) -> StepKey:  # noqa: ANN401 -- of either backend
    return feed(
        trainer, step, LossSpec(), [range(len(step.groups))], StepKey(number, number, 0), replicas
    )


@contextmanager
def _trainer_of(
    peers: Peers, layout: Layout, path: Path, max_tokens: int | None
) -> Generator[tuple[Any, Replicas]]:
    """Make the trainer of a rank, as a run does."""
    encoder = EncoderConfig(
        tensor_parallel=layout.encoder_tensor, max_tokens_per_microbatch=max_tokens
    )
    sizes: dict[str, Any] = {
        "data_parallel": layout.lanes,
        "tensor_parallel": layout.tensor,
        "max_tokens_per_microbatch": _TOKENS,
        "encoder": encoder,
    }
    given: dict[str, Any] = {
        "model": ModelConfig(path=str(path), dtype="float32"),
        "total_steps": 1000,
        "peers": peers,
    }
    if layout.backend == "torch":
        config = TorchTrainerConfig(**sizes)
        parts = TorchParts(GridLoader, state=GridState, passes=wrap_passes)
        trainer = TorchTrainer(path, trainer=config, max_model_len=1024, parts=parts, **given)
        yield trainer, Replicas.of(config)
        return
    from megatron.core import parallel_state  # noqa: PLC0415 -- an extra

    from offbeat.plugins.encoder_ranks.megatron.language import grid_trainer_kind  # noqa: PLC0415
    from offbeat.plugins.megatron.cpu_shim import cpu_stands_in  # noqa: PLC0415 -- needs the extra

    config = MegatronTrainerConfig(**sizes)
    kind = grid_trainer_kind(config, peers.rank)
    with cpu_stands_in("cpu"):
        try:
            yield kind(path, trainer=config, **given), Replicas.of(config)
        finally:
            if parallel_state.model_parallel_is_initialized():
                parallel_state.destroy_model_parallel()
