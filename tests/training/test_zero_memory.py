"""What ZeRO holds, sends and offloads: counted, and compared with the paper's formulas."""

import torch
import torch.distributed as dist

import ringlet
from ranks import on
from zero_checks import STAGES, make, parameters_of, train_zero, zero_of

WIDE = {"width": 96, "layers": 4}
LIMITS = {"bucket_elements": 80_000, "persistence_elements": 100}
CHAIN = {"bucket_elements": 80_000, "persistence_elements": 600}  # the root's own parameter is small


@on(4, "dist:ringlet", "dist:gloo")
def test_two_units_are_whole_at_most(rank, world):
    """A thread of gloo's may hold the buffer of a gather that has ended for a moment more; another is made then."""
    model = make(torch.float32, tied=False, **WIDE)
    zero = ringlet.Zero(model, torch.optim.Adam, 3, lr=1e-3, **CHAIN)
    train_zero(zero, rank, 3)
    stats = zero.stats()
    largest = max(count for count, _ in stats["units"]) * 4
    buffers = 3 if dist.get_backend() == "gloo" else 2
    assert stats["buffers"]["gather_peak_units"] == 2
    assert largest < stats["buffers"]["gather_peak_bytes"] <= buffers * largest, (
        largest,
        stats["buffers"],
    )
    # one that fills, one that is reduced, and that of the small parameters
    assert stats["buffers"]["gradient_peak_bytes"] <= 3 * largest
    assert 2 * largest < 0.6 * sum(p.numel() * 4 for p in model.parameters())


def moved_bytes(zero, device="cpu") -> int:
    """As the transport counted, where the backend tells (what a rank receives, which is as much as it sends); else as
    the Zero did."""
    backend = dist.group.WORLD._get_backend(torch.device(device))
    counted = getattr(backend, "bytes_received", None)
    return counted if counted is not None else zero.stats()["communication"]["sent_bytes"]


@on(4, "dist:ringlet", "dist:gloo")
def test_stages_1_and_2_send_what_all_reduce_does_and_stage_3_half_more(rank, world):
    sent = {}
    for stage in STAGES:
        model = make(torch.float32, tied=False, **WIDE)
        zero = ringlet.Zero(model, torch.optim.Adam, stage, lr=1e-3, **CHAIN)
        train_zero(zero, rank, 1)
        before = moved_bytes(zero)
        for step in range(1, 3):
            train_zero(zero, rank, 1, first=step)
        sent[stage] = (moved_bytes(zero) - before) / 2
        whole = sum(count for count, _ in zero.stats()["units"]) * 4
        used_last = next(count for count, names in zero.stats()["units"] if "head.weight" in names) * 4
        small = sum(count for count, names in zero.stats()["units"] if "head.weight" not in names and count < 3000) * 4
    all_reduce = 2 * whole * (world - 1) / world
    assert sent[1] == sent[2] and abs(sent[1] / all_reduce - 1) < 0.01
    # stage 3 gathers twice: not the unit with which backward begins, nor the small ones, which are gathered once
    expected = 1.5 * all_reduce - (used_last + small) * (world - 1) / world
    assert abs(sent[3] / expected - 1) < 0.01
    assert 1.4 < sent[3] / sent[1] <= 1.5


@on("two")
def test_flat_buffers_are_registered_memory(rank, world):
    for stage in STAGES:
        zero = zero_of(make(torch.float32), stage=stage, lr=1e-3)
        train_zero(zero, rank, 1)
        for flat in zero._flats:
            assert ringlet.is_registered(flat.whole if flat.whole is not None else flat.shard)
        for unit in zero._units:
            assert ringlet.is_registered(unit.shard)


def offloaded(rank, world, folder):
    model = make(torch.float32)
    for dtype in (None, torch.bfloat16):
        for stage in STAGES:
            settings = {"dtype": dtype, "lr": 1e-2, "sub_group_elements": 500}
            here = zero_of(model, torch.optim.Adam, stage, **settings)
            file = ringlet.Offload("file", folder)
            there = zero_of(
                model,
                torch.optim.Adam,
                stage,
                offload_optimizer=file,
                offload_parameters=file if stage == 3 else None,
                **settings,
            )
            assert train_zero(here, rank, 3) == train_zero(there, rank, 3)
            expected = parameters_of(here)
            assert all(torch.equal(expected[name], value) for name, value in parameters_of(there).items())
            memory, plain = there.stats()["memory"], here.stats()["memory"]
            scalars = 4 * len(there._sharded.pieces)  # a step count each
            assert memory["optimizer"] == scalars and memory["master"] == 0
            assert memory["gradients"] == plain["gradients"]
            assert memory["file"] >= plain["optimizer"] - scalars + plain["master"]
            if stage == 3:
                assert memory["parameters"] < plain["parameters"]


def test_offload_to_files_changes_no_bit_and_leaves_nothing(two, tmp_path):
    two(offloaded, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@on("two")
def test_offload_to_the_host(rank, world):
    model = make(torch.float32)
    here = zero_of(model, stage=3, lr=1e-2)
    there = zero_of(model, stage=3, lr=1e-2, offload_optimizer="cpu", offload_parameters="cpu")
    assert train_zero(here, rank, 2) == train_zero(there, rank, 2)
    assert here.stats()["memory"] == there.stats()["memory"]  # a model on the CPU has it all there


@on(1, "nothing")
def test_mapped_files_take_no_anonymous_memory(rank, world, folder):
    import pathlib

    def resident_kib() -> int:
        text = pathlib.Path("/proc/self/status").read_text()
        return int(text.split("RssAnon:")[1].split()[0])

    from ringlet.training.zero.memory import MappedFiles

    files = MappedFiles(folder)
    before = resident_kib()
    tensor = files.zeros(16 << 20, torch.float32).fill_(3)
    assert resident_kib() - before < 8 << 10  # 64 MiB of a file are no memory of the process's own
    files.release_pages([tensor])
    assert tensor[::4096].eq(3).all()
