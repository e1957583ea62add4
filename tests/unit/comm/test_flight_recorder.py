"""The flight recorder: what collectives were, where they began, and which have not ended."""

import sys
import threading

from shoal.comm.flight_recorder import MOST_RECORDS, FlightRecorder


def begin(recorder: FlightRecorder, op: str = "all-reduce", group: str = "w"):
    return recorder.begin(op, group, (0, 1), 84)


def test_a_collective_is_known_by_its_line_number_bucket_and_step() -> None:
    recorder = FlightRecorder()
    recorder.step, recorder.what = 7, "bucket 2 of 5"
    record, line = begin(recorder), sys._getframe().f_lineno
    again = begin(recorder, group="other")
    assert (record.number, again.number, begin(recorder).number) == (1, 1, 2)
    told = record.told(record.began + 3.0)
    assert (told.op, told.what, told.step) == ("all-reduce", "bucket 2 of 5, 84 bytes", 7)
    assert told.ranks == (0, 1) and told.seconds == 3.0
    # `begin` above is a function of this file, so it is what began it.
    assert told.at.startswith("begin (") and "test_flight_recorder.py:" in told.at
    number = int(told.at.rstrip(")").rpartition(":")[2])
    assert number == begin.__code__.co_firstlineno + 1 < line


def test_what_has_not_ended_is_told_once_nothing_happens() -> None:
    recorder = FlightRecorder()
    assert recorder.standing(0.0) is None  # it never communicated
    done, late = begin(recorder), begin(recorder, "broadcast")
    done.end()
    assert recorder.standing(60.0) is None
    stands = recorder.standing(0.0)
    assert stands is not None
    assert [at.op for at in stands.open] == ["broadcast"] and stands.reached == {"w": 2}
    late.end()
    stands = recorder.standing(0.0)
    assert stands is not None and stands.open == ()
    recorder.forget()
    assert recorder.standing(0.0) is None and begin(recorder).number == 1


def test_the_ring_is_bounded_and_read_while_it_grows() -> None:
    recorder, stop = FlightRecorder(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            recorder.standing(0.0)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20 * MOST_RECORDS):
        begin(recorder).end()
    stop.set()
    thread.join()
    assert len(recorder.records()) == MOST_RECORDS
    assert recorder.table(3).count("\n") == 2 and "NOT ENDED" not in recorder.table()
    begin(recorder)
    assert "NOT ENDED" in recorder.table(1)
