"""TRL's GRPOConfig: options that are applied or refused, and the gear section from them.

Every field of the installed GRPOConfig is in one of the lists;
tests/unit/integrations/test_trl_options.py compares them. A field that is in none, such as one of a
newer transformers, is refused if it has another value than its default.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.framework_options import TABLE, Limit, follow, one_of
from deepspeed_gear.integrations.grpo_losses import NORMALIZE, GRPOLoss

_PADDED = "or train with TRL's GRPOTrainer"
_follow = partial(follow, "the GRPOConfig")

#: Options of which some values have no packed form.
LIMITED: dict[str, Limit] = {
    "loss_type": Limit(
        one_of(*NORMALIZE),
        f"must be one of {', '.join(NORMALIZE)}: bnpo is a mean over one rank's own tokens",
        'use "dapo", the mean over the tokens of all ranks',
    ),
    "importance_sampling_level": Limit(
        one_of("token", "sequence"), 'must be "token" or "sequence"', "use one of them"
    ),
    "top_entropy_quantile": Limit(
        one_of(1),
        "must be 1.0: a quantile over tokens of several packs has no packed form",
        f"leave it out, {_PADDED}",
    ),
    "entropy_coef": Limit(
        one_of(0),
        "must be 0: an entropy bonus is a mean of its own, beside that of the loss",
        f"leave it out, {_PADDED}",
    ),
    "use_adaptive_entropy": Limit(
        one_of(False),
        "must be False: an entropy bonus is a mean of its own, beside that of the loss",
        f"leave it out, {_PADDED}",
    ),
    "router_aux_loss_coef": Limit(
        one_of(None, 0),
        "must be 0: the load balance of experts is a loss of padded batches",
        f"set it to 0.0, {_PADDED}",
    ),
    "neftune_noise_alpha": Limit(
        one_of(None, 0),
        "must be None: the noise depends on the length of a row, which is a pack here",
        "leave it out",
    ),
    "gradient_accumulation_steps": Limit(
        one_of(1),
        "must be 1: an optimizer step has as many micro batches as its responses need",
        "multiply per_device_train_batch_size by it instead",
    ),
    "parallelism_config": Limit(
        one_of(None),
        "must be None: only data parallel ranks have been tested with TRL",
        "leave it out",
    ),
}

#: Options that the packed step and its table apply.
APPLIED = """
    num_generations max_completion_length generation_batch_size steps_per_generation num_iterations
    per_device_train_batch_size beta epsilon epsilon_high delta use_bias_correction_kl
    sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg off_policy_mask_threshold deepspeed bf16 fp16 use_cpu
""".split()

#: Options of the code of TRL and transformers that runs unchanged: models, prompts, generation,
#: rewards and advantages, evaluation, the optimizer, logs and checkpoints. Options of the entropy
#: bonus are without effect here, as the bonus is refused.
UNCHANGED = """
    model_init_kwargs trust_remote_code disable_dropout cast_lm_head_to_fp32
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode
    use_liger_kernel liger_kernel_config use_cache torch_empty_cache_steps tf32 full_determinism
    bf16_full_eval fp16_full_eval

    remove_unused_columns shuffle_dataset pad_to_multiple_of chat_template_kwargs
    ignore_data_skip accelerator_config dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy
    length_column_name label_names seed data_seed

    temperature top_p top_k min_p generation_kwargs repetition_penalty cache_implementation
    ds3_gather_for_generation max_tool_calling_iterations use_vllm vllm_mode vllm_model_impl
    vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
    vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction
    vllm_importance_sampling_mode vllm_importance_sampling_clip_max
    vllm_importance_sampling_clip_min vllm_importance_sampling_cap
    use_transformers_continuous_batching transformers_continuous_batching_config
    use_transformers_paged

    reward_weights multi_objective_aggregation scale_rewards mask_truncated_completions
    sync_ref_model ref_model_mixup_alpha ref_model_sync_steps entropy_coef_min entropy_coef_max
    entropy_coef_delta entropy_target

    num_generations_eval do_eval do_predict eval_strategy eval_steps eval_delay
    per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics

    num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps
    optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    max_grad_norm average_tokens_across_devices label_smoothing_factor auto_find_batch_size
    do_train ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend ddp_timeout fsdp fsdp_config local_rank

    output_dir log_completions log_multimodal num_completions_to_print log_unique_prompts
    log_completions_hub_repo logging_strategy logging_steps logging_first_step log_on_each_node
    logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm
    report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id debug
    skip_memory_metrics

    save_only_model save_strategy save_steps save_on_each_node save_total_limit
    enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy
    hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better
    restore_callback_states_from_checkpoint resume_from_checkpoint
