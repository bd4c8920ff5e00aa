"""Reads the settings that people already have: DeepSpeed's JSON and Paddle's gradient_merge_configs.

Every key either has its meaning of DeepSpeed or Paddle here too, or is refused by name. If a key is missing, ringlet's
own default counts, not DeepSpeed's. Sizes are in elements, as in DeepSpeed. Source: DeepSpeed runtime/config.py and
runtime/zero/config.py, Paddle's DistributedStrategy.gradient_merge_configs.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringlet.errors import InvalidUsage
from ringlet.training.zero import Offload

from .keys import AUTO, KEYS, NO_AUTO, ONLY, OTHERS_DO, PRINT_EVERY, SECTIONS


@dataclass(frozen=True)
class Settings:
    """The settings of a file. None: the file does not say. Sizes are in elements, as in DeepSpeed.

    `train_batch_size` = `micro_batch_size` x `accumulate` x world, samples a step of all ranks.
    """

    source: str
    stage: int | None = None
    bf16: bool | None = None
    accumulate: int = 1
    average: bool = True
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    clip_norm: float | None = None
    reduce_bucket_elements: int | None = None
    gather_bucket_elements: int | None = None
    sub_group_elements: int | None = None
    persistence_elements: int | None = None
    overlap: bool | None = None
    offload_optimizer: Offload | None = None
    offload_parameters: Offload | None = None
    print_every: int = 0
    print_times: bool = False

    def zero(self) -> dict[str, Any]:
        """Arguments for `ringlet.Zero(module, optimizer_class, **settings.zero(), **optimizer_defaults)`.

        Raises InvalidUsage if the file asks for stage 0.
        """
        if self.stage == 0:
            raise InvalidUsage(
                f"{self.source}: zero_optimization.stage is 0, which shards nothing: use GradientReducer with "
                "settings.reducer(module) and settings.accumulation()"
            )
        arguments: dict[str, Any] = {
            "stage": self.stage,
            "dtype": torch.bfloat16 if self.bf16 else None,
            "max_norm": self.clip_norm,
            "bucket_elements": self.reduce_bucket_elements,
            "gather_elements": self.gather_bucket_elements,
        }
        same = [
            "sub_group_elements", "persistence_elements", "overlap", "offload_optimizer", "offload_parameters",
            "accumulate", "average", "print_every", "print_times",
        ]  # fmt: skip
        arguments |= {name: getattr(self, name) for name in same}
        return {name: value for name, value in arguments.items() if value is not None}

    def reducer(self, module: torch.nn.Module) -> dict[str, Any]:
        """Arguments for `ringlet.GradientReducer(module, **settings.reducer(module))`, whose buckets are in MiB.

        Raises InvalidUsage, which names the settings, if a GradientReducer does not support some of them.
        """
        asks = {
            f"zero_optimization.stage={self.stage}": self.stage,
            "bf16.enabled": self.bf16,
            "gradient_clipping": self.clip_norm,
            "zero_optimization.sub_group_size": self.sub_group_elements,
            "zero_optimization.allgather_bucket_size": self.gather_bucket_elements,
            "zero_optimization.stage3_param_persistence_threshold": self.persistence_elements,
            "zero_optimization.overlap_comm=false": self.overlap is False,
            "zero_optimization.offload_optimizer": self.offload_optimizer,
            "zero_optimization.offload_param": self.offload_parameters,
            "steps_per_print": self.print_every,
        }
        refused = [name for name, value in asks.items() if value]
        if refused:
            raise InvalidUsage(
                f"{self.source}: GradientReducer does not support {', '.join(refused)}: use Zero, or leave them out"
            )
        if self.reduce_bucket_elements is None:
            return {}
        item_bytes = max(p.element_size() for p in module.parameters())
        return {"bucket_mb": self.reduce_bucket_elements * item_bytes / (1 << 20)}

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

    world: the world size for the batch sizes; by default that of torch.distributed, else of the environment.
    values: values for keys that are "auto", by key with dots: {"gradient_clipping": 1.0}. "auto" without a value means
    ringlet's default for sizes and switches; ringlet works batch sizes out.

    Raises InvalidUsage, which names key and file, for unknown keys, for keys that ringlet does not support, for values
    of the wrong kind and for batch sizes that disagree. Raises ResourceError if it cannot read the file.
    """
    source, raw = _read(config)
    found = _settle_auto(_parse(raw, source), dict(values or {}), source)
    train, micro, accumulate = _batch_sizes(found, world, source)
    taken = {field: found[key] for key, (_, field) in KEYS.items() if field is not None and key in found}
    taken.setdefault("stage", 0)
    taken.setdefault("print_every", PRINT_EVERY if taken.get("print_times") else 0)
    taken["clip_norm"] = taken.get("clip_norm") or None  # 0 is DeepSpeed's word for none
    return Settings(
        source,
        accumulate=accumulate,
        train_batch_size=train,
        micro_batch_size=micro,
        offload_optimizer=_offload(found, "zero_optimization.offload_optimizer", source),
        offload_parameters=_offload(found, "zero_optimization.offload_param", source),
        **taken,
    )


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
    return Settings(source, accumulate=k if gradient_merge else 1, average=average if gradient_merge else True)


