"""Where the time of a step went, and what stands in the way of more ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.launch.scale import ScaleRow, bottleneck, parse_ranks
from shoal.launch.step_times import PARTS, TimedStep, mean_times, read_steps, settled_steps


def step(number: int = 1, ranks: list[float] | None = None, **times: float) -> TimedStep:
    every = {"data": 0.0, "compute": 0.0, "exchange": 0.0, "waiting": 0.0} | times
    return TimedStep(number, 8, every, 100, ranks or [])


def test_ranks_that_are_done_earlier_wait_for_the_slowest() -> None:
    # Rank 0 is busy for 1 s, rank 1 for 3 s; the exchange takes 0.5 s.
    found = mean_times([step(data=0.2, compute=0.8, waiting=2.0, exchange=0.5, ranks=[1.0, 3.0])])
    assert found["waiting"] == pytest.approx(1.0)  # 2 s of one rank, none of the other
    assert found["exchange"] == pytest.approx(0.5)
    assert found["compute"] == pytest.approx(1.8) and found["data"] == pytest.approx(0.2)


@given(*[st.floats(0, 10)] * 4, st.lists(st.floats(0, 10), max_size=4))
def test_parts_are_not_negative_and_no_more_than_the_step(d, c, e, w, others) -> None:
    own = step(data=d, compute=c, exchange=e, waiting=w, ranks=[d + c, *others])
    found = mean_times([own])
    assert all(seconds >= 0 for seconds in found.values())
    if max(own.ranks) <= own.total_s:
        assert sum(found.values()) == pytest.approx(own.total_s, abs=1e-9)


def test_the_first_steps_do_not_count(tmp_path) -> None:
    assert [one.step for one in settled_steps([step(n) for n in range(1, 11)])] == [*range(3, 11)]
    assert len(settled_steps([step(1)])) == 1
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1, "samples": 2, "times": {}, "bytes_sent": 0}\n{"step": 2, "sam')
    assert [one.step for one in read_steps(record)] == [1] and not read_steps(record, after=1)


def row(ranks: int, step_s: float, **times: float) -> ScaleRow:
    return ScaleRow(
        ranks=ranks,
        plan="",
        samples_per_s=8 / step_s,
        step_s=step_s,
        speedup=1.0,
        efficiency=1.0,
        times=dict.fromkeys(PARTS, 0.0) | times,
        bytes_sent=0,
        memory_bytes=None,
        predicted=None,
    )


@pytest.mark.parametrize(
    ("last", "cores", "told"),
    [
        (row(4, 0.25, compute=0.25), 4, "nothing stands in the way"),
        (row(4, 1.0, compute=1.0), 2, "4 ranks share 2 cores"),
        (row(4, 0.5, compute=0.5), 4, "smaller pieces"),
        (row(4, 0.6, compute=0.25, exchange=0.35), 4, "exchange"),
        (row(4, 0.6, compute=0.25, waiting=0.35), 4, "the slowest"),
        (row(4, 0.6, compute=0.25, data=0.35), 4, "samples"),
    ],
)
def test_the_bottleneck_is_named(last: ScaleRow, cores: int, told: str) -> None:
    assert told in bottleneck([row(1, 1.0, compute=1.0), last], cores)


def test_lists_of_ranks() -> None:
    assert parse_ranks("4, 1,2") == [1, 2, 4]
    for text in ("", "0", "1,1", "-1", "a", "1,,2", ",".join(map(str, range(1, 99)))):
        with pytest.raises(UsageError):
            parse_ranks(text)
