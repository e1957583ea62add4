"""Tests that every sink of records of steps must pass, a tracker among them.

    class TestMine(SinkConformance):
        @pytest.fixture
        def tracked(self, tmp_path):
            return Tracked(open=lambda: MySink(...), read=lambda: {...})

A new sink gives that one fixture and inherits the tests. They are about what a run needs of it: the
numbers of each step under their names, whatever else a record holds; no error for what it cannot
draw; nothing left running; and to go on where a sink before it was, since the rank that writes may
die, and a run may be resumed.
"""

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest

from shoal.events.sinks import BackgroundSink, Record, Sink

Values = dict[int, dict[str, float]]  # step -> name -> value


class Tracked(NamedTuple):
    """The sink under test, and where its numbers can be read afterwards."""

    open: Callable[[], Sink]  # again, as another process would
    read: Callable[[], Values]
    keeps_all: bool = True  # or the newest step alone
    end: Callable[[], object] = lambda: None  # after the last close, before `read`
    while_open: bool = False  # whether it can be read while it is open alone


def step_of(number: int, **more: object) -> Record:
    times = {"data": 0.25, "compute": number + 0.5}
    return {"step": number, "loss": 1.0 / number, "samples": 8, "times": times, **more}


class SinkConformance:
    """Inherit, and give `tracked`."""

    @pytest.fixture
    def tracked(self) -> Tracked:
        raise NotImplementedError("say how the sink is opened and read")

    def written(self, tracked: Tracked, *batches: list[Record]) -> Values:
        """What can be read after each batch was written by a sink of its own."""
        found: Values = {}
        for records in batches:
            sink = tracked.open()
            try:
                sink.write(*records)
                if tracked.while_open:
                    found = tracked.read()
            finally:
                sink.close()
        tracked.end()
        return found if tracked.while_open else tracked.read()

    def test_numbers_come_back_by_step_and_name(self, tracked: Tracked) -> None:
        found = self.written(tracked, [step_of(1), step_of(2), step_of(3)])
        assert sorted(found) == ([1, 2, 3] if tracked.keeps_all else [3])
        for step, values in found.items():
            assert values["loss"] == pytest.approx(1.0 / step)
            assert values["samples"] == 8 and values["times/data"] == 0.25
            assert values["times/compute"] == pytest.approx(step + 0.5)

    def test_what_is_no_number_is_left_out(self, tracked: Tracked) -> None:
        odd = {"note": "text", "none": None, "ranks": [0.1, 0.2], "flag": True, "mark": 77}
        found = self.written(tracked, [step_of(1, **odd)])
        assert not {*odd} & {*found[1]}
        assert found[1]["loss"] == 1.0

    def test_values_that_are_not_finite_do_not_break_it(self, tracked: Tracked) -> None:
        bad = step_of(1, loss=math.nan, norm=math.inf)
        found = self.written(tracked, [bad, step_of(2)])
        assert found[2]["loss"] == 0.5

    def test_any_name_is_taken(self, tracked: Tracked) -> None:
        names = {'a "b", c': 1.0, "ü/ö": 2.0, "x" * 300: 3.0, "<b>": 4.0, "line\nbreak": 5.0}
        found = self.written(tracked, [step_of(1, logged=names), step_of(2, logged=names)])
        assert found[2]["loss"] == 0.5

    def test_names_may_come_later(self, tracked: Tracked) -> None:
        evaluated = step_of(2, evaluation={"accuracy": 0.75})
        found = self.written(tracked, [step_of(1), evaluated], [step_of(3, norm=2.0)])
        assert found[3]["norm"] == 2.0
        if tracked.keeps_all:
            assert found[2]["evaluation/accuracy"] == 0.75
            assert found[1]["loss"] == 1.0 and "evaluation/accuracy" not in found[1]

    def test_another_one_goes_on(self, tracked: Tracked) -> None:
        found = self.written(tracked, [step_of(1), step_of(2)], [step_of(3)], [step_of(4)])
        assert sorted(found) == ([1, 2, 3, 4] if tracked.keeps_all else [4])

    def test_steps_that_a_resumed_run_repeats(self, tracked: Tracked) -> None:
        again = [step_of(2, loss=7.0), step_of(3, loss=8.0)]
        found = self.written(tracked, [step_of(1), step_of(2), step_of(3)], again)
        assert found[3]["loss"] == 8.0

    def test_closing_without_a_record_leaves_nothing(self, tracked: Tracked) -> None:
        before = threading.active_count()
        tracked.open().close()
        assert threading.active_count() <= before

    def test_it_works_in_a_thread_behind_a_queue(self, tracked: Tracked) -> None:
        background = BackgroundSink(tracked.open, "tested")
        for number in range(1, 101):
            background.put(step_of(number))
        assert background.flush(60.0)
        found = tracked.read() if tracked.while_open else {}
        background.close(60.0)
        tracked.end()
        found = found or tracked.read()
        assert sorted(found) == ([*range(1, 101)] if tracked.keeps_all else [100])
        assert background.num_dropped == 0
