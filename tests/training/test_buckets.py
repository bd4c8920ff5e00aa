"""Bucket assignment: which gradient goes where, as pure data."""

from ringlet.training.flat import ALIGNMENT_BYTES
from ringlet.training.reducer.buckets import Caps, Entry, assign, lay_out

KIB = 1024


def entries_of(*counts: int, dtype: str = "float32", item_bytes: int = 4, device: str = "cpu") -> list[Entry]:
    return [Entry(f"p{i}", count, item_bytes, dtype, device) for i, count in enumerate(counts)]


def members(buckets) -> list[list[int]]:
    return [[slot.index for slot in bucket.slots] for bucket in buckets]


def test_reverse_order_and_caps():
    # 1 KiB each; the first bucket holds 2, the others 4, and the remainder is last
    buckets = assign(entries_of(*[256] * 9), Caps(4 * KIB, 2 * KIB))
    assert members(buckets) == [[8, 7], [6, 5, 4, 3], [2, 1, 0]]


def test_a_cap_is_kept_and_a_giant_is_alone():
    buckets = assign(entries_of(10, 5000, 1000, 10), Caps(4 * KIB, 4 * KIB))
    assert members(buckets) == [[3, 2], [1], [0]]
    assert members(assign(entries_of(10, 1015, 10), Caps(4 * KIB, 4 * KIB))) == [[2], [1], [0]]


def test_first_cap_never_exceeds_the_cap():
    assert members(assign(entries_of(256, 256), Caps(KIB, 25 * KIB))) == [[1], [0]]


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


def test_empty_gradients_still_make_a_buffer():
    (bucket,) = assign(entries_of(0), Caps())
    assert bucket.count > 0
    assert bucket.slots[0].count == 0


def test_no_entries_no_buckets():
    assert assign([], Caps()) == []


def test_dtypes_and_devices_never_share_a_bucket():
    entries = [
        Entry("a", 4, 4, "float32", "cpu"),
        Entry("b", 4, 2, "bfloat16", "cpu"),
        Entry("c", 4, 4, "float32", "cuda:0"),
        Entry("d", 4, 4, "float32", "cpu"),
    ]
    buckets = assign(entries, Caps())
    # launch order is the order of filling: cuda (c) is complete before bfloat16 (b), float32 (a) is last
    assert members(buckets) == [[2], [1], [3, 0]]
    assert [(bucket.dtype, bucket.device) for bucket in buckets] == [
        ("float32", "cuda:0"),
        ("bfloat16", "cpu"),
        ("float32", "cpu"),
    ]


def test_first_cap_is_per_dtype_and_device():
    entries = entries_of(256, 256, 256) + [Entry(f"h{i}", 512, 2, "bfloat16", "cpu") for i in range(3)]
    buckets = assign(entries, Caps(4 * KIB, KIB))
    assert members(buckets) == [[5], [4, 3], [2], [1, 0]]


def test_rebuild_from_an_observed_order():
    entries = entries_of(*[256] * 5)
    caps = Caps(2 * KIB, KIB)
    observed = [2, 0, 4, 1, 3]
    assert members(assign(entries, caps, observed)) == [[2], [0, 4], [1, 3]]
    assert assign(entries, caps, [4, 3, 2, 1, 0]) == assign(entries, caps)


def test_groups_are_laid_out_in_the_order_in_which_they_fill():
    order = [4, 2, 0, 1, 3]
    buckets = lay_out(entries_of(1, 2, 3, 4, 5), [[4, 1], [2, 0], [3]], order)
    assert members(buckets) == [[2, 0], [4, 1], [3]]
    assert [[slot.count for slot in bucket.slots] for bucket in buckets] == [[3, 1], [5, 2], [4]]
