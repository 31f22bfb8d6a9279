"""Published algorithms and the defaults of other libraries by name: keys of ``algorithm``.

A preset is shorthand, not a mode: it is expanded when a recipe is read, and only the configuration
knows its name. Other keys keep their defaults. No algorithm's preset sets a KL penalty, because its
coefficient belongs to a model and a task. A library's preset sets one if the library does.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, cast

_TOKENS: Final = {"normalize": "tokens"}
_SEQUENCES: Final = {"normalize": "sequences"}
_CONSTANT: Final = {"normalize": "constant"}
_CLIPPED: Final = {"name": "clipped_pg", "clip_low": 0.2, "clip_high": 0.2}
_CLIP_HIGHER: Final = {**_CLIPPED, "clip_high": 0.28}
# The trainer trains on each group once, so its logprobs when the step begins are those of the
# training pass itself.
_CURRENT: Final = {"old_logprobs": "current"}
_ENGINE: Final = {"old_logprobs": "generation"}
_PRODUCT: Final = {"sequence_statistic": "product", "sequence_weights": True}
_KEPT: Final = {"count_dropped": False}


def _preset(advantage: str, *parts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of ``algorithm``; all ``parts`` together are its section ``loss``."""
    loss = {key: value for part in parts for key, value in part.items()}
    return {"advantage": advantage, "loss": loss}


PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        # arXiv:2402.03300, without its KL penalty. It states no clip range; 0.2 is from PPO.
        "grpo": _preset("grpo", _CLIPPED, _ENGINE, _SEQUENCES),
        # arXiv:2503.20783: divided by the generation budget instead of by lengths. The paper finds
        # the mean over the tokens of a batch biased, among other forms.
        "dr_grpo": _preset("dr_grpo", _CLIPPED, _ENGINE, _CONSTANT),
        # arXiv:2503.14476: clip-higher and the token-level loss. Dynamic sampling is
        # filters.zero_variance; over-long samples: rollout.truncated_samples and overlong_tokens.
        "dapo": _preset("grpo", _CLIP_HIGHER, _ENGINE, _TOKENS),
        # arXiv:2507.18071.
        "gspo": _preset(
            "grpo", {"name": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, _ENGINE, _SEQUENCES
        ),
        # arXiv:2506.13585: no lower bound. It states no upper bound; TRL has weights up to 5 in its
        # recipe for ScaleRL, arXiv:2510.13786.
        "cispo": _preset(
            "grpo", {"name": "cispo", "clip_low": 1.0, "clip_high": 4.0}, _ENGINE, _TOKENS
        ),
        # arXiv:2402.14740: plain policy gradient of whole responses, so the ratio is 1 and no
        # length divides. The constant gives its gradient the same scale as the others.
        "rloo": _preset("rloo", {"name": "clipped_pg"}, _CURRENT, _CONSTANT),
        # arXiv:2501.03262, section 3.2, without its KL penalty.
        "reinforce_pp_baseline": _preset(
            "grpo_no_std", _CLIPPED, _ENGINE, _TOKENS, {"step_std": True}
        ),
        # fengyao.notion.site/off-policy-rl.
        "tis": _preset("grpo", _CLIP_HIGHER, _CURRENT, _TOKENS, {"tis_cap": 2.0}),
        # arXiv:2510.18855, whose loss is a mean of sequence means.
        "icepop": _preset("grpo", _CLIPPED, _CURRENT, _SEQUENCES, {"icepop_band": (0.5, 5.0)}),
        # richardli.xyz/rl-collapse, part 3: sequence weights, 0 above a bound. The bound is from
        # verl; its decoupled_seq_is_rs also has a lower bound of 0.5. The mean is over the kept
        # sequences.
        "mis": _preset(
            "grpo", _CLIP_HIGHER, _CURRENT, _TOKENS, {"sequence_band": (0.0, 2.0)}, _PRODUCT, _KEPT
        ),
        # The same, by geometric mean and with token weights: decoupled_geo_rs_token_tis of verl.
        # Its band, [0.999, 1.001], is for equal weights. A band that admits a version of staleness
        # is a choice.
        "geo_mask": _preset(
            "grpo",
            _CLIP_HIGHER,
            _CURRENT,
            _TOKENS,
            {"tis_cap": 2.0, "sequence_band": (0.99, 1.01)},
            {"sequence_statistic": "geometric"},
            _KEPT,
        ),
        # arXiv:2505.24298: the proximal policy is the policy at the start of the step. A token with
        # a weight over 5 is dropped. This was AReaL's default until April 2026; since then it drops
        # none.
        "decoupled_ppo": _preset(
            "grpo", _CLIPPED, {"old_logprobs": "policy"}, _TOKENS, {"icepop_band": (0.0, 5.0)}
        ),
        # arXiv:2511.20347: a smooth gate instead of the clip range, and a mean of means.
        "sapo": _preset(
            "grpo", {"name": "sapo", "tau_positive": 1.0, "tau_negative": 1.05}, _ENGINE, _SEQUENCES
        ),
        # GRPOConfig of TRL 1.16.0 with use_vllm: loss_type dapo, and
        # vllm_importance_sampling_mode sequence_mask with clip_max 3.
        "trl_vllm": _preset(
            "grpo", _CLIPPED, _CURRENT, _TOKENS, {"sequence_band": (0.0, 3.0)}, _PRODUCT
        ),
        # ppo_trainer.yaml of verl 0.10 with adv_estimator=grpo: clip_ratio_c is 3, and
        # rollout_correction is off. One optimizer step per batch, so the ratio is 1.
        "verl_default": _preset("grpo", _CLIPPED, _CURRENT, _TOKENS, {"dual_clip": 3.0}),
        # grpo_math_1B.yaml of NeMo-RL: leave-one-out baseline and deviation, and a KL penalty of
        # 0.01, k3, whose gradient is unbiased and which is bounded by 10 per token.
        "nemo_rl_default": _preset(
            "grpo_loo",
            _CLIPPED,
            _CURRENT,
            _TOKENS,
            {"kl_coef": 0.01, "kl_gradient": "unbiased", "kl_clamp": 10.0},
        ),
    }
)
"""Keys of ``algorithm`` by preset."""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]


def with_preset(given: object) -> object:
    """Return ``given``, with missing values filled in from its preset.

    A value that is not a mapping, or an unknown preset, is returned unchanged. The model reports
    it.
    """
    if not isinstance(given, Mapping):
        return given
    section = dict(cast("Mapping[str, Any]", given))
    name = section.get("preset")
    if not isinstance(name, str) or name not in PRESETS:
        return section
    for key, value in PRESETS[name].items():
        section[key] = _over(value, section[key]) if key in section else value
    return section


def _over(preset: object, given: object) -> object:
    """Return ``given``, with missing values from ``preset``; sections are merged key by key."""
    if isinstance(preset, Mapping) and isinstance(given, Mapping):
        return {**cast("Mapping[str, Any]", preset), **cast("Mapping[str, Any]", given)}
    return given
