"""Translates other libraries' keys, for the message about an unknown key.

The libraries are NeMo-RL, verl, prime-rl, TRL, slime and OpenRLHF.

docs/coming-from.md lists the same keys and more, with the differences in their meaning.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

PEER_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "model.path": ("policy.model_name", "actor_rollout_ref.model.path"),
    "model.dtype": ("policy.precision", "bf16", "fsdp_config.model_dtype", "fp16"),
    "name": ("trainer.experiment_name", "run_name", "logger.wandb.name", "wandb.name"),
    "run_dir": (
        "checkpointing.checkpoint_dir",
        "trainer.default_local_dir",
        "output_dir",
        "logger.log_dir",
        "logging_dir",
    ),
    "data.path": ("data.train_data_path", "data.train_files", "train_dataset", "data.dataset_name"),
    "data.epochs": ("grpo.max_num_epochs", "trainer.total_epochs", "num_train_epochs"),
    "environment.target": (
        "custom_reward_function.path",
        "reward_funcs",
        "reward_manager",
        "custom_reward_function.name",
        "rollout_func",
        "environment_factory",
    ),
    "environment.rewards.NAME.weight": ("reward_weights",),
    "groups_per_step": (
        "grpo.num_prompts_per_step",
        "data.train_batch_size",
        "orchestrator.batch_size",
        "per_device_train_batch_size",
        "rollout_batch_size",
        "async_training.require_batches",
    ),
    "samples_per_group": (
        "grpo.num_generations_per_prompt",
        "rollout.n",
        "orchestrator.group_size",
        "num_generations",
        "n_samples_per_prompt",
        "orchestrator.rollouts_per_example",
    ),
    "steps": ("grpo.max_num_steps", "trainer.total_training_steps", "max_steps"),
    "sampler.max_staleness": (
        "async_grpo.max_trajectory_age_steps",
        "max_lookahead_versions",
        "async_training.staleness_threshold",
        "orchestrator.max_off_policy_steps",
        "orchestrator.max_async_level",
        "async_level",
    ),
    "sync.interval": ("async_training.trigger_parameter_sync_step", "weight_sync_steps"),
    "sync.mode": ("in_flight_weight_updates", "async_training.partial_rollout"),
    "rollout.max_in_flight": (
        "async_rl.max_inflight_prompts",
        "max_inflight_tasks",
        "orchestrator.concurrency.max_inflight",
    ),
    "buffer.capacity_groups": ("async_rl.max_buffered_rollouts", "queue_maxsize"),
    "rollout.truncated_samples": ("grpo.overlong_filtering", "mask_truncated_completions"),
    "filters.zero_variance": (
        "grpo.use_dynamic_sampling",
        "algorithm.filter_groups.enable",
        "buffer.online_difficulty_filtering",
    ),
    "generator.max_model_len": (
        "policy.max_total_sequence_length",
        "data.max_prompt_length",
        "data.max_input_seq_length",
        "rollout.prompt_length",
        "seq_len",
        "vllm_max_model_length",
    ),
    "generator.sampling.max_new_tokens": (
        "data.max_response_length",
        "max_completion_length",
        "rollout.response_length",
        "max_completion_tokens",
        "sampling.max_tokens",
    ),
    "generator.sampling.top_p": ("policy.generation.top_p", "rollout.top_p"),
    "generator.sampling.top_k": ("policy.generation.top_k", "rollout.top_k"),
    "generator.sampling.stop_token_ids": ("policy.generation.stop_token_ids",),
    "generator.sampling.stop": ("policy.generation.stop_strings", "rollout.stop"),
    "generator.backend": ("rollout.name", "use_vllm", "policy.generation.backend"),
    "generator.vllm.tensor_parallel": (
        "vllm_cfg.tensor_parallel_size",
        "rollout.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "inference.model.tp",
        "inference.parallel.tp",
        "vllm.tensor_parallel_size",
    ),
    "generator.vllm.engine_args.gpu_memory_utilization": (
        "vllm_cfg.gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "inference.gpu_memory_utilization",
        "vllm.gpu_memory_utilization",
    ),
    "generator.vllm.engine_args.enforce_eager": (
        "vllm_cfg.enforce_eager",
        "rollout.enforce_eager",
        "inference.enforce_eager",
    ),
    "trainer.data_parallel": (
        "cluster.gpus_per_node",
        "trainer.n_gpus_per_node",
        "deployment.num_train_gpus",
        "fsdp_config.fsdp_size",
        "num_processes",
    ),
    "generator.engines": (
        "cluster.gpus_per_node",
        "trainer.n_gpus_per_node",
        "deployment.num_infer_gpus",
        "inference.parallel.dp",
    ),
    "trainer.tensor_parallel": (
        "dtensor_cfg.tensor_parallel_size",
        "megatron_cfg.tensor_model_parallel_size",
        "megatron.tensor_model_parallel_size",
        "trainer.model.tp",
    ),
    "trainer.activation_checkpointing": (
        "model.enable_gradient_checkpointing",
        "gradient_checkpointing",
        "model.ac.freq",
        "gradient_checkpointing_kwargs",
    ),
    "trainer.max_tokens_per_microbatch": (
        "policy.sequence_packing.train_mb_tokens",
        "policy.train_micro_batch_size",
        "actor.ppo_max_token_len_per_gpu",
        "actor.ppo_micro_batch_size_per_gpu",
        "token_budget",
        "dynamic_batching.train_mb_tokens",
        "ppo_micro_batch_size",
        "seq_len",
    ),
    "trainer.context_parallel": (
        "ulysses_sequence_parallel_size",
        "context_parallel_size",
        "trainer.model.cp",
    ),
    "trainer.lora.rank": ("model.lora_rank", "lora_r", "peft_config", "lora_cfg.dim", "lora.rank"),
    "trainer.lora.alpha": ("model.lora_alpha", "lora.alpha"),
    "trainer.optimizer.learning_rate": (
        "actor.optim.lr",
        "optim.lr",
        "optimizer.kwargs.lr",
        "megatron_cfg.optimizer.lr",
    ),
    "trainer.optimizer.warmup_steps": (
        "actor.optim.lr_warmup_steps",
        "scheduler.lr_warmup_iters",
        "warmup_ratio",
        "lr_warmup_steps_ratio",
        "scheduler.warmup_steps",
    ),
    "trainer.optimizer.betas": (
        "adam_beta1",
        "adam_beta2",
        "optimizer.kwargs.betas",
        "optim.betas1",
        "optim.betas2",
    ),
    "trainer.optimizer.schedule": (
        "actor.optim.warmup_style",
        "lr_scheduler_type",
        "scheduler.lr_decay_style",
        "optim.lr_scheduler_type",
        "scheduler.type",
    ),
    "trainer.optimizer.max_grad_norm": ("actor.grad_clip", "optim.max_norm", "optim.clip_grad"),
    "algorithm.preset": ("importance_sampling_level",),
    "algorithm.advantage": (
        "grpo.use_leave_one_out_baseline",
        "algorithm.adv_estimator",
        "scale_rewards",
        "grpo.normalize_rewards",
        "adv_estimator.name",
        "norm_adv_by_std_in_grpo",
        "advantage.type",
    ),
    "algorithm.minibatches": (
        "policy.train_global_batch_size",
        "actor.ppo_mini_batch_size",
        "steps_per_generation",
    ),
    "algorithm.loss.name": ("loss_type", "policy_loss.loss_mode", "loss.type"),
    "algorithm.epochs": ("ppo_epochs", "num_iterations"),
    "algorithm.loss.clip_low": (
        "loss_fn.ratio_clip_min",
        "actor.clip_ratio_low",
        "epsilon",
        "actor.clip_ratio",
    ),
    "algorithm.loss.clip_high": (
        "ratio_clip_max",
        "clip_ratio_high",
        "epsilon_high",
        "actor.clip_ratio",
    ),
    "algorithm.loss.dual_clip": ("loss_fn.ratio_clip_c", "actor.clip_ratio_c"),
    "algorithm.loss.tis_cap": (
        "loss_fn.truncated_importance_sampling_ratio",
        "use_importance_sampling_correction",
        "rollout_correction.rollout_is",
        "rollout_is_threshold",
        "vllm_importance_sampling_correction",
        "vllm_importance_sampling_mode",
        "vllm_importance_sampling_cap",
    ),
    "algorithm.loss.kl_coef": (
        "loss_fn.reference_policy_kl_penalty",
        "actor.kl_loss_coef",
        "actor.use_kl_loss",
        "beta",
        "loss.kl_tau",
    ),
    "algorithm.loss.kl_kind": (
        "actor.kl_loss_type",
        "reference_policy_kl_type",
        "algorithm.kl_penalty",
    ),
    "algorithm.loss.entropy_coef": ("actor.entropy_coeff",),
    "algorithm.loss.normalize": ("loss_fn.token_level_loss", "actor.loss_agg_mode", "loss_type"),
    "eval.path": ("data.val_data_path", "data.val_files", "eval_dataset"),
    "eval.samples": ("val_kwargs.n", "num_generations_eval", "eval.rollouts_per_example"),
    "eval.interval": (
        "grpo.val_period",
        "trainer.test_freq",
        "eval_steps",
        "orchestrator.eval.interval",
        "eval_strategy",
        "evaluation_strategy",
        "do_eval",
    ),
    "eval.at_start": ("grpo.val_at_start", "trainer.val_before_train", "eval_on_start"),
    "checkpoint.interval": (
        "checkpointing.save_period",
        "trainer.save_freq",
        "save_steps",
        "ckpt.interval",
        "save_strategy",
    ),
    "checkpoint.keep": (
        "checkpointing.keep_top_k",
        "save_total_limit",
        "max_actor_ckpt_to_keep",
        "ckpt.keep",
        "ckpt.keep_last",
    ),
    "wandb.project": ("trainer.project_name",),
    "wandb.mode": ("logger.wandb_enabled", "trainer.logger", "report_to", "wandb.offline"),
    "tensorboard.enabled": ("logger.tensorboard_enabled", "trainer.logger", "report_to"),
    "data.columns": ("data.prompt_key", "data.image_key", "data.input_key", "data.output_key"),
    "data.shuffle": ("shuffle_dataset",),
    "seed": ("data_seed",),
    "environment.max_turns": ("grpo.max_rollout_turns", "multi_turn.max_assistant_turns"),
    "environment.workers": ("agent.num_workers",),
    "sync.transport": ("weight_broadcast.type",),
    "rollout.overlong_tokens": ("reward_shaping.overlong_buffer_length", "overlong_buffer.len"),
    "rollout.overlong_penalty": ("overlong_buffer_penalty", "penalty_factor"),
    "filters.max_per_step": (
        "dynamic_sampling_max_gen_batches",
        "filter_groups.max_num_gen_batches",
    ),
    "generator.max_sequences": ("rollout.max_num_seqs",),
    "generator.sampling.temperature": ("policy.generation.temperature", "rollout.temperature"),
    "generator.vllm.pipeline_parallel": ("vllm_cfg.pipeline_parallel_size",),
    "generator.vllm.expert_parallel": ("vllm_cfg.expert_parallel_size",),
    "generator.vllm.kv": ("recompute_kv_cache_after_weight_updates",),
    "generator.vllm.engine_args.max_num_batched_tokens": ("rollout.max_num_batched_tokens",),
    "generator.vllm.engine_args.model_impl": ("vllm_model_impl",),
    "generator.device": ("use_cpu",),
    "trainer.device": ("use_cpu",),
    "trainer.backend": ("actor.strategy",),
    "trainer.pipeline_parallel": ("pipeline_model_parallel_size",),
    "trainer.expert_parallel": ("expert_model_parallel_size", "trainer.model.ep"),
    "trainer.expert_tensor_parallel": ("expert_tensor_parallel_size",),
    "trainer.optimizer.weight_decay": ("optimizer.kwargs.weight_decay", "optim.weight_decay"),
    "trainer.optimizer.eps": ("adam_eps", "adam_epsilon"),
    "algorithm.loss.old_logprobs": ("force_on_policy_ratio",),
    "algorithm.loss.sequence_cap": (
        "rollout_correction.rollout_is",
        "vllm_importance_sampling_mode",
    ),
    "algorithm.loss.sequence_band": (
        "rollout_correction.rollout_rs",
        "truncated_importance_sampling_type",
    ),
    "algorithm.loss.off_policy_delta": ("off_policy_mask_threshold",),
    "algorithm.loss.kl_reward_coef": (
        "loss_fn.use_kl_in_reward",
        "algorithm.use_kl_in_reward",
        "kl_ctrl.kl_coef",
    ),
    "algorithm.loss.kl_gradient": ("use_bias_correction_kl",),
    "algorithm.loss.kl_clamp": ("loss_fn.kl_output_clamp_value",),
    "eval.prompts": ("grpo.max_val_samples", "eval.num_examples"),
}
"""Keys of other libraries, by the recipe key that replaces them. Prefixes may be left out."""

_EVALUATION: Final = (
    "It has no key here: an evaluation samples as training does, by `generator.sampling`."
)
_RESUME: Final = (
    "It has no key here: `offbeat train --resume RUN`, or `offbeat.resume(RUN)`, resumes a run."
)
_ENGINES: Final = "It has no key here: a run starts the engines."
_BOTH_WEIGHTS: Final = (
    "It has no key here: engines and trainer hold their weights at the same time."
)
_WEIGHTS: Final = "It has no key here: weights stay on the device of their rank."
_OPTIMIZER: Final = "It has no key here: the optimizer is AdamW, section `trainer.optimizer`."
_TOKENIZER: Final = "It has no key here: the tokenizer is the one in `model.path`."
_LOGPROBS: Final = "It is not needed here: log-probabilities are computed in microbatches of `trainer.max_tokens_per_microbatch`."
_SAMPLES: Final = "It is not needed here: every sample is in `rollouts/` of the run directory."
_EACH_STEP: Final = (
    "It has no key here: each step is logged, in `metrics.jsonl` of the run directory."
)
_INSTRUCTIONS: Final = (
    "It has no key here: write the instructions into the rows, as a message of the role `system`."
)
_CRITIC: Final = (
    "It has no key here: there is no critic, and all tokens of a sample have the same advantage."
)
_AT_ONCE: Final = (
    "It is not needed here: an engine decodes up to `generator.max_sequences` samples at once."
)
_REFERENCE: Final = "It has no key here: the reference keeps the weights of version 0."
_NEWEST: Final = (
    "It has no key here: the newest `checkpoint.keep` checkpoints are kept, not the best."
)
_TOO_LONG: Final = "It has no key here: `offbeat check` names rows that are too long; remove them."
_SHARDED: Final = "It has no key here: the torch backend cuts weights and optimizer over `trainer.data_parallel` ranks."
_UPLOAD: Final = (
    "It has no key here: `checkpoints/step_N` of the run directory is a model to upload."
)
_NODES: Final = "It has no key here: Ray places `generator.engines` and the ranks of `trainer.data_parallel` on its nodes."
_RATIO: Final = "Times `steps`, it is the number of them."
_PACKED: Final = "It is not needed here: microbatches are always packed."

NOTES: Final[dict[str, str]] = {
    "adv_estimator": "Its `grpo` and `rloo` are `algorithm.advantage=grpo` and `rloo`, its `reinforce_plus_plus_baseline` is `algorithm.preset=reinforce_pp_baseline`; `gae` has no key here, for there is no critic.",
    "args": "It has no argument here: write each setting as an argument, or as a key of the recipe.",
    "calculate_log_probs": "It is not needed here: engines always return log-probabilities.",
    "callbacks": "It has no key here: `run.metrics()` reads a live run, and `metrics.jsonl` has each step.",
    "chat_template_kwargs": "It is a field of a row here, next to `messages`.",
    "checkpointing.metric_name": _NEWEST,
    "colocated.enabled": "Its `true` is `generator.share_weights` with `runtime=local`, one copy of the weights; on Ray engines and trainer run at once, and fractions in `generator.gpus` and `trainer.gpus` share a device.",
    "critic": _CRITIC,
    "critic_warmup": _CRITIC,
    "custom_reward_function.path": "Write `environment.target=my_module:reward`, without .py, and `environment.name=function`. It gets the row and the text of one response, so wrap `compute_score`.",
    "data.prompt_key": "A column of chat messages is `data.columns={messages: prompt}`; name other columns that a reward reads there, too, and again in `eval.columns`.",
    "data.truncation": _TOO_LONG,
    "data.val_files": "`eval.prompts` says how many of its rows are scored, 64 by default.",
    "deepspeed": _SHARDED,
    "disable_tqdm": "It has no key here: pass `quiet=True` to `offbeat.train`.",
    "do_sample": "It has no key here: tokens are always drawn, by `generator.sampling`.",
    "dtensor_cfg.cpu_offload": _WEIGHTS,
    "filter_overlong_prompts": _TOO_LONG,
    "free_cache_engine": _BOTH_WEIGHTS,
    "fsdp": _SHARDED,
    "gamma": _CRITIC,
    "generation_batch_size": "Divided by num_generations, it is `groups_per_step`.",
    "generation_kwargs": "Its keys are in the section `generator.sampling` here.",
    "gradient_accumulation_steps": "It is not needed here: a step of `groups_per_step` groups is cut into microbatches of `trainer.max_tokens_per_microbatch`.",
    "hub_model_id": _UPLOAD,
    "importance_sampling_level": "Its `sequence` is `algorithm.preset=gspo`.",
    "kl_ctrl.type": "It has no key here: the weight of the KL penalty is constant.",
    "lam": _CRITIC,
    "load_best_model_at_end": _NEWEST,
    "log_completions": _SAMPLES,
    "log_prob_micro_batch_size_per_gpu": _LOGPROBS,
    "log_val_generations": "It is not needed here: every sample of an evaluation is in `evaluations/` of the run directory.",
    "logging_steps": _EACH_STEP,
    "logging_strategy": _EACH_STEP,
    "logprob_batch_size": _LOGPROBS,
    "loss_agg_mode": "Its `token-mean` is `algorithm.loss.normalize=tokens`, `seq-mean-token-mean` is `sequences`, and `seq-mean-token-sum-norm` is `constant`.",
    "loss_type": "Its `grpo` is `algorithm.loss.normalize=sequences`, `dapo` and `bnpo` are `tokens`, `dr_grpo` is `constant`, and `cispo` is `algorithm.preset=cispo`.",
    "lr_warmup_steps_ratio": _RATIO,
    "max_prompt_length": "Plus max_completion_length, it is `generator.max_model_len`: prompt and response share it.",
    "metric_for_best_model": _NEWEST,
    "model_init_kwargs": "Its `torch_dtype` is `model.dtype`, and its `trust_remote_code` is `model.trust_remote_code`.",
    "multi_objective_aggregation": "It has no key here: rewards are weighted and summed.",
    "nnodes": _NODES,
    "num_completions_to_print": _SAMPLES,
    "num_nodes": _NODES,
    "optim": _OPTIMIZER,
    "optimizer.name": _OPTIMIZER,
    "optimizer_offload": "It has no key here: the optimizer stays on the device of its rank.",
    "overwrite_output_dir": "It has no key here: each run needs its own `run_dir`.",
    "param_offload": _WEIGHTS,
    "per_device_eval_batch_size": _AT_ONCE,
    "per_device_train_batch_size": "Times devices and gradient_accumulation_steps, divided by num_generations, it is `groups_per_step`.",
    "ppo_mini_batch_size": "It counts prompts: `data.train_batch_size` divided by it is `algorithm.minibatches`, so 64 and 32 are `algorithm.minibatches=2`.",
    "processing_class": _TOKENIZER,
    "prompt_file": _INSTRUCTIONS,
    "push_to_hub": _UPLOAD,
    "ref_model_mixup_alpha": _REFERENCE,
    "ref_model_sync_steps": _REFERENCE,
    "remove_unused_columns": "It is not needed here: a reward gets the whole row.",
    "repetition_penalty": "It has no key here: probabilities are those of the model at `generator.sampling.temperature`.",
    "resume": _RESUME,
    "resume_from_checkpoint": _RESUME,
    "resume_from_path": _RESUME,
    "resume_mode": _RESUME,
    "resume_step": _RESUME,
    "reward_model.enable": "It has no key here: let your reward function call the reward model.",
    "rollout.mode": "It is not needed here: engines always sample while the trainer trains.",
    "rollout_data_dir": _SAMPLES,
    "scale_rewards": "Its `true` is `algorithm.advantage=grpo`, and its `false` is `grpo_no_std`.",
    "sequence_level_importance_ratios": "Its `true` is `algorithm.preset=gspo`.",
    "sequence_packing.enabled": _PACKED,
    "sync_ref_model": _REFERENCE,
    "system_prompt_file": _INSTRUCTIONS,
    "tokenizer": _TOKENIZER,
    "tokenizer.name": _TOKENIZER,
    "tools": "It has no key here: write an agent that calls them, as docs/your-agent.md says.",
    "total_epochs": "A run also needs `steps`: rows times epochs, divided by `groups_per_step`.",
    "trainer.logger": "The console shows each run; `wandb.mode=online` and `tensorboard.enabled=true` turn the others on, and `wandb.mode=disabled` turns W&B off.",
    "use_dynamic_bsz": "It is not needed here: microbatches always have up to `trainer.max_tokens_per_microbatch` tokens.",
    "use_kl_loss": "The penalty is on if its coefficient is above 0.",
    "use_remove_padding": _PACKED,
    "val_batch_size": _AT_ONCE,
    "val_kwargs.do_sample": _EVALUATION,
    "val_kwargs.temperature": _EVALUATION,
    "val_kwargs.top_k": _EVALUATION,
    "val_kwargs.top_p": _EVALUATION,
    "val_only": "`offbeat eval RECIPE` scores a model without training.",
    "vllm_enable_sleep_mode": _BOTH_WEIGHTS,
    "vllm_mode": "Its `colocate` is `generator.share_weights` with `runtime=local`, one copy of the weights; on Ray engines and trainer run at once, and fractions in `generator.gpus` and `trainer.gpus` share a device.",
    "vllm_server_base_url": _ENGINES,
    "vllm_server_host": _ENGINES,
    "vllm_server_port": _ENGINES,
    "warmup_ratio": _RATIO,
}
"""Sentences on keys of other libraries that have no counterpart, or a counterpart of another
meaning.
"""

_WITHOUT_COUNTERPART: Final = ("critic",)
"""Sections of other libraries without any counterpart here."""

_MOST_TRANSLATED: Final = 4
_PAGE: Final = "More: docs/coming-from.md."


def translate_keys(
    keys: Iterable[str], *, parts: int = 1, places: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return the recipe keys that correspond to ``keys`` of other libraries, or ``""`` if none.

    Args:
        keys: Dotted, as written.
        parts: Minimum number of last parts that must match the other library's key. Fewer suffice
            if they are the whole key.
        places: Keys of a recipe by their last part, for keys with the same name here.
    """
    keys = list(keys)
    noted = {key: note for key in keys if (note := find_note(key))}
    found = dict[str, list[str]]()
    for key in keys:
        last = key.rpartition(".")[2]
        if key.partition(".")[0] in _WITHOUT_COUNTERPART:
            continue
        if ours := matching_keys(key, parts):
            found[key] = ours
        elif last in places and key not in noted:
            found[key] = [places[last]]
    said = [_say(key, ours) for key, ours in list(found.items())[:_MOST_TRANSLATED]]
    notes = list(dict.fromkeys(noted.values()))[:_MOST_TRANSLATED]
    sentences = [*([f"{'; '.join(said)}."] if said else []), *notes]
    return " ".join([*sentences, _PAGE]) if sentences else ""