def _read(config: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(config, Mapping):
        return "DeepSpeed settings", config
    path = os.fspath(config)

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise InvalidUsage(f"{path}: {', '.join(twice)} appears twice")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8") as file:
            raw = json.load(file, object_pairs_hook=once)
    except OSError as error:
        raise InvalidUsage(f"cannot read DeepSpeed settings from {path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise InvalidUsage(f"{path}:{error.lineno}: not JSON: {error.msg}") from error
    if not isinstance(raw, dict):
        raise InvalidUsage(f"{path}: contains a {type(raw).__name__}, not a JSON object")
    return path, raw


def _parse(raw: Mapping[str, Any], source: str, section: str = "") -> dict[str, Any]:
    """Checked values by key with dots. Leaves out keys that change nothing here, and keeps "auto"."""
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
            found.update(_parse(value, source, key + "."))
        elif key in KEYS:
            found[key] = value if value == AUTO else _checked(key, value, source)
        elif key in ONLY:
            if value != ONLY[key] and value != AUTO:
                raise InvalidUsage(f"{source}: {key} must be {json.dumps(ONLY[key])} with ringlet, got {value!r}")
        elif key in OTHERS_DO:
            raise InvalidUsage(f"{source}: ringlet does not support {key}: {OTHERS_DO[key]}")
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


def _settle_auto(found: dict[str, Any], values: dict[str, Any], source: str) -> dict[str, Any]:
    settled = {}
    for key, value in found.items():
        if value == AUTO:
            if key in values:
                settled[key] = _checked(key, values.pop(key), source)
            elif key in NO_AUTO:
                raise InvalidUsage(
                    f'{source}: {key} is "auto", and ringlet cannot work it out: pass values={{"{key}": ...}}'
                )
        else:
            settled[key] = value
    if values:
        raise InvalidUsage(f'{source}: values has {", ".join(values)}, but the file does not set them to "auto"')
    return settled


def _batch_sizes(found: dict[str, Any], world: int | None, source: str) -> tuple[int | None, int | None, int]:
    """Train batch, micro-batch and accumulation. Works a missing one out from the others and the world."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name in names:
        if found.get(name) == 0:
            raise InvalidUsage(f"{source}: {name} must be positive, got 0")
    given: list[int | None] = [found.get(name) for name in names]
    if given[0] is None and given[1] is None:
        return None, None, given[2] or 1
    ranks = _world(world, source)
    train, micro = given[0], given[1]
    steps = given[2] or (train // (micro * ranks) if train and micro else 1)
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
    if world is None and dist.is_initialized():
        world = dist.get_world_size()
    if world is None and os.environ.get("WORLD_SIZE", "").isdigit():
        world = int(os.environ["WORLD_SIZE"])
    if world is None or world < 1:
        raise InvalidUsage(
            f"{source}: batch sizes depend on the world size: call init_process_group() first, or pass world="
        )
    return world


def _offload(found: dict[str, Any], section: str, source: str) -> Offload | None:
    device = found.get(f"{section}.device")
    path, pinned = found.get(f"{section}.nvme_path"), found.get(f"{section}.pin_memory", False)
    if device in (None, "none"):
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
