"""Reads the settings that people already have: DeepSpeed's JSON and Paddle's gradient_merge_configs.

Every key either has its meaning of DeepSpeed or Paddle here too, or is refused by name. If a key is missing, ringlet's
own default counts, not DeepSpeed's; without a stage, no ZeRO is asked for. Sizes are in elements, as in DeepSpeed.
Source: DeepSpeed runtime/config.py and runtime/zero/config.py, Paddle's DistributedStrategy.gradient_merge_configs.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ringlet import environment
from ringlet.errors import InvalidUsage
from ringlet.group import current, has_default
from ringlet.joining import whole
from ringlet.training.zero import Offload

AUTO = "auto"
PRINT_EVERY = 10  # DeepSpeed's steps_per_print

ZERO = "zero_optimization"
# Sections with a device: the argument of Zero that takes it.
OFFLOADS = {f"{ZERO}.offload_optimizer": "offload_optimizer", f"{ZERO}.offload_param": "offload_parameters"}
SECTIONS = ("bf16", "fp16", ZERO, *OFFLOADS)

# What each key holds, and the argument of Zero that it sets.
KEYS: dict[str, tuple[type, str | None]] = {
    "train_batch_size": (int, None),
    "train_micro_batch_size_per_gpu": (int, None),
    "gradient_accumulation_steps": (int, None),
    "bf16.enabled": (bool, "dtype"),
    "gradient_clipping": (float, "max_norm"),
    "steps_per_print": (int, "print_every"),
    "wall_clock_breakdown": (bool, "print_times"),
    f"{ZERO}.stage": (int, "stage"),
    f"{ZERO}.overlap_comm": (bool, "overlap"),
    f"{ZERO}.reduce_bucket_size": (int, "bucket_elements"),
    f"{ZERO}.allgather_bucket_size": (int, "gather_elements"),
    f"{ZERO}.sub_group_size": (int, "sub_group_elements"),
    f"{ZERO}.stage3_param_persistence_threshold": (int, "persistence_elements"),
    **{f"{section}.{name}": (str, None) for section in OFFLOADS for name in ("device", "nvme_path")},
    **{f"{section}.pin_memory": (bool, None) for section in OFFLOADS},
}

# "auto" of these needs a value. Of the others it is ringlet's own default, or worked out (batch sizes).
NO_AUTO = {"gradient_clipping", f"{ZERO}.stage", *(key for key in KEYS if ".offload_" in key)}

# Keys with one permitted value: what ringlet does anyway.
ONLY = {
    f"{ZERO}.contiguous_gradients": True,  # gradients stand in flat buffers
    f"{ZERO}.reduce_scatter": True,
    f"{ZERO}.allgather_partitions": True,
    f"{ZERO}.ignore_unused_parameters": True,  # they count zero
    f"{ZERO}.round_robin_gradients": False,
    f"{ZERO}.zero_quantized_weights": False,
    f"{ZERO}.zero_quantized_gradients": False,
    f"{ZERO}.zero_hpz_partition_size": 1,
    "fp16.enabled": False,
    "prescale_gradients": False,
    "sparse_gradients": False,
    "disable_allgather": False,
    "dump_state": False,
    "memory_breakdown": False,
}

# Keys that are refused, and what to do instead.
INSTEAD = {
    "optimizer": "pass the optimizer's class and arguments to Zero",
    "scheduler": "make a torch.optim.lr_scheduler of zero.optimizer",
    "zero_allow_untested_optimizer": "pass elementwise=True to Zero for an optimizer class of your own",
    "activation_checkpointing": "use torch.utils.checkpoint",
    "communication_data_type": "gradients are reduced in the parameters' dtype",
    "flops_profiler": "use torch.profiler",
    f"{ZERO}.stage3_max_reuse_distance": "a unit is released when another is used",
    f"{ZERO}.elastic_checkpoint": "every checkpoint can be loaded at any world size",
    f"{ZERO}.cpu_offload": "use offload_optimizer",
    f"{ZERO}.mics_shard_size": "pass Zero a group",
    "amp": "use bf16",
    **dict.fromkeys(("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"), "use bf16"),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comms_logger"), "read zero.stats()"),
    **dict.fromkeys(
        (f"{ZERO}.stage3_prefetch_bucket_size", f"{ZERO}.stage3_max_live_parameters"),
        "one unit is prefetched while another is used: limit units by allgather_bucket_size",
    ),
    **dict.fromkeys(
        (f"{ZERO}.stage3_gather_16bit_weights_on_model_save", f"{ZERO}.stage3_gather_fp16_weights_on_model_save"),
        "use `with zero.gathered():`",
    ),
    **{
        f"{section}.{name}": "files are memory-mapped, the kernel buffers them"
        for section in OFFLOADS
        for name in ("buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write")
    },
}


@dataclass(frozen=True)
class Settings:
    """The settings of a file. arguments: those of Zero that the file sets, by name. Sizes are in elements.

    `train_batch_size` = `micro_batch_size` x `accumulate` x world, samples a step of all ranks; None: not in the file.
    """

    source: str
    stage: int | None = None
    accumulate: int = 1
    average: bool = True
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def zero(self) -> dict[str, Any]:
        """Arguments for `ringlet.Zero(module, optimizer_class, **settings.zero(), **optimizer_defaults)`.

        Raises InvalidUsage if the file asks for stage 0.
        """
        if self.stage == 0:
            raise InvalidUsage(
                f"{self.source}: {ZERO}.stage is 0, which shards nothing: use GradientReducer with "
                "settings.reducer(module) and settings.accumulation()"
            )
        stage = {} if self.stage is None else {"stage": self.stage}
        return {**stage, **self.arguments, "accumulate": self.accumulate, "average": self.average}

    def reducer(self, module: torch.nn.Module) -> dict[str, Any]:
        """Arguments for `ringlet.GradientReducer(module, **settings.reducer(module))`, whose buckets are in MiB.

        Raises InvalidUsage, which names the settings, if a GradientReducer does not support some of them.
        """
        keys = {name: key for key, (_, name) in KEYS.items()} | {name: key for key, name in OFFLOADS.items()}
        fits = ("bucket_elements", "overlap")
        refused = [f"{ZERO}.stage={self.stage}"] if self.stage else []
        refused += [keys[name] for name, value in self.arguments.items() if value and name not in fits]
        refused += [f"{ZERO}.overlap_comm=false"] if self.arguments.get("overlap") is False else []
        if refused:
            named = ", ".join(refused)
            raise InvalidUsage(f"{self.source}: GradientReducer does not support {named}: use Zero, or leave them out")
        if "bucket_elements" not in self.arguments:
            return {}
        item_bytes = max(p.element_size() for p in module.parameters())
        return {"bucket_mb": self.arguments["bucket_elements"] * item_bytes / (1 << 20)}

    def accumulation(self) -> dict[str, Any]:
        """{"k", "average"} of the gradient accumulation (Paddle: gradient merge)."""
        return {"k": self.accumulate, "average": self.average}


def from_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world: int | None = None,
    values: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings of a DeepSpeed configuration: a file, or the content of one.

    world: the world size for the batch sizes; by default that of torch.distributed, of `init`, or of the launcher
    (torchrun, mpirun or srun), the first there is.
    values: values for keys that are "auto", by key with dots: {"gradient_clipping": 1.0}. "auto" without a value means
    ringlet's default for sizes and switches; ringlet works batch sizes out.

    Raises InvalidUsage, which names key and file, for unknown keys, for keys that ringlet does not support, for values
    of the wrong kind, for batch sizes that disagree, and for a file that cannot be read.
    """
    source, raw = _read(config)
    unused = dict(values or {})
    found = _parse(raw, source, unused)
    if unused:
        raise InvalidUsage(f'{source}: values has {", ".join(unused)}, but the file does not set them to "auto"')
    train, micro, accumulate = _batch_sizes(found, world, source)
    arguments = {name: found[key] for key, (_, name) in KEYS.items() if name and key in found}
    stage = arguments.pop("stage", 0)
    for name in ("max_norm", "dtype"):
        if not arguments.get(name):  # a norm of 0 is DeepSpeed's word for none
            arguments.pop(name, None)
    if "dtype" in arguments:
        arguments["dtype"] = torch.bfloat16
    if arguments.get("print_times"):
        arguments.setdefault("print_every", PRINT_EVERY)
    for section, name in OFFLOADS.items():
        if offload := _offload(found, section, source):
            arguments[name] = offload
    return Settings(source, stage, accumulate, True, train, micro, arguments)


