"""Meters: the split of a step's seconds, the sums over steps, and memory and its limits."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.events import meters
from shoal.events.events import SpentEvent
from shoal.events.meters import (
    SpentReports,
    StepTotals,
    Stopwatch,
    memory_left_bytes,
    peak_memory_bytes,
    split_times,
)
from shoal.events.step import StepInfo, Times

seconds = st.floats(0, 100)


def step(number, samples, times, bytes_sent=0):
    return StepInfo(number, 1.0, samples, 0.1, None, times, bytes_sent)


def test_laps_add_up():
    watch = Stopwatch()
    watch.start()
    laps = [watch.lap() for _ in range(10)]
    assert all(lap >= 0 for lap in laps)


def test_the_slowest_rank_never_waits_and_the_others_wait_for_it():
    assert split_times(1, 2, 1.5, [3, 4], own=0) == Times(1, 2, 0.5, 1.0)
    assert split_times(1, 3, 0.5, [3, 4], own=1) == Times(1, 3, 0.5, 0.0)
    assert split_times(1, 2, 0.5, [3, 4], own=0) == Times(1, 2, 0.0, 0.5)


@settings(deadline=None)
@given(seconds, st.lists(seconds, min_size=1, max_size=5), st.data())
def test_split_times_keeps_the_total(exchange, busy, data):
    own = data.draw(st.integers(0, len(busy) - 1))
    times = split_times(1.0, 2.0, exchange, busy, own)
    assert times.exchange >= 0 and times.waiting >= 0
    assert times.total == pytest.approx(3.0 + exchange)


def test_totals():
    totals = StepTotals(window=2)
    assert totals.samples_per_s == 0 and totals.last is None
    totals.add(step(1, 10, Times(1, 1, 1, 1), bytes_sent=5))
    totals.add(step(2, 10, Times(0, 1, 0, 0), bytes_sent=5))
    totals.add(step(3, 10, Times(0, 0.5, 0.5, 0)))
    assert (totals.num_steps, totals.num_samples, totals.bytes_sent) == (3, 30, 10)
    assert totals.times == Times(1, 2.5, 1.5, 1)
    assert totals.samples_per_s == 10 and totals.mean_samples_per_s == 5
    assert totals.share_in_communication == 0.25
    assert totals.last is not None and totals.last.step == 3
    with pytest.raises(ValueError, match="at least 1"):
        StepTotals(window=0)


def test_peak_memory_only_grows():
    before = peak_memory_bytes()
    block = bytearray(64 * 2**20)
    assert peak_memory_bytes() >= before > 2**20
    del block


def test_what_is_left_to_a_container_is_not_its_limit(tmp_path: Path) -> None:
    """The least of all groups around a process counts, and pages of files can be dropped."""
    assert memory_left_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    for name, most in (("job/step", "max"), ("job", "1000")):
        group = tmp_path / "sys/fs/cgroup" / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("700\n")
        (group / "memory.stat").write_text("anon 500\ninactive_file 100\n")
    assert memory_left_bytes(tmp_path) == 400
    old = tmp_path / "sys/fs/cgroup/memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("900\n")
    (old / "memory.usage_in_bytes").write_text("800\n")
    (old / "memory.stat").write_text("total_inactive_file 50\n")
    assert memory_left_bytes(tmp_path) == 150
    (old / "memory.usage_in_bytes").write_text("1000\n")
    assert memory_left_bytes(tmp_path) == 0


def test_a_member_tells_what_it_spent_and_less_often_as_it_gets_older(monkeypatch) -> None:
    now, told = [100.0], list[SpentEvent]()
    monkeypatch.setattr(meters, "monotonic", lambda: now[0])
    reports = SpentReports(told.append)
    for number in range(1, 200_001):
        now[0] += 0.01
        reports.add(step(number, 1, Times(0.001, 0.002, 0.003, 0.004)))
        if number == 300:
            assert 6 <= len(told) < 20  # twice a second, and more often at first
    reports.flush()
    assert 300 < len(told) < 600
    assert sum(one.steps for one in told) == 200_000
    assert sum(one.since_s for one in told) == pytest.approx(2000)
    assert sum(one.exchange for one in told) == pytest.approx(600)


def test_a_server_tells_how_long_its_processor_was_busy(monkeypatch) -> None:
    now, busy, told = [5.0], [2.0], list[SpentEvent]()
    monkeypatch.setattr(meters, "monotonic", lambda: now[0])
    monkeypatch.setattr(meters, "process_time", lambda: busy[0])
    reports = SpentReports(told.append)
    for _ in range(11):
        reports.serve()
        now[0], busy[0] = now[0] + 0.1, busy[0] + 0.025
    assert told and not any(one.steps for one in told)
    assert sum(one.waiting for one in told) == pytest.approx(3 * sum(one.compute for one in told))
