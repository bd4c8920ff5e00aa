"""Settings of DeepSpeed and Paddle: every key has its effect on training, or is refused by name."""

import contextlib
import io
import json
import math

import pytest
import torch

import ringlet
from ranks import on
from refusals import refused
from ringlet.settings import from_deepspeed, from_paddle
from zero_checks import batch, loss_of, make, parameters_of, train_zero


def stage_of(stage, **more):
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40, **more}}


def zero_from(config, dtype=torch.float32, cls=torch.optim.AdamW, **defaults):
    settings = from_deepspeed(config)
    return ringlet.Zero(make(dtype), cls, **settings.zero(), **{"lr": 1e-2, **defaults})


# --- each key has its effect


@on("two")
def test_overlap_comm(rank, world):
    peaks = {}
    for overlap in (True, False):
        zero = zero_from(stage_of(3, overlap_comm=overlap, reduce_bucket_size=2500))
        train_zero(zero, rank, 2)
        peaks[overlap] = zero.stats()["buffers"]["gather_peak_units"]
    assert peaks[False] < peaks[True]  # nothing is gathered ahead


@on("two")
def test_bucket_sizes(rank, world):
    counts = {}
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        for size in (2500, 800, 5e8):
            zero = zero_from(stage_of(2, **{key: size}))
            units = zero.stats()["units"]
            largest = max(p.numel() for p in zero.module.parameters())
            padded = 16 * world * (1 + len(list(zero.module.parameters())))
            assert all(count <= max(size, largest) + padded for count, _ in units)
            before = zero.stats()["communication"]["collectives"]
            train_zero(zero, rank, 1)
            assert zero.stats()["communication"]["collectives"] - before == 2 * len(units)
            counts[key, size] = len(units)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        assert counts[key, 800] > counts[key, 2500] > 1
        assert counts[key, 2500] >= counts[key, 5e8]


@on("two")
def test_gradient_clipping(rank, world):
    moved = {}
    for clip in (0.01, 0.0):
        zero = zero_from({"gradient_clipping": clip, **stage_of(2)}, torch.float64, torch.optim.SGD, lr=1.0)
        before = parameters_of(zero)
        train_zero(zero, rank, 1)
        after = parameters_of(zero)
        moved[clip] = math.sqrt(sum(float((after[n] - v).square().sum()) for n, v in before.items()))
    assert moved[0.01] == pytest.approx(0.01, rel=1e-3) and moved[0.0] > 0.02


@on("two")
def test_printing(rank, world):
    texts = []
    for config in ({"steps_per_print": 2}, {"steps_per_print": 1, "wall_clock_breakdown": True}, {}):
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            train_zero(zero_from({**config, **stage_of(1)}), rank, 4)
        texts.append(text.getvalue().splitlines())
    if rank == 0:
        assert [len(lines) for lines in texts] == [2, 4, 0]
        assert "forward" not in texts[0][0] and "forward" in texts[1][0] and "backward" in texts[1][0]


def test_keys_are_arguments_of_zero(tmp_path):
    """Random trainings take settings so, too."""
    file = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {
        "bf16": {"enabled": True},
        "gradient_accumulation_steps": 3,
        **stage_of(3, overlap_comm=False, contiguous_gradients=True, sub_group_size=1e6),
    }
    config["zero_optimization"] |= {"offload_optimizer": file, "offload_param": {"device": "cpu"}}
    expected = {
        "stage": 3, "dtype": torch.bfloat16, "accumulate": 3, "average": True, "overlap": False,
        "sub_group_elements": 1_000_000, "persistence_elements": 40,
        "offload_optimizer": ringlet.Offload("file", str(tmp_path)), "offload_parameters": ringlet.Offload("cpu"),
    }  # fmt: skip
    assert from_deepspeed(config).zero() == expected
    plain = from_deepspeed({"bf16": {"enabled": False}, **stage_of(1, offload_optimizer={"device": "none"})}).zero()
    assert {"dtype", "offload_optimizer"}.isdisjoint(plain)


# --- batch sizes


