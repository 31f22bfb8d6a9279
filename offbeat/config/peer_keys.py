"""Translates keys of NeMo-RL, verl, prime-rl, TRL, slime and OpenRLHF, for the message about an unknown key.

docs/coming-from.md has the same keys with what differs in their meaning, and more of them.
"""

from collections.abc import Iterable
from typing import Final

PEER_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "model.path": ("policy.model_name", "actor_rollout_ref.model.path"),
    "model.dtype": ("policy.precision", "bf16"),
    "name": ("trainer.experiment_name", "run_name"),
    "run_dir": ("checkpointing.checkpoint_dir", "trainer.default_local_dir", "output_dir"),
    "data.path": ("data.train_data_path", "data.train_files", "train_dataset"),
    "data.epochs": ("grpo.max_num_epochs", "trainer.total_epochs", "num_train_epochs"),
    "environment.target": ("custom_reward_function.path", "reward_funcs", "reward_manager"),
    "environment.rewards.NAME.weight": ("reward_weights",),
    "groups_per_step": (
        "grpo.num_prompts_per_step",
        "data.train_batch_size",
        "orchestrator.batch_size",
        "per_device_train_batch_size",
        "rollout_batch_size",
    ),
    "samples_per_group": (
        "grpo.num_generations_per_prompt",
        "rollout.n",
        "orchestrator.group_size",
        "num_generations",
        "n_samples_per_prompt",
    ),
    "steps": ("grpo.max_num_steps", "trainer.total_training_steps", "max_steps"),
    "sampler.max_staleness": (
        "async_grpo.max_trajectory_age_steps",
        "max_lookahead_versions",
        "async_training.staleness_threshold",
        "orchestrator.max_off_policy_steps",
    ),
    "sync.interval": ("async_training.trigger_parameter_sync_step", "weight_sync_steps"),
    "sync.mode": ("in_flight_weight_updates", "async_training.partial_rollout"),
    "rollout.max_in_flight": ("async_rl.max_inflight_prompts", "max_inflight_tasks"),
    "buffer.capacity_groups": ("async_rl.max_buffered_rollouts", "queue_maxsize"),
    "rollout.truncated_samples": ("grpo.overlong_filtering", "mask_truncated_completions"),
    "filters.zero_variance": ("grpo.use_dynamic_sampling", "algorithm.filter_groups.enable"),
    "generator.max_model_len": ("policy.max_total_sequence_length", "data.max_prompt_length"),
    "generator.sampling.max_new_tokens": ("data.max_response_length", "max_completion_length"),
    "generator.sampling.top_p": ("policy.generation.top_p", "rollout.top_p"),
    "generator.sampling.top_k": ("policy.generation.top_k", "rollout.top_k"),
    "generator.sampling.stop_token_ids": ("policy.generation.stop_token_ids",),
    "generator.sampling.stop": ("policy.generation.stop_strings",),
    "generator.backend": ("rollout.name", "use_vllm"),
    "generator.vllm.tensor_parallel": (
        "vllm_cfg.tensor_parallel_size",
        "rollout.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    "generator.vllm.engine_args.gpu_memory_utilization": (
        "vllm_cfg.gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    "generator.vllm.engine_args.enforce_eager": (
        "vllm_cfg.enforce_eager",
        "rollout.enforce_eager",
    ),
    "trainer.data_parallel": ("cluster.gpus_per_node", "trainer.n_gpus_per_node"),
    "generator.engines": ("cluster.gpus_per_node", "trainer.n_gpus_per_node"),
    "trainer.tensor_parallel": (
        "dtensor_cfg.tensor_parallel_size",
        "megatron_cfg.tensor_model_parallel_size",
        "megatron.tensor_model_parallel_size",
    ),
    "trainer.activation_checkpointing": (
        "model.enable_gradient_checkpointing",
        "gradient_checkpointing",
    ),
    "trainer.max_tokens_per_microbatch": (
        "policy.sequence_packing.train_mb_tokens",
        "policy.train_micro_batch_size",
        "actor.ppo_max_token_len_per_gpu",
        "actor.ppo_micro_batch_size_per_gpu",
        "token_budget",
    ),
    "trainer.context_parallel": ("ulysses_sequence_parallel_size",),
    "trainer.lora.rank": ("model.lora_rank", "lora_r", "peft_config"),
    "trainer.lora.alpha": ("model.lora_alpha",),
    "trainer.optimizer.learning_rate": ("actor.optim.lr", "optim.lr", "optimizer.kwargs.lr"),
    "trainer.optimizer.warmup_steps": (
        "actor.optim.lr_warmup_steps",
        "scheduler.lr_warmup_iters",
        "warmup_ratio",
    ),
    "trainer.optimizer.betas": ("adam_beta1", "adam_beta2"),
    "trainer.optimizer.schedule": ("actor.optim.warmup_style", "lr_scheduler_type"),
    "trainer.optimizer.max_grad_norm": ("actor.grad_clip", "optim.max_norm"),
    "algorithm.preset": ("importance_sampling_level",),
    "algorithm.advantage": (
        "grpo.use_leave_one_out_baseline",
        "algorithm.adv_estimator",
        "scale_rewards",
    ),
    "algorithm.minibatches": (
        "policy.train_global_batch_size",
        "actor.ppo_mini_batch_size",
        "steps_per_generation",
    ),
    "algorithm.loss.name": ("loss_type",),
    "algorithm.epochs": ("ppo_epochs", "num_iterations"),
    "algorithm.loss.clip_low": ("loss_fn.ratio_clip_min", "actor.clip_ratio_low", "epsilon"),
    "algorithm.loss.clip_high": ("ratio_clip_max", "clip_ratio_high", "epsilon_high"),
    "algorithm.loss.dual_clip": ("loss_fn.ratio_clip_c", "actor.clip_ratio_c"),
    "algorithm.loss.tis_cap": ("loss_fn.truncated_importance_sampling_ratio",),
    "algorithm.loss.kl_coef": (
        "loss_fn.reference_policy_kl_penalty",
        "actor.kl_loss_coef",
        "actor.use_kl_loss",
        "beta",
    ),
    "algorithm.loss.kl_kind": ("actor.kl_loss_type",),
    "algorithm.loss.entropy_coef": ("actor.entropy_coeff",),
    "algorithm.loss.normalize": ("loss_fn.token_level_loss", "actor.loss_agg_mode", "loss_type"),
    "eval.path": ("data.val_data_path", "data.val_files", "eval_dataset"),
    "eval.samples": ("val_kwargs.n",),
    "eval.interval": ("grpo.val_period", "trainer.test_freq", "eval_steps"),
    "eval.at_start": ("grpo.val_at_start", "trainer.val_before_train", "eval_on_start"),
    "checkpoint.interval": ("checkpointing.save_period", "trainer.save_freq", "save_steps"),
    "checkpoint.keep": ("checkpointing.keep_top_k", "save_total_limit"),
    "wandb.project": ("trainer.project_name",),
    "wandb.mode": ("logger.wandb_enabled", "trainer.logger", "report_to"),
    "tensorboard.enabled": ("logger.tensorboard_enabled", "trainer.logger", "report_to"),
}
"""Keys of other libraries, by the key of a recipe that takes their place; prefixes may be left out."""

