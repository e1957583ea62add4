"""Predicted peak memory of a rank against its peak PSS, over the cells of `predict-time`.

PSS counts what processes share by its share, so it depends on what else runs from the same files.
"""

from collections.abc import Iterator

from bench import harness
from bench.harness import Row
from bench.predicted import CELLS, predicted, run_cell

FLOOR = 0.10
QUICK = ("data=1", "data=2", "data=1 pipeline=2")
STEPS = 12  # the peak is there after the first ones


def measure(quick: bool) -> Iterator[Row]:
    errors: dict[str, float] = {}
    for recipe, plans in CELLS.items():
        for plan in plans:
            if not quick or plan in QUICK:
                seen = run_cell(recipe, plan, STEPS).peak_bytes
                told = predicted(recipe, plan).memory.peak
                errors[f"{recipe}: {plan}"] = abs(told / seen - 1)
    seen_errors = harness.spread(list(errors.values()))
    worst = max(errors, key=errors.__getitem__)
    yield Row(
        name="predict-memory",
        value=sum(errors.values()) / len(errors),
        low=seen_errors.low,
        high=seen_errors.high,
        num_pairs=len(errors),
        floor=FLOOR,
        at_most=True,
        unit="",
        note=f"mean error of the peak PSS of a rank; the worst is {worst}",
    )


if __name__ == "__main__":
    harness.main(measure)