def batches(**sizes):
    names = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "steps": "gradient_accumulation_steps",
    }
    return {names[name]: value for name, value in sizes.items()}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (batches(train=64, micro=4, steps=4), (64, 4, 4)),
        (batches(train=64, micro=4), (64, 4, 4)),
        (batches(train=64, steps=4), (64, 4, 4)),
        (batches(micro=4, steps=4), (64, 4, 4)),
        (batches(train=64), (64, 16, 1)),
        (batches(micro=4), (16, 4, 1)),
        (batches(steps=4), (None, None, 4)),
        (batches(train="auto", micro=4, steps=4), (64, 4, 4)),
        (batches(train=64, micro="auto", steps="auto"), (64, 16, 1)),
        ({}, (None, None, 1)),
    ],
)
def test_batch_sizes_are_worked_out(given, expected):
    settings = from_deepspeed({**given, **stage_of(2)}, world=4)
    assert (settings.train_batch_size, settings.micro_batch_size, settings.accumulate) == expected
    assert settings.zero()["accumulate"] == settings.accumulation()["k"] == expected[2]


@pytest.mark.parametrize(
    "given",
    [
        batches(train=64, micro=4, steps=3),
        batches(train=63, micro=4),
        batches(train=6),
        batches(train=64, steps=5),
        batches(train=4, micro=4),
    ],
)
def test_batch_sizes_that_disagree_are_all_named(given):
    with pytest.raises(ringlet.InvalidUsage) as error:
        from_deepspeed(given, world=4)
    for name in batches(train=0, micro=0, steps=0):
        assert f"{name}={given.get(name, 'not given')}" in str(error.value)
    assert "disagree on 4 ranks" in str(error.value) and "world=4" in str(error.value)


def world_of_group(rank, world):
    return from_deepspeed(batches(train=8, micro=2)).accumulate


@pytest.mark.parametrize("join", ["dist:gloo", "shared_memory", "threads"])
def test_the_world_is_the_groups(pool, join):
    assert pool.values(world_of_group, 2, join=join) == [2, 2]


@pytest.mark.parametrize("prefix, size", [("", "WORLD_SIZE"), ("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_SIZE")])
def test_else_the_world_is_the_launchers(monkeypatch, prefix, size):
    monkeypatch.setenv(f"{prefix}RANK", "1")
    monkeypatch.setenv(size, "4")
    assert from_deepspeed(batches(train=8, micro=2)).accumulate == 1
    monkeypatch.setenv(size, "four")
    refused(rf'batch sizes depend on the world size: pass world=.*{size}="four"', world_of_group, 0, 1)
    monkeypatch.delenv(size)
    monkeypatch.delenv(f"{prefix}RANK")
    refused("batch sizes depend on the world size: pass world=", world_of_group, 0, 1)
    refused("world must be at least 1, got 0", from_deepspeed, batches(train=8, micro=2), world=0)
    refused("world is '2'; pass a whole number", from_deepspeed, batches(train=8, micro=2), world="2")


# --- what is refused, and "auto"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"zero_optimisation": {}}, r"unknown key zero_optimisation; did you mean zero_optimization\?"),
        ({"zebra": 1}, "unknown key zebra; known are .*train_batch_size"),
        ({"bf16": {"enable": True}}, r"unknown key bf16\.enable; did you mean enabled\?"),
        (stage_of(2, contiguous_gradients=False), "contiguous_gradients must be true with ringlet, got False"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled must be false with ringlet"),
        ({"optimizer": {"type": "Adam"}}, "does not support optimizer: pass the optimizer's class"),
        ({"scheduler": {}}, "does not support scheduler"),
        (stage_of(3, stage3_max_live_parameters=1), "does not support zero_optimization.stage3_max_live_parameters"),
        (stage_of(3, offload_param={"device": "cpu", "buffer_count": 5}), "offload_param.buffer_count"),
        (stage_of(3, offload_param={"device": "disk"}), "offload_param.device must be none, cpu or nvme, got 'disk'"),
        (stage_of(3, offload_param={"device": "nvme"}), "offload_param: Offload: pass path="),
        (
            stage_of(3, offload_optimizer={"nvme_path": "/tmp"}),
            "offload_optimizer sets nvme_path or pin_memory but no device",
        ),
        (stage_of("two"), "stage must be a whole number from 0 on, got 'two'"),
        (stage_of(2, reduce_bucket_size=-5), "reduce_bucket_size must be a whole number"),
        (stage_of(2, overlap_comm=1), "overlap_comm must be true or false, got 1"),
        ({"gradient_clipping": True}, "gradient_clipping must be a number"),
        ({"gradient_clipping": -1.0}, "gradient_clipping must be a number from 0 on"),
        ({"train_batch_size": 0}, "train_batch_size must be positive, got 0"),
        ({"zero_optimization": True}, "zero_optimization must be a JSON object"),
        (
            stage_of("auto"),
            r'stage is "auto", and ringlet cannot work it out: pass values=\{"zero_optimization\.stage": ',
        ),
        ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto", and ringlet cannot work it out'),
    ],
)
def test_refused_by_name(config, reason):
    refused(reason, from_deepspeed, config, world=2)


