"""Spans, and the file that they become."""

import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.events.events import TraceEvent, TraceSpan
from shoal.events.trace_file import TraceFile
from shoal.events.tracing import Tracer, check_steps, parse_steps


@pytest.mark.parametrize(
    ("text", "steps"), [("100:110", range(100, 111)), ("7", range(7, 8)), (" 1 : 2 ", range(1, 3))]
)
def test_steps_that_can_be_traced(text: str, steps: range) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "these are no steps"),
        ("a:b", "these are no steps"),
        ("5:", "these are no steps"),
        ("-3:4", "these are no steps"),
        ("1:2:3", "these are no steps"),
        ("0:5", "count from 1"),
        ("9:5", "the last is not before the first"),
    ],
)
def test_steps_that_cannot_be_read(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_steps(text)


def test_steps_beyond_the_last_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the run has 20 steps\. .* --trace 11:20"):
        check_steps("21:30", 20)
    assert check_steps("20:30", 20) == range(20, 31)


@given(st.text(max_size=12))
@example("\x1f7")  # white space to `strip`, and not to `int`
def test_any_text_is_steps_or_refused(text: str) -> None:
    with suppress(UsageError):
        assert parse_steps(text)[0] >= 1


def test_only_the_steps_asked_for_are_traced() -> None:
    tracer = Tracer()
    tracer.steps = range(2, 4)
    for step in range(1, 6):
        tracer.begin_step(step)
        with tracer.span(f"step {step}", "step"), tracer.span("inner", size=3):
            pass
    (event,) = tracer.take(1)
    assert [span.name for span in event.spans] == ["inner", "step 2", "inner", "step 3"]
    assert event.rank == 1 and event.spans[0].about == {"bytes": 3}
    assert tracer.take(1) == []


def test_another_clock_is_moved_to_that_of_rank_0() -> None:
    tracer = Tracer()
    tracer.offset_s = 100.0
    tracer.add("x", "work", 103.0, 103.5, {})
    (event,) = tracer.take(0)
    assert (event.spans[0].start_us, event.spans[0].duration_us) == (3e6, 0.5e6)


def test_the_file_is_whole_after_each_event_and_has_every_thread(tmp_path: Path) -> None:
    path = tmp_path / "trace" / "trace.json"
    trace = TraceFile(path)
    trace.close()
    assert not path.exists()
    for rank in (0, 1):
        spans = [TraceSpan("forward", "work", "training", 10.0, 5.0, {"piece": 1})]
        spans += [TraceSpan('a "name"\n<b>', "collective", "training", 11.0, 20.0)]
        spans += [TraceSpan("write", "save", "shoal-save", 12.0, 30.0)]
        trace(TraceEvent(rank=rank, spans=spans))
        json.loads(path.read_text() + "]")  # as readers take a file of a run that was killed
    trace.close()
    entries = json.loads(path.read_text())
    assert [e["args"]["name"] for e in entries if e["name"] == "process_name"] == [
        "rank 0",
        "rank 1",
    ]
    assert len({(e["pid"], e["tid"]) for e in entries if e["ph"] == "X"}) == 4
    assert [e["ts"] for e in entries if e["ph"] == "e"] == [31.0, 31.0]


def test_spans_of_other_threads_are_theirs() -> None:
    tracer = Tracer()
    tracer.steps = range(1, 2)
    tracer.begin_step(1)

    def work() -> None:
        with tracer.span("write"):
            pass

    thread = threading.Thread(target=work, name="shoal-save")
    thread.start()
    thread.join()
    (event,) = tracer.take(0)
    assert event.spans[0].thread == "shoal-save"
