"""How every bench measures, judges and reports.

A ratio is believed only if both sides were measured in one run, in turns, so that whatever else
the machine does hits both. So each round measures every arm once, in an order that changes from
round to round; a figure is the median over the rounds of one arm against another in the same round.
One arm is the peer a second time: how far it is from itself is the noise, and no figure is better.

Not for profiling: it says how much, never why. Cost: the rounds, times the arms.
"""

import argparse
import gc
import math
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]
MOST_NOISE = 0.05


class ArmFailed(RuntimeError):
    """A process of an arm crashed or did not come: perhaps by chance, so it is tried once more."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one bench. `value` is None if it was not measured; `note` then says why."""

    name: str
    value: float | None = None  # the median over the pairs
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    unit: str = "x"
    floor: float
    at_most: bool = False  # the value must stay below the floor, not above it
    noise: float = 0.0  # what the floor forgives, in the value's unit
    peer: str = ""
    ceiling: str = ""
    control: float | None = None  # the peer against itself, a ratio
    note: str = ""


class Spread(msgspec.Struct, frozen=True):
    """The median of paired figures, with the smallest and the largest."""

    median: float
    low: float
    high: float
    num_pairs: int


def spread(figures: Sequence[float]) -> Spread:
    return Spread(statistics.median(figures), min(figures), max(figures), len(figures))


def ratios(top: Sequence[float], bottom: Sequence[float]) -> list[float]:
    """What each round says of one arm against another."""
    return [a / b for a, b in zip(top, bottom, strict=True)]


def differences(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(left, right, strict=True)]


def noise_of(control: Sequence[float]) -> float:
    """How far from 1 the median of ratios strays by chance, told by the control's.

    The distance of its own median, and two standard errors of it, estimated from the median
    absolute deviation because single rounds can be far out. No more than `MOST_NOISE`: a busy
    machine excuses nothing.
    """
    median = statistics.median(control)
    deviation = statistics.median(abs(ratio - median) for ratio in control)
    error = 1.2533 * 1.4826 * deviation / math.sqrt(len(control))
    return min(MOST_NOISE, abs(median - 1) + 2 * error)


def verdict(row: Row) -> str:
    """`reached`, `missed`, or `not measured`, which is not reached either."""
    if row.value is None:
        return "not measured"
    if row.at_most:
        return "reached" if row.value <= row.floor + row.noise else "missed"
    return "reached" if row.value >= row.floor - row.noise else "missed"


def is_noisy(row: Row) -> bool:
    return row.control is not None and abs(row.control - 1) > MOST_NOISE


def line(row: Row) -> str:
    """The row as one line: name, ratio, peer and ceiling, then the verdict."""
    bound = f"floor: at {'most' if row.at_most else 'least'} {figure(row.floor, row.unit)}"
    if row.noise:
        bound += f", give or take {figure(row.noise, row.unit, signed=False)}"
    if row.value is None:
        return f"{row.name}  - ({row.note})  {verdict(row).upper()} ({bound})"
    assert row.low is not None and row.high is not None
    within = f"[{figure(row.low, row.unit)} .. {figure(row.high, row.unit)}]"
    text = f"{row.name}  {figure(row.value, row.unit)} {within}"
    text += f" (peer {row.peer}, ceiling {row.ceiling})"
    text += f"  {verdict(row).upper() if verdict(row) == 'missed' else verdict(row)} ({bound})"
    if row.note:
        text += f"  {row.note}"
    if is_noisy(row):
        assert row.control is not None
        text += (
            f"\n    noisy: the peer differs from itself by {100 * abs(row.control - 1):.0f} %, "
            f"more than {100 * MOST_NOISE:.0f} %. Let the machine come to rest and run it again."
        )
    return text


def figure(value: float, unit: str, signed: bool = True) -> str:
    if unit == "x":
        return f"{value:.1f}x" if value >= 10 else f"{value:.3f}x"
    sign = "+" if signed and unit in ("us", "ms") else ""  # differences, which may be below 0
    return f"{value:{sign}.1f} {unit}"


def interleave(
    arms: Mapping[str, Callable[[], float]], num_rounds: int, num_warm_up: int = 1
) -> dict[str, list[float]]:
    """Measure every arm once a round; each returns its own figure. Warm-up rounds are not kept.

    The order is turned by one each round and every other round goes backwards, so no arm always
    follows the same one. It depends on the round alone: ranks that measure together stay together.
    """
    figures: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for number in range(num_warm_up + num_rounds):
        turn = number // 2 % len(names)
        order = names[turn:] + names[:turn]
        for name in order if number % 2 == 0 else reversed(order):
            figure = _tried_twice(name, arms[name])
            if number >= num_warm_up:
                figures[name].append(figure)
    return figures


def _tried_twice(name: str, arm: Callable[[], float]) -> float:
    try:
        return arm()
    except ArmFailed as failed:
        print(f"{name} failed, and is tried once more: {failed}", file=sys.stderr, flush=True)
        return arm()


@contextmanager
def quiet() -> Iterator[None]:
    """Without garbage collections, which would hit whichever arm is running."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def pin(rank: int) -> int:
    """Keep this process on one core, as long as there is one for each rank; returns the core."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank % len(cores)]
    os.sched_setaffinity(0, {core})
    return core


def child_environment() -> dict[str, str]:
    """For processes a bench starts: one thread a rank, and this checkout's packages."""
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",  # this and the next as in a run of `shoal`
        "GOMP_SPINCOUNT": "10000",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONWARNINGS": "ignore",
    }


def machine() -> dict[str, str | int | float]:
    """What a reader must know to compare figures."""
    model = [
        text.partition(":")[2].strip()
        for text in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if text.startswith("model name")
    ]
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_before": os.getloadavg()[0],
    }


Measure = Callable[[bool], Iterator[Row]]


def main(measure: Measure) -> None:
    """Run one bench by itself: print a line for each row, and keep the rows where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher figures")
    parser.add_argument("--rows", type=Path, help="also write the rows to this JSON file")
    given = parser.parse_args()
    # Ended from outside, leave through the blocks that end what was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    rows = []
    for row in _until_it_fails(measure(given.quick), Path(sys.argv[0]).stem):
        rows.append(row)
        print(line(row), flush=True)
        if given.rows is not None:  # each time: what comes next may crash this process
            given.rows.write_bytes(msgspec.json.encode(rows))
    sys.exit(0 if all(verdict(row) == "reached" for row in rows) else 1)


def _until_it_fails(rows: Iterator[Row], name: str) -> Iterator[Row]:
    """The rows of a bench; where an arm failed twice, one that says so in place of the rest."""
    try:
        yield from rows
    except ArmFailed as failed:
        why = str(failed).splitlines()[0]
        yield Row(name=f"{name.replace('_', '-')}, the rest", floor=0.0, note=why)