def test_auto():
    config = {
        **stage_of("auto", overlap_comm="auto", contiguous_gradients="auto"),
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "steps_per_print": "auto",
        "wall_clock_breakdown": "auto",
    }
    for key in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size"):
        config["zero_optimization"][key] = "auto"
    values = {"zero_optimization.stage": 3, "gradient_clipping": 1.0, "zero_optimization.sub_group_size": 100}
    arguments = from_deepspeed(config, values=values).zero()
    assert arguments["stage"] == 3 and arguments["max_norm"] == 1.0 and arguments["sub_group_elements"] == 100
    assert {"dtype", "bucket_elements", "gather_elements", "overlap"}.isdisjoint(arguments)
    refused(
        r'values has train_batch_size, but the file does not set them to "auto"',
        from_deepspeed,
        {"train_batch_size": 4},
        world=2,
        values={"train_batch_size": 8},
    )
    with pytest.raises(ringlet.InvalidUsage, match="gradient_clipping must be a number"):
        from_deepspeed({"gradient_clipping": "auto"}, values={"gradient_clipping": "much"})


# --- files, the reducer, Paddle


def test_a_file(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, **stage_of(3)}))
    assert from_deepspeed(path, world=2).stage == from_deepspeed(str(path), world=2).stage == 3
    for text, reason in (
        ('{"train_batch_size": 8, "train_batch_size": 4}', r"ds_config\.json: train_batch_size appears twice"),
        ('{\n"a": }', r"ds_config\.json:2: not JSON"),
        ("[]", "contains a list"),
    ):
        path.write_text(text)
        refused(reason, from_deepspeed, path)
    path.write_bytes(b"\xff{}")
    refused(r"ds_config\.json: not UTF-8 text: invalid start byte at byte 0", from_deepspeed, path)
    refused(r"cannot read DeepSpeed settings from .*missing\.json", from_deepspeed, tmp_path / "missing.json")


@on("two")
def test_the_reducers_buckets_are_elements_too(rank, world):
    model = make(torch.float32)
    settings = from_deepspeed({"zero_optimization": {"stage": 0, "reduce_bucket_size": 1000}})
    reducer = ringlet.GradientReducer(model, **settings.reducer(model))
    loss_of(model, *batch(0, rank)).backward()
    sizes = reducer.stats()["bucket_bytes"]
    assert len(sizes) > 3
    assert all(size <= 4 * 1000 + 64 * 30 for size in sizes)


def test_stage_0_is_the_reducers_and_says_what_it_cannot():
    settings = from_deepspeed({"bf16": {"enabled": True}, "gradient_clipping": 1.0})
    refused(r"stage is 0, which shards nothing: use GradientReducer", settings.zero)
    refused(r"does not support bf16\.enabled, gradient_clipping: use Zero", settings.reducer, make())
    refused(r"does not support zero_optimization\.stage=2", lambda: from_deepspeed(stage_of(2)).reducer(make()))


def test_paddles_configs():
    assert from_paddle({}).accumulation() == {"k": 1, "average": True}
    assert from_paddle({"k_steps": 4, "avg": False}).accumulation() == {"k": 4, "average": False}
    assert from_paddle(gradient_merge_configs={"k_steps": 4}, gradient_merge=False).accumulation()["k"] == 1
    for config, reason in (
        ({"k_step": 4}, r"unknown key 'k_step'; did you mean k_steps\?"),
        ({"k_steps": 0}, "k_steps must be a whole number from 1 on, got 0"),
        ({"k_steps": True}, "k_steps must be a whole number"),
        ({"avg": 1}, "avg must be True or False, got 1"),
    ):
        refused(reason, from_paddle, config)