NOTES: Final[dict[str, str]] = {
    "deepspeed": "It has no key here: the torch backend cuts weights and optimizer over `trainer.data_parallel` ranks.",
    "filter_overlong_prompts": "It has no key here: `offbeat check` names rows that are too long; remove them.",
    "gradient_accumulation_steps": "It is not needed here: a step of `groups_per_step` groups is cut into microbatches of `trainer.max_tokens_per_microbatch`.",
    "importance_sampling_level": "Its `sequence` is `algorithm.preset=gspo`.",
    "log_completions": "It is not needed here: every sample is in `rollouts/` of the run directory.",
    "nnodes": "It has no key here: Ray places `generator.engines` and the ranks of `trainer.data_parallel` on its nodes.",
    "optim": "It has no key here: the optimizer is AdamW, section `trainer.optimizer`.",
    "optimizer_offload": "It has no key here: the optimizer stays on the device of its rank.",
    "param_offload": "It has no key here: weights stay on the device of their rank.",
    "per_device_train_batch_size": "Times devices and gradient_accumulation_steps, divided by num_generations, it is `groups_per_step`.",
    "push_to_hub": "It has no key here: `checkpoints/step_N` of the run directory is a model to upload.",
    "ref_model_sync_steps": "It has no key here: the reference keeps the weights of version 0.",
    "repetition_penalty": "It has no key here: probabilities are those of the model at `generator.sampling.temperature`.",
    "vllm_mode": "Its `colocate` is `generator.share_weights` with `runtime=local`, one copy of the weights; on Ray engines and trainer run at once, and fractions in `generator.gpus` and `trainer.gpus` share a device.",
    "warmup_ratio": "Times `steps`, it is the number of them.",
}
"""Sentences on keys of other libraries that have no counterpart, or one of another meaning."""

_MOST_TRANSLATED: Final = 4
_PAGE: Final = "More: docs/coming-from.md."


def translated(keys: Iterable[str], *, parts: int = 1) -> str:
    """Return which keys of a recipe correspond to ``keys`` of other libraries; ``""`` if none does.

    Args:
        keys: Dotted, as written.
        parts: Last parts of a dotted key that have to be those of the other library's key.
    """
    keys = list(keys)
    found = [(key, ours) for key in keys if (ours := matching_keys(key, parts))]
    said = [
        f"`{key}` is {' or '.join(f'`{each}`' for each in ours)} here"
        for key, ours in found[:_MOST_TRANSLATED]
    ]
    notes = [NOTES[leaf] for key in keys if (leaf := key.rpartition(".")[2]) in NOTES]
    sentences = [*([f"{'; '.join(said)}."] if said else []), *notes[:_MOST_TRANSLATED]]
    return " ".join([*sentences, _PAGE]) if sentences else ""


def matching_keys(key: str, least: int) -> list[str]:
    """Return the keys whose counterparts share the most last parts with ``key``, and at least ``least``."""
    shared = {
        ours: max(_shared_parts(key, peer) for peer in peers) for ours, peers in PEER_KEYS.items()
    }
    most = max(shared.values())
    return [ours for ours, count in shared.items() if count == most >= least]


def _shared_parts(one: str, other: str) -> int:
    """Count the last parts that two dotted keys have in common."""
    count = 0
    for left, right in zip(reversed(one.split(".")), reversed(other.split(".")), strict=False):
        if left != right:
            break
        count += 1
    return count
