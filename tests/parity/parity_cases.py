"""What the suites of all backends ask of a world and are told, and which rows docs/parity.md has.

Knows neither torch nor a trainer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.loss import ClippedPgLossConfig, CustomLossConfig
from offbeat.messages.training import StepResult

Arrays = dict[str, NDArray[Any]]
SIZES: dict[str, Any] = {
    "vocab_size": 63,  # odd, so that no number of ranks divides it
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
TOKENS = LossSpec(
    ClippedPgLossConfig(
        old_logprobs="policy",
        tis_cap=2.0,
        kl_coef=0.1,
        entropy_coef=0.05,
        clip_low=0.4,
        clip_high=0.6,
    )
)
SEQUENCES = LossSpec(ClippedPgLossConfig(normalize="sequences"), temperature=0.7)
SEVERAL = LossSpec(
    ClippedPgLossConfig(old_logprobs="policy", tis_cap=2.0, step_std=True), minibatches=3, epochs=2
)
OWN = LossSpec(
    CustomLossConfig(
        target="parity:clipped",
        options={"clip_low": 0.4, "clip_high": 0.6},
        old_logprobs="policy",
        tis_cap=2.0,
        kl_coef=0.1,
        entropy_coef=0.05,
    )
)
"""``TOKENS`` with a function of the user in the place of ``clipped_pg``."""
LOSSES = {"tokens": TOKENS, "sequences": SEQUENCES}
CHUNKS = (1, 2, 8)
BALANCED = {"load_balancing_coef": 0.5, "z_loss_coef": 0.1, "bias_update_rate": 0.05}
BOUND = 1e-10
"""Largest relative error in float64."""


@dataclass(frozen=True)
class Step:
    """Groups with their advantages."""

    groups: list[dict[str, Any]]
    advantages: list[tuple[float, ...]]


@dataclass(frozen=True)
class Cut:
    """How a step is laid out."""

    shared_prompt: bool = True
    max_tokens: int = 150
    dtype: str = "float64"
    recompute: bool = False
    tensor: int = 1  # ranks that divide each matrix
    encoder_tensor: int = 1  # encoder ranks that divide each matrix of a vision tower
    moe: dict[str, float] = field(default_factory=dict[str, float])  # balance of the experts
    picture_tokens: int | None = None  # that an encoder rank computes at once
    # A large eps makes a step proportional to its gradient: errors stay as large as they are.
    optimizer: dict[str, Any] = field(
        default_factory=lambda: {"learning_rate": 1e-2, "eps": 1.0, "max_grad_norm": None}
    )


@dataclass(frozen=True)
class MegatronCut(Cut):
    """The same, and the ranks."""

    data: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    stages: tuple[int, ...] | None = None  # layers of each
    sequence: bool = False
    overlap: bool = False
    freeze: tuple[str, ...] = ()
    updates: str = "FaultyAdamW"  # the optimizer, by its name in ``megatron_bugs.OPTIMIZERS``

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.context * self.pipeline


@dataclass(frozen=True)
class Outcome:
    """What a step did, on one rank."""

    result: StepResult
    gradients: dict[int, Arrays] = field(repr=False)  # by number of chunks: raw sums, whole
    weights: Arrays = field(repr=False)
    digest: str


# --- the rows of the page -------------------------------------------------------------------------

Case = tuple[str, str, str, str]
"""(backend, layout, rows, loss)"""

ROWS = {"packed": {}, "padded": {"shared_prompt": False, "max_tokens": 100}}
RANKS = (1, 2, 4)
TORCH_FAMILIES = {
    "dp2, tied": "llama-tied",
    "experts, dp2": "moe",
    "sigmoid router, dp2": "glm4-moe",
}
ADAPTER_LAYOUTS = {"adapters, dp2": Cut(), "adapters, tp2": Cut(tensor=2)}
RECOMPUTE = {"dp1, recompute": 1, "dp2, recompute": 2}
TENSOR_RANKS = {"tp2": 2, "tp2 x dp2": 4}
TENSOR_MODELS = {"qwen3": "", "llama-tied": ", tied", "llama-biased": ", biases"}
LAYOUTS = {
    "one rank": MegatronCut(),
    "dp2": MegatronCut(data=2),
    "dp2, overlap": MegatronCut(data=2, overlap=True),
    "tp2": MegatronCut(tensor=2),
    "tp2, sequence": MegatronCut(tensor=2, sequence=True),
    "pp2": MegatronCut(pipeline=2),
    "tp2 x dp2": MegatronCut(tensor=2, data=2),
    "tp2 x dp2, sequence": MegatronCut(tensor=2, data=2, sequence=True),
    "pp2 x dp2": MegatronCut(pipeline=2, data=2),
    "tp2 x pp2": MegatronCut(tensor=2, pipeline=2),
    "tp2 x pp2, sequence": MegatronCut(tensor=2, pipeline=2, sequence=True),
    "cp2": MegatronCut(context=2),
    "cp4": MegatronCut(context=4),
    "cp2 x dp2": MegatronCut(context=2, data=2),
    "cp2 x pp2": MegatronCut(context=2, pipeline=2),
    "tp2 x cp2, sequence": MegatronCut(tensor=2, context=2, sequence=True),
}
PADDED_TOO = ("one rank", "dp2", "tp2, sequence", "pp2", "cp2")
TIED_LAYOUTS = {
    "pp2, tied": MegatronCut(pipeline=2),
    "tp2 x pp2, tied": MegatronCut(pipeline=2, tensor=2),
}
UNEVEN_LAYOUTS = {
    "pp2 with 1 + 2 layers": MegatronCut(pipeline=2, stages=(1, 2)),
    "pp2 with 2 + 1 layers": MegatronCut(pipeline=2, stages=(2, 1)),
}
EXPERT_LAYOUTS = {
    "experts, one rank": MegatronCut(),
    "experts, dp2": MegatronCut(data=2),
    "experts, ep2": MegatronCut(data=2, expert=2),
    "experts, pp2": MegatronCut(pipeline=2),
    "experts, tp2, sequence": MegatronCut(tensor=2, sequence=True),
    "experts, tp2 x etp2, sequence": MegatronCut(tensor=2, expert_tensor=2, sequence=True),
    "experts, ep2 of dp4": MegatronCut(data=4, expert=2),
    "experts, tp2 x etp2 x ep2, sequence": MegatronCut(
        tensor=2, expert_tensor=2, data=2, expert=2, sequence=True
    ),
    "experts, ep2 of tp2, sequence": MegatronCut(tensor=2, expert=2, sequence=True),
    "experts, ep4 of tp2 x dp2, sequence": MegatronCut(tensor=2, data=2, expert=4, sequence=True),
    "experts, ep2 of tp2 x dp2, sequence": MegatronCut(tensor=2, data=2, expert=2, sequence=True),
    "experts, ep2 of tp2 x pp2, sequence": MegatronCut(
        tensor=2, pipeline=2, expert=2, sequence=True
    ),
    "experts, ep2 of cp2": MegatronCut(context=2, expert=2),
    "experts, ep4 of tp2 x cp2, sequence": MegatronCut(
        tensor=2, context=2, expert=4, sequence=True
    ),
}
SIGMOID_LAYOUTS = {
    "sigmoid router, one rank": MegatronCut(),
    "sigmoid router, ep2": MegatronCut(data=2, expert=2),
    "sigmoid router, pp2 with 2 + 1 layers": MegatronCut(pipeline=2, stages=(2, 1)),
    "sigmoid router, tp2, sequence": MegatronCut(tensor=2, sequence=True),
    "sigmoid router, tp2 x etp2, sequence": MegatronCut(tensor=2, expert_tensor=2, sequence=True),
    "sigmoid router, ep2 of tp2, sequence": MegatronCut(tensor=2, expert=2, sequence=True),
    "sigmoid router, ep2 of cp2": MegatronCut(context=2, expert=2),
}
SHARED_LAYOUTS = {
    "shared experts, one rank": MegatronCut(),
    "shared experts, ep2 of tp2, sequence": MegatronCut(tensor=2, expert=2, sequence=True),
    "shared experts, ep2 of cp2": MegatronCut(context=2, expert=2),
    "shared experts, pp2 with 2 + 1 layers": MegatronCut(pipeline=2, stages=(2, 1)),
}
GROUP_LAYOUTS = {
    "best groups, one rank": MegatronCut(),
    "best groups, ep2": MegatronCut(data=2, expert=2),
    "best groups, tp2, sequence": MegatronCut(tensor=2, sequence=True),
}
FAMILY_CASES: list[tuple[str, str, str, MegatronCut]] = [
    ("tp4 with 2 key-value heads", "packed", "qwen3", MegatronCut(tensor=4)),
    (
        "qwen2, tp4 with 2 key-value heads, sequence",
        "padded",
        "qwen2",
        MegatronCut(tensor=4, sequence=True),
    ),
    ("llama, tied, tp2", "packed", "llama-tied", MegatronCut(tensor=2)),
    ("qwen2, tp2", "packed", "qwen2", MegatronCut(tensor=2)),
    ("qwen2, tp2, sequence", "packed", "qwen2", MegatronCut(tensor=2, sequence=True)),
    ("qwen2, pp2", "packed", "qwen2", MegatronCut(pipeline=2)),
    ("qwen2, one rank", "padded", "qwen2", MegatronCut()),
    ("llama, linear, pp2", "packed", "llama-linear", MegatronCut(pipeline=2)),
    ("llama, llama3, tp2", "packed", "llama-llama3", MegatronCut(tensor=2)),
    ("llama, llama3, one rank", "padded", "llama-llama3", MegatronCut()),
    ("yarn, cp2", "packed", "qwen3-yarn", MegatronCut(context=2)),
    ("yarn, tp2, sequence", "packed", "qwen3-yarn", MegatronCut(tensor=2, sequence=True)),
]
"""(layout, rows, model, ranks)"""

TORCH_CASES: list[tuple[int, str, str]] = [
    (ranks, rows, loss) for ranks in RANKS for rows in ROWS for loss in LOSSES
]
MEGATRON_CASES: list[tuple[str, str, str]] = [
    *((layout, "packed", loss) for layout in LAYOUTS for loss in LOSSES),
    *((layout, "padded", "tokens") for layout in PADDED_TOO),
]
PAGE_CASES: frozenset[Case] = frozenset(
    {
        *(("torch", f"dp{ranks}", rows, loss) for ranks, rows, loss in TORCH_CASES),
        *(("torch", layout, "packed", "tokens") for layout in (*TORCH_FAMILIES, *ADAPTER_LAYOUTS)),
        *(("torch", layout, rows, "tokens") for layout in RECOMPUTE for rows in ROWS),
        *(
            ("torch", f"{layout}{what}", "packed", "tokens")
            for layout in TENSOR_RANKS
            for what in TENSOR_MODELS.values()
        ),
        *(("megatron", *case) for case in MEGATRON_CASES),
        *(
            ("megatron", layout, "packed", "tokens")
            for layout in (
                *(*TIED_LAYOUTS, *UNEVEN_LAYOUTS, *EXPERT_LAYOUTS),
                *(*SIGMOID_LAYOUTS, *SHARED_LAYOUTS, *GROUP_LAYOUTS),
            )
        ),
        *(("megatron", layout, rows, "tokens") for layout, rows, *_ in FAMILY_CASES),
    }
)


def rowed(cut: MegatronCut, rows: str) -> MegatronCut:
    """The same layout with rows of this kind."""
    return replace(cut, **ROWS[rows])


# --- data -----------------------------------------------------------------------------------------


def random_step() -> Step:
    """Seven groups of uneven samples, some tokens masked, one sample without a valid token."""
    rng = np.random.default_rng(0)
    groups = [group(rng, int(rng.integers(1, 9)), rng.integers(1, 12, 4)) for _ in range(7)]
    offsets = groups[3]["response_offsets"]
    groups[3]["loss_mask"][offsets[1] : offsets[2]] = False
    return Step(groups, [tuple(rng.normal(size=4).tolist()) for _ in groups])


def group(rng: np.random.Generator, prompt: int, lengths: Any) -> dict[str, Any]:
    total = int(sum(lengths))
    logprobs = (-4 + rng.normal(0, 0.3, (3, total))).astype(np.float32)
    return {
        "prompt_ids": rng.integers(0, 63, prompt, dtype=np.int32),
        "response_ids": rng.integers(0, 63, total, dtype=np.int32),
        "response_offsets": np.cumsum([0, *lengths]).astype(np.int64),
        "loss_mask": rng.random(total) >= 0.2,
        "generation_logprobs": logprobs[0],
        "policy_logprobs": logprobs[1],
        "reference_logprobs": logprobs[2],
        "weight_versions": np.zeros(total, np.int32),
        "rewards": rng.random(len(lengths)).astype(np.float32),
    }


def worst_relative_error(got: Mapping[str, Any], want: Mapping[str, Any]) -> float:
    """Largest difference of any tensor, over that tensor's largest value."""
    assert got.keys() == want.keys()
    return max(float(np.abs(got[n] - want[n]).max() / np.abs(want[n]).max()) for n in want)


def moved(after: Arrays, before: Arrays) -> Arrays:
    return {name: after[name] - before[name] for name in before}


def chunked(count: int, chunks: int) -> Sequence[Any]:
    """Indices in so many parts, uneven where they must be; some may be empty."""
    return [part.tolist() for part in np.array_split(np.arange(count), chunks)]