""".split()


def check_options(args: Any) -> None:
    """Raise a ConfigError for an option that has no packed form, by its name.

    Args:
        args: A GRPOConfig.
    """
    for name, limit in LIMITED.items():
        limit.check(f"GRPOConfig.{name}", getattr(args, name))
    known = {*LIMITED, *APPLIED, *UNCHANGED}
    for field in config_fields(type(args)):
        value = getattr(args, field.name, None)
        if field.name not in known and not _is_default(field, value):
            rule = "must have its default: this option is not known here"
            raise ConfigError(f"GRPOConfig.{field.name}", rule, value, f"leave it out, {_PADDED}")
    if args.use_cpu and args.world_size > 1:
        rule = "must be False with several ranks: accelerate then makes no ranks of DeepSpeed"
        remedy = "leave it out; without a GPU see use_gloo() of examples/trl_grpo.py"
        raise ConfigError("GRPOConfig.use_cpu", rule, True, remedy)
    groups = args.generation_batch_size // args.num_generations
    if groups % args.steps_per_generation:
        rule = f"must divide the {groups} groups of a generation batch, which are trained whole"
        remedy = "change it, per_device_train_batch_size or num_generations"
        raise ConfigError(
            "GRPOConfig.steps_per_generation", rule, args.steps_per_generation, remedy
        )


def config_fields(kind: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a GRPOConfig's class that trl and transformers define."""
    own = [
        base for base in kind.__mro__ if base.__module__.split(".")[0] in ("trl", "transformers")
    ]
    return [*dataclasses.fields(own[0])] if own else []


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is dataclasses.MISSING or bool(value == field.default)


def fill_ds_config(config: dict[str, Any], args: Any, loss: GRPOLoss) -> None:
    """Complete a ds_config in place: DeepSpeed's settings for packs, and the gear section.

    Args:
        config: It has `gear.pack`, and the capacity of the table `rollouts`. Where that has
            `prompts`, their rollout workers commit the groups.
        args: The GRPOConfig.
        loss: Its loss.
    Raises:
        ConfigError: An option that follows from the GRPOConfig has another value.
    """
    gear = config.get("gear")
    if not isinstance(gear, dict) or "pack" not in gear or TABLE not in gear.get("tables", {}):
        rule = f"must have gear.pack and gear.tables.{TABLE}"
        raise ConfigError(
            "GRPOConfig.deepspeed", rule, None, "docs/how-to/trl.md has a ds_config to begin with"
        )
    _follow(config, "", {"managed_gradient_accumulation": False})
    if "train_batch_size" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", args.per_device_train_batch_size)
    if args.bf16 or args.fp16:
        _sum_in_float32(config)
    _fill_table(gear["tables"][TABLE], args, loss)
    section = {
        "sampler": {"kind": "fifo", "unit": "group"},
        "rollout": {
            "groups": args.generation_batch_size // args.num_generations,
            "minibatches": args.steps_per_generation,
            "epochs": args.num_iterations,
        },
        # TRL counts responses whose loss is masked.
        "loss": {"normalize": loss.normalize(args.max_completion_length), "count_masked": True},
    }
    _follow(gear, "gear.", section)


def _fill_table(table: dict[str, Any], args: Any, loss: GRPOLoss) -> None:
    """Complete the options of the table; other columns and conditions of groups may be there."""
    where = f"gear.tables.{TABLE}."
    _follow(table, where, {"remove": "fifo", "max_times_sampled": 1})
    columns = leased_columns() if "prompts" in table else scored_columns(loss)
    known = table.setdefault("schema", {}).setdefault("columns", {})
    _follow(known, f"{where}schema.columns.", columns)
    group = {"column": "group", "size": args.num_generations}
    _follow(table.setdefault("group", {}), f"{where}group.", group)


def _sum_in_float32(config: dict[str, Any]) -> None:
    """Sum the gradients of a step's micro batches in float32, unless the config says otherwise.

    DeepSpeed's default is the dtype of the weights.
    """
    data_types = config.setdefault("data_types", {})
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage > 0:
        data_types.setdefault("grad_accum_dtype", "fp32")
    elif data_types.get("grad_accum_dtype", "fp32") == "fp32":
        rule = (
            "must be 1, 2 or 3 with 16-bit weights: without ZeRO, DeepSpeed cannot sum the "
            "gradients of a step's micro batches in float32"
        )
        remedy = (
            'set it to 1, or give "data_types": {"grad_accum_dtype": "bf16"}, which rounds after '
            "each micro batch"
        )
        raise ConfigError("zero_optimization.stage", rule, stage, remedy)


def scored_columns(loss: GRPOLoss) -> dict[str, dict[str, Any]]:
    """Return the columns of responses that TRL has generated and scored."""
    return {
        **{name: {"dtype": "float32", "allow_nan": True} for name in loss.columns},
        **_TEXT,
        "score": {"dtype": "float32", "rows": "1"},
    }


def leased_columns() -> dict[str, dict[str, Any]]:
    """Return the columns of responses that rollout workers commit."""
    return {
        "old_logp": {"dtype": "float32"},
        **_TEXT,
        "reward": {"dtype": "float32", "rows": "1"},
    }


_TEXT: dict[str, dict[str, Any]] = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "group": {"dtype": "int64", "rows": "1"},
}
