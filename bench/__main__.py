"""`python -m bench [names] [--quick]`: run the benches, each in a process of its own.

Prints a line for each row as it comes, writes `bench/results.json` (the machine and all rows) and
draws `bench/results.svg`, and exits with 1 after the last bench if any floor was missed. Give the
machine to it: what runs beside it is measured too.
"""

import argparse
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from bench import harness
from bench.harness import Row

BENCHES = (
    *("overhead", "collectives", "dp", "host-memory", "zero-memory", "zero-speed"),
    *("pipeline", "tensor"),
    *("recovery", "host-loss", "hosts", "startup"),
    *("checkpoint-stall", "checkpoint-load", "checkpoint-verify"),
    *("load", "resume", "straggler", "shared", "diloco", "slow-link", "guard", "codecs", "server"),
    *("async-straggler", "sparse", "tune", "distill", "prune", "quantize", "fuse", "submit"),
    *("predict", "regret", "simulate", "ui", "ui-recording"),
)
RESULTS = harness.ROOT / "bench" / "results.json"
PLOT = harness.ROOT / "bench" / "results.svg"


def run_bench(name: str, quick: bool) -> list[Row]:
    """The rows of one bench, tried twice if it crashes; then it is a row that was not measured."""
    rows, code = _run_once(name, quick)
    if code < 0 or not rows:
        print(f"{name} ended with code {code}, and is run once more.", file=sys.stderr, flush=True)
        rows, code = _run_once(name, quick)
    if code < 0 or not rows:
        broken = Row(name=name, floor=0.0, note=f"the bench ended with code {code}")
        print(harness.line(broken), flush=True)
        rows.append(broken)
    return rows


def _run_once(name: str, quick: bool) -> tuple[list[Row], int]:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        module = f"bench.{name.replace('-', '_')}"
        command = [sys.executable, "-m", module, "--rows", str(rows)]
        bench = subprocess.Popen(
            command + ["--quick"] * quick, cwd=harness.ROOT, env=harness.child_environment()
        )
        try:
            code = bench.wait()
        finally:
            bench.terminate()  # it ends what it started
            bench.wait()
        found = rows.read_bytes() if rows.exists() else b"[]"
    return msgspec.json.decode(found, type=list[Row]), code


def margin(row: Row) -> float:
    """How many times better than its floor; 1 is the floor itself."""
    assert row.value is not None
    if row.at_most:
        return row.floor / max(row.value, row.floor / 100)
    return row.value / row.floor


def draw(rows: Sequence[Row], path: Path) -> None:
    """A bar for each row that was measured: how far it is from its floor."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    measured = [row for row in rows if row.value is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.45 * len(measured)))
    colors = ["#2a7f62" if harness.verdict(row) == "reached" else "#c0392b" for row in measured]
    bars = axes.barh([row.name for row in measured], [margin(r) - 1 for r in measured], left=1)
    for bar, row, color in zip(bars, measured, colors, strict=True):
        bar.set_color(color)
        axes.annotate(
            f" {harness.figure(row.value or 0.0, row.unit)}",
            (max(1.0, margin(row)), bar.get_y() + bar.get_height() / 2),
            va="center",
        )
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("times better than the floor (1 = the floor)")
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, rougher figures")
    given = parser.parse_args()
    unknown = set(given.names) - set(BENCHES)
    if unknown:
        parser.error(f"there is no bench {', '.join(sorted(unknown))}; known: {', '.join(BENCHES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    facts = harness.machine()
    print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    started = time.monotonic()
    rows: list[Row] = []
    for name in given.names or BENCHES:
        rows += run_bench(name, given.quick)
    results = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": given.quick,
        "seconds": round(time.monotonic() - started, 1),
        "machine": facts,
        "rows": [
            msgspec.structs.asdict(row)
            | {"verdict": harness.verdict(row), "noisy": harness.is_noisy(row)}
            for row in rows
        ],
    }
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")
    print(f"rows: {RESULTS.relative_to(harness.ROOT)}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed (it comes with the extra `plot`)")
    else:
        draw(rows, PLOT)
        print(f"plot: {PLOT.relative_to(harness.ROOT)}")
    missed = [row.name for row in rows if harness.verdict(row) != "reached"]
    if missed:
        print(f"below the floor or not measured: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
