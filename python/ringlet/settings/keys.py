"""The keys of a DeepSpeed configuration, by name with dots: those that ringlet reads, and its answer to the others."""

AUTO = "auto"
PRINT_EVERY = 10  # DeepSpeed's steps_per_print

SECTIONS = {
    "bf16",
    "fp16",
    "zero_optimization",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
}

# What each key holds, and the field of Settings that takes it as it is. Sizes are elements.
KEYS: dict[str, tuple[type, str | None]] = {
    "train_batch_size": (int, None),
    "train_micro_batch_size_per_gpu": (int, None),
    "gradient_accumulation_steps": (int, None),
    "gradient_clipping": (float, "clip_norm"),
    "steps_per_print": (int, "print_every"),
    "wall_clock_breakdown": (bool, "print_times"),
    "bf16.enabled": (bool, "bf16"),
    "zero_optimization.stage": (int, "stage"),
    "zero_optimization.overlap_comm": (bool, "overlap"),
    "zero_optimization.reduce_bucket_size": (int, "reduce_bucket_elements"),
    "zero_optimization.allgather_bucket_size": (int, "gather_bucket_elements"),
    "zero_optimization.sub_group_size": (int, "sub_group_elements"),
    "zero_optimization.stage3_param_persistence_threshold": (int, "persistence_elements"),
    "zero_optimization.offload_optimizer.device": (str, None),
    "zero_optimization.offload_optimizer.nvme_path": (str, None),
    "zero_optimization.offload_optimizer.pin_memory": (bool, None),
    "zero_optimization.offload_param.device": (str, None),
    "zero_optimization.offload_param.nvme_path": (str, None),
    "zero_optimization.offload_param.pin_memory": (bool, None),
}

# "auto" of these needs a value. Of the others it is ringlet's own default, or worked out (batch sizes).
NO_AUTO = {"gradient_clipping", "zero_optimization.stage", *(key for key in KEYS if ".offload_" in key)}

# Keys with one permitted value: what ringlet does anyway.
ONLY = {
    "zero_optimization.contiguous_gradients": True,  # gradients stand in flat buffers
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.allgather_partitions": True,
    "zero_optimization.ignore_unused_parameters": True,  # they count zero
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.zero_quantized_weights": False,
    "zero_optimization.zero_quantized_gradients": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "fp16.enabled": False,
    "prescale_gradients": False,
    "sparse_gradients": False,
    "disable_allgather": False,
    "dump_state": False,
    "memory_breakdown": False,
}

OTHERS_DO = {
    "optimizer": "pass the optimizer's class and arguments to Zero",
    "scheduler": "make a torch.optim.lr_scheduler of zero.optimizer",
    "zero_allow_untested_optimizer": "pass elementwise=True to Zero for an optimizer class of your own",
    "zero_force_ds_cpu_optimizer": "the optimizer is the class that is passed to Zero, wherever its states are",
    "activation_checkpointing": "use torch.utils.checkpoint",
    "amp": "use bf16",
    "gradient_predivide_factor": "gradients are averaged as they are reduced",
    "communication_data_type": "gradients are reduced in the parameters' dtype",
    "data_types": "gradients are kept in the parameters' dtype",
    "zero_optimization.stage3_prefetch_bucket_size": "the unit that is used next is prefetched, whatever its size; "
    "limit units by allgather_bucket_size",
    "zero_optimization.stage3_max_live_parameters": "two units are whole at a time; limit units by "
    "allgather_bucket_size",
    "zero_optimization.stage3_max_reuse_distance": "a unit is released when another is used",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "use `with zero.gathered():`",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "use `with zero.gathered():`",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the float32 masters",
    "zero_optimization.elastic_checkpoint": "every checkpoint can be loaded at any world size",
    "zero_optimization.cpu_offload": "use offload_optimizer",
    "zero_optimization.mics_shard_size": "pass Zero a group",
    "fp16.loss_scale": "use bf16",
    "tensorboard": "read zero.stats()",
    "wandb": "read zero.stats()",
    "csv_monitor": "read zero.stats()",
    "flops_profiler": "use torch.profiler",
    "comms_logger": "read zero.stats()",
}
for _part in ("offload_optimizer", "offload_param"):
    for _name in ("buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init", "ratio"):
        OTHERS_DO[f"zero_optimization.{_part}.{_name}"] = "files are memory-mapped, the kernel buffers them"
for _name in ("loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale", "auto_cast"):
    OTHERS_DO[f"fp16.{_name}"] = "use bf16"