def _say(key: str, ours: list[str]) -> str:
    """Return a sentence on the recipe keys that correspond to an unknown key."""
    if ours == [key]:
        return f"`{key}` belongs to a plug-in that is not installed: reinstall offbeat"
    return f"`{key}` is {' or '.join(f'`{each}`' for each in ours)} here"


def find_note(key: str) -> str:
    """Return the note that matches the most last parts of a dotted key, or ``""``."""
    parts = key.split(".")
    if parts[0] in _WITHOUT_COUNTERPART:
        return NOTES[parts[0]]
    tails = (".".join(parts[at:]) for at in range(len(parts)))
    return next((NOTES[tail] for tail in tails if tail in NOTES), "")


def matching_keys(key: str, least: int) -> list[str]:
    """Return the keys with counterparts that share the most last parts with ``key``.

    They share at least ``least`` parts, or all parts of the counterpart.
    """
    shared = {
        ours: max(_count_shared_parts(key, peer, least) for peer in peers)
        for ours, peers in PEER_KEYS.items()
    }
    most = max(shared.values())
    return [ours for ours, count in shared.items() if count == most > 0]


def _count_shared_parts(one: str, other: str, least: int) -> int:
    """Count the last parts that two dotted keys have in common. Return 0 if they are too few."""
    left, right = one.split("."), other.split(".")
    count = 0
    while count < min(len(left), len(right)) and left[-1 - count] == right[-1 - count]:
        count += 1
    return count if count >= least or count == len(right) else 0
