"""What recording costs a rank in each step, in microseconds of its processor.

A microbench of all that is on while a run is watched: the totals, the record of the step in
metrics.jsonl (encoded and written by a thread), the flight recorder around eight collectives, and
the spans of such a step, which are not traced. Processor time of the whole process is counted, so
that what the thread takes is in it. The rank that writes pays all of it; the others do not write.

A second row has a CSV tracker beside the record. Nothing here communicates.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import process_time

from bench import harness
from bench.harness import Row
from shoal.comm.flight_recorder import RECORDER
from shoal.events.meters import StepTotals
from shoal.events.metrics_writer import MetricsWriter
from shoal.events.step import StepInfo, Times
from shoal.events.tracing import TRACER
from shoal.events.trackers import TrackedRun, make_sinks, parse_trackers

FLOOR_US = 20.0
STEPS, QUICK_STEPS = 2000, 500  # in a round: fewer than a queue holds
COLLECTIVES, SPANS = 8, 17  # of a step
RANKS = tuple(range(8))


def round_of(folder: Path, num_steps: int, track: str | None) -> float:
    """Microseconds a step."""
    trackers = make_sinks(parse_trackers(track), TrackedRun(folder))
    writer = MetricsWriter(folder / "metrics.jsonl", lambda: True, trackers)
    totals, times = StepTotals(), Times(0.001, 0.01, 0.002, 0.001)
    began = process_time()
    for step in range(1, num_steps + 1):
        RECORDER.step = step
        TRACER.begin_step(step)
        for _ in range(COLLECTIVES):
            RECORDER.begin("all-reduce", "world", RANKS, 4 << 20, "bucket 1 of 8").end()
        for _ in range(SPANS):
            with TRACER.span("forward"):
                pass
        info = StepInfo(step, 0.5, 32, 1e-3, 1.0, times, 1000, 77, ranks=(0.011,) * 8)
        totals.add(info)
        writer(info)
    writer.close()
    return (process_time() - began) / num_steps * 1e6


def measure(quick: bool) -> Iterator[Row]:
    rounds, num_steps = (3, QUICK_STEPS) if quick else (15, STEPS)
    for name, track in (("ui-recording", None), ("ui-recording-csv", "csv")):
        found = []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                found.append(round_of(Path(folder), num_steps, track))
        seen = harness.spread(found)
        yield Row(
            name=name,
            value=seen.median,
            low=seen.low,
            high=seen.high,
            num_pairs=seen.num_pairs,
            unit="us",
            floor=FLOOR_US if track is None else 2 * FLOOR_US,
            at_most=True,
            peer="nothing recorded",
            note=f"{COLLECTIVES} collectives, {SPANS} spans, one record"
            + (f"; and --track {track}" if track else ""),
        )


if __name__ == "__main__":
    harness.main(measure)