def from_paddle(gradient_merge_configs: Mapping[str, Any], *, gradient_merge: bool = True) -> Settings:
    """The settings of Paddle's gradient merge: {"k_steps": micro-batches a step, "avg": divide by their number}.

    The defaults are Paddle's, 1 and True. Without `gradient_merge` the configs do nothing, as in Paddle.
    """
    source = "gradient_merge_configs"
    for key in gradient_merge_configs:
        if key not in ("k_steps", "avg"):
            raise InvalidUsage(f"{source}: unknown key {key!r}{_nearest(key, ['k_steps', 'avg'])}")
    k, average = gradient_merge_configs.get("k_steps", 1), gradient_merge_configs.get("avg", True)
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise InvalidUsage(f"{source}: k_steps must be a whole number from 1 on, got {k!r}")
    if not isinstance(average, bool):
        raise InvalidUsage(f"{source}: avg must be True or False, got {average!r}")
    return Settings(source, accumulate=k, average=average) if gradient_merge else Settings(source)


def _read(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(config, Mapping):
        return "DeepSpeed settings", config
    path = os.fspath(config)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise InvalidUsage(f"{path}: {', '.join(twice)} appears twice")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file, object_pairs_hook=once)
    except OSError as error:
        raise InvalidUsage(f"cannot read DeepSpeed settings from {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InvalidUsage(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not isinstance(raw, dict):
        raise InvalidUsage(f"{path}: contains a {type(raw).__name__}, not a JSON object")
    return path, raw


def _parse(raw: Mapping[str, Any], source: str, values: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Checked values by key with dots, those of "auto" out of `values`. Leaves out keys that change nothing here."""
    found: dict[str, Any] = {}
    for name, value in raw.items():
        key = f"{section}{name}"
        if key in SECTIONS:
            if value is None and section:
                continue
            if key == "fp16" and isinstance(value, Mapping) and value.get("enabled", False) is False:
                continue  # switched off, whatever else is in it
            if not isinstance(value, Mapping):
                raise InvalidUsage(f"{source}: {key} must be a JSON object, got {value!r}")
            found.update(_parse(value, source, values, key + "."))
        elif key in KEYS and value != AUTO:
            found[key] = _checked(key, value, source)
        elif key in values:
            found[key] = _checked(key, values.pop(key), source)
        elif key in NO_AUTO:
            raise InvalidUsage(
                f'{source}: {key} is "auto", and ringlet cannot work it out: pass values={{"{key}": ...}}'
            )
        elif key in KEYS:
            continue
        elif key in ONLY:
            if value not in (ONLY[key], AUTO):
                raise InvalidUsage(f"{source}: {key} must be {json.dumps(ONLY[key])} with ringlet, got {value!r}")
        elif key in INSTEAD:
            raise InvalidUsage(f"{source}: ringlet does not support {key}: {INSTEAD[key]}")
        else:
            known = [k.removeprefix(section) for k in (*KEYS, *ONLY, *SECTIONS) if k.startswith(section)]
            raise InvalidUsage(f"{source}: unknown key {key}{_nearest(str(name), known)}")
    return found


def _checked(key: str, value: Any, source: str) -> Any:
    kind, _ = KEYS[key]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e8
    words = {int: "a whole number from 0 on", float: "a number from 0 on", bool: "true or false", str: "a string"}[kind]
    right = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not right or (kind in (int, float) and value < 0):
        raise InvalidUsage(f"{source}: {key} must be {words}, got {value!r}")
    return value


def _batch_sizes(found: dict[str, Any], world: int | None, source: str) -> tuple[int | None, int | None, int]:
    """Train batch, micro-batch and accumulation. Works a missing one out from the others and the world."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if found.get(name) == 0:
            raise InvalidUsage(f"{source}: {name} must be positive, got 0")
    train, micro, steps = (found.get(name) for name in names)
    if train is None and micro is None:
        return None, None, steps or 1
    ranks = _world(world, source)
    steps = steps or (train // (micro * ranks) if train and micro else 1)
    micro = micro or (train or 0) // (steps * ranks)
    train = train or micro * steps * ranks
    if micro * steps * ranks != train:
        said = ", ".join(f"{name}={found.get(name, 'not given')}" for name in names)
        raise InvalidUsage(
            f"{source}: the batch sizes disagree on {ranks} ranks: train_batch_size must be "
            f"train_micro_batch_size_per_gpu x gradient_accumulation_steps x world, but {said}, world={ranks}"
        )
    return train, micro, steps


def _world(world: int | None, source: str) -> int:
    if world is not None:
        if whole(world, "world") < 1:
            raise InvalidUsage(f"world must be at least 1, got {world}")
        return world
    if dist.is_initialized():
        return dist.get_world_size()
    if has_default():
        return current().world
    try:
        return environment.find(wanted="world").world
    except InvalidUsage as error:
        raise InvalidUsage(
            f"{source}: batch sizes depend on the world size: pass world=, or make a group first: {error}"
        ) from error


def _offload(found: dict[str, Any], section: str, source: str) -> Offload | None:
    device, path = found.get(f"{section}.device", "none"), found.get(f"{section}.nvme_path")
    pinned = found.get(f"{section}.pin_memory", False)
    if device == "none":
        if path is not None or pinned:
            raise InvalidUsage(
                f"{source}: {section} sets nvme_path or pin_memory but no device: set device to cpu or nvme"
            )
        return None
    if device not in ("cpu", "nvme"):
        raise InvalidUsage(f"{source}: {section}.device must be none, cpu or nvme, got {device!r}")
    try:
        return Offload("file" if device == "nvme" else "cpu", path, pinned)
    except InvalidUsage as error:
        raise InvalidUsage(f"{source}: {section}: {error}") from error


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(sorted(known))}"
