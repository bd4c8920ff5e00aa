"""Bucket assignment: which gradient goes where, as pure data."""

import pytest

from ringlet.training.flat import ALIGNMENT_BYTES
from ringlet.training.reducer.buckets import Caps, Entry, assign, lay_out

KIB = 1024


def entries_of(*counts: int, dtype: str = "float32", item_bytes: int = 4, device: str = "cpu") -> list[Entry]:
    return [Entry(f"p{i}", count, item_bytes, dtype, device) for i, count in enumerate(counts)]


def members(buckets) -> list[list[int]]:
    return [[slot.index for slot in bucket.slots] for bucket in buckets]


@pytest.mark.parametrize(
    ("entries", "caps", "order", "expected"),
    [
        # in reverse order; 1 KiB each: the first bucket holds 2, the others 4, and the remainder is last
        (entries_of(*[256] * 9), Caps(4 * KIB, 2 * KIB), None, [[8, 7], [6, 5, 4, 3], [2, 1, 0]]),
        # one larger than a bucket is alone
        (entries_of(10, 5000, 1000, 10), Caps(4 * KIB, 4 * KIB), None, [[3, 2], [1], [0]]),
        (entries_of(10, 1015, 10), Caps(4 * KIB, 4 * KIB), None, [[2], [1], [0]]),
        # the first cap never exceeds the cap
        (entries_of(256, 256), Caps(KIB, 25 * KIB), None, [[1], [0]]),
        ([], Caps(), None, []),
        # the first cap is of each dtype and device
        (
            entries_of(256, 256, 256) + [Entry(f"h{i}", 512, 2, "bfloat16", "cpu") for i in range(3)],
            Caps(4 * KIB, KIB), None, [[5], [4, 3], [2], [1, 0]],
        ),
        # in the order in which gradients were seen to arrive
        (entries_of(*[256] * 5), Caps(2 * KIB, KIB), [2, 0, 4, 1, 3], [[2], [0, 4], [1, 3]]),
        (entries_of(*[256] * 5), Caps(2 * KIB, KIB), [4, 3, 2, 1, 0], [[4], [3, 2], [1, 0]]),
    ],
)  # fmt: skip
def test_what_shares_a_bucket(entries, caps, order, expected):
    assert members(assign(entries, caps, order) if order else assign(entries, caps)) == expected


def test_offsets_are_aligned_and_do_not_overlap():
    for item_bytes in (1, 2, 4, 8, 16):
        buckets = assign(entries_of(3, 1, 0, 17, 64, item_bytes=item_bytes), Caps())
        for bucket in buckets:
            end = 0
            for slot in bucket.slots:
                assert slot.offset >= end
                assert slot.offset * item_bytes % ALIGNMENT_BYTES == 0
                end = slot.offset + slot.count
            assert end <= bucket.count
            assert bucket.nbytes == bucket.count * item_bytes
        assert sorted(index for bucket in members(buckets) for index in bucket) == [0, 1, 2, 3, 4]
    (empty,) = assign(entries_of(0), Caps())
    assert empty.count > 0 and empty.slots[0].count == 0


def test_dtypes_and_devices_never_share_a_bucket():
    kinds = (("float32", 4, "cpu"), ("bfloat16", 2, "cpu"), ("float32", 4, "cuda:0"), ("float32", 4, "cpu"))
    buckets = assign([Entry("p", 4, item_bytes, dtype, device) for dtype, item_bytes, device in kinds], Caps())
    # launch order is the order of filling: cuda is complete before bfloat16, float32 is last
    assert [(bucket.dtype, bucket.device, [slot.index for slot in bucket.slots]) for bucket in buckets] == [
        ("float32", "cuda:0", [2]), ("bfloat16", "cpu", [1]), ("float32", "cpu", [3, 0]),
    ]  # fmt: skip


def test_groups_are_laid_out_in_the_order_in_which_they_fill():
    buckets = lay_out(entries_of(1, 2, 3, 4, 5), [[4, 1], [2, 0], [3]], [4, 2, 0, 1, 3])
    assert members(buckets) == [[2, 0], [4, 1], [3]]
    assert [[slot.count for slot in bucket.slots] for bucket in buckets] == [[3, 1], [5, 2], [4]]
