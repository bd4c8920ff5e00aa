"""benchmarks/thresholds.py chooses a size of the engine only where it is clearly faster."""

import pytest
from benchmarks import thresholds

from ringlet import _C
from ringlet.bench.jobs import BenchError

USUAL = _C.tuned("", "")


def test_built_in_sizes_without_a_limit_can_be_written():
    text = "".join(thresholds.table_line(name, value, "A-1") for name, value in thresholds.writable(USUAL).items())
    most = max(max(one.ways) for one in thresholds.SIZES if one.ways)
    assert _C.tuned(text, "A-1") == {name: min(value, most) for name, value in USUAL.items()}


def calibrated(fast: dict[str, dict[int, float]], unsteady: bool = False) -> dict[str, int]:
    """What is chosen where some values are as many times as fast as the others, by name and value, in 8 rounds."""
    times = {}
    for point in thresholds.points(USUAL):
        speeds = [fast.get(point.name, {}).get(value, 1.0) for value in point.values]
        drift = [1.0, 2.0] * 4  # of the machine
        noise = [0.5, 3.0] * 4 if unsteady else [1.0] * 8
        times[point] = [[d * (n if s != 1 else 1) / s for s in speeds] for d, n in zip(drift, noise, strict=True)]
    return {name: value for name, value in thresholds.choose(times, USUAL).items() if value != USUAL[name]}


def test_a_size_is_chosen_where_it_is_clearly_faster():
    assert calibrated({}) == {}
    assert calibrated({"staged_segment_bytes": {512 << 10: 1.2, 1 << 20: 1.1}}) == {"staged_segment_bytes": 512 << 10}
    assert calibrated({"staged_segment_bytes": {512 << 10: 1.04}}) == {}
    assert calibrated({"staged_segment_bytes": {512 << 10: 1.2}}, unsteady=True) == {}


def test_a_threshold_moves_while_the_other_way_is_faster():
    known = {one.name: one for one in thresholds.SIZES}
    small, stream = known["small_bytes_of_two"], known["streaming_bytes"]
    (below, above) = small.ways
    assert calibrated({small.name: {above: 1.2}}) == {small.name: min(small.sizes) // 2}
    assert calibrated({small.name: {below: 1.2}}) == {small.name: max(small.sizes)}
    (below, above) = stream.ways
    assert calibrated({stream.name: {above: 1.2}}) == {stream.name: min(stream.sizes)}
    assert calibrated({stream.name: {below: 1.2}}) == {stream.name: 2 * max(stream.sizes)}


def test_a_size_that_is_slower_anywhere_is_not_chosen():
    assert thresholds.better([[1.2] * 4, [1.0] * 4]) and not thresholds.better([[1.2] * 4, [0.98] * 4])
    assert thresholds.better([[1.2] * 4, [0.98, 0.98, 1.1, 1.1]])  # noise
    assert not thresholds.better([[1.01] * 4])


def test_the_second_pass_measures_where_two_values_differ_and_decides():
    chosen = {"small_bytes_of_two": 128 << 10, "streaming_bytes": 16 << 20, "staged_segment_bytes": 512 << 10}
    again = thresholds.differing(chosen, USUAL)
    sizes = {(point.name, point.bytes >> 10) for point in again}
    assert {size for name, size in sizes if name == "small_bytes_of_two"} == {256, 512}
    assert {size for name, size in sizes if name == "streaming_bytes"} == {8 << 10}  # 16 MiB is streamed with both
    assert {size for name, size in sizes if name == "staged_segment_bytes"} == {2 << 10, 4 << 10, 16 << 10}
    gain = {"small_bytes_of_two": 1.5, "streaming_bytes": 0.9, "staged_segment_bytes": 1.02}
    times = {point: [[gain[point.name], 1.0]] * 8 for point in again}
    (found,) = thresholds.confirmed(times, chosen, USUAL)
    assert (found.name, found.value) == ("small_bytes_of_two", 128 << 10)
    assert found.gains == {
        f"{memory}/{size << 10}": 1.5 for memory in ("registered", "ordinary") for size in (256, 512)
    }


def test_a_real_calibration_gives_values_that_a_table_takes(monkeypatch):
    monkeypatch.setattr(thresholds, "LEAST_SHARE", 0.0)  # whatever else runs
    found, seconds = thresholds.calibrate(USUAL)
    text = "".join(thresholds.table_line(one.name, one.value, "A-1") for one in found)
    assert _C.tuned(text, "A-1") == USUAL | {one.name: one.value for one in found} and seconds > 0
    monkeypatch.setattr(thresholds, "LEAST_SHARE", 1.1)  # as on a machine that is busy
    with pytest.raises(BenchError, match="calibrate while nothing else runs"):
        thresholds.calibrate(USUAL)
