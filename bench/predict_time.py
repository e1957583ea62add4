"""Predicted seconds a step against those that runs take: mean error, and the order of plans.

Plans of four recipes are run twice each, in turns, and predicted from a profile and a cluster that
were measured here. The error counts the cells that fit the cores and whose two runs agree within
5 %; the rank correlation counts all, with more ranks than cores as emulated devices.
"""

from collections.abc import Iterator, Sequence

from bench import harness
from bench.harness import Row
from bench.predicted import CELLS, fits_cores, predicted, run_cell

FLOOR_ERROR, FLOOR_CORRELATION = 0.15, 0.9
AGREES = 0.05
QUICK = ("data=1", "data=2", "data=1 pipeline=2")


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's, of two lists without ties."""
    n = len(left)
    ranks = [sorted(range(n), key=side.__getitem__) for side in (left, right)]
    places = [[order.index(i) for i in range(n)] for order in ranks]
    squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def measure(quick: bool) -> Iterator[Row]:
    names = [
        (recipe, plan)
        for recipe, plans in CELLS.items()
        for plan in plans
        if not quick or plan in QUICK
    ]
    arms = {f"{r}: {p}": (lambda r=r, p=p: run_cell(r, p).step_s) for r, p in names}
    found = harness.interleave(arms, 2, num_warm_up=0)
    told = {f"{r}: {p}": predicted(r, p).step_s for r, p in names}
    best = {name: min(laps) for name, laps in found.items()}
    apart = {name: max(laps) / min(laps) - 1 for name, laps in found.items()}
    counted = [f"{r}: {p}" for r, p in names if fits_cores(p) and apart[f"{r}: {p}"] <= AGREES]
    errors = {name: abs(told[name] / best[name] - 1) for name in counted}
    note = f"{len(counted)} of {len(names)} cells fit the cores and repeat within 5 %"
    if errors:
        seen = harness.spread(list(errors.values()))
        worst = max(errors, key=errors.__getitem__)
        yield Row(
            name="predict-time",
            value=sum(errors.values()) / len(errors),
            low=seen.low,
            high=seen.high,
            num_pairs=seen.num_pairs,
            floor=FLOOR_ERROR,
            at_most=True,
            unit="",
            peer="published on quiet clusters: Proteus 0.03, vTrain 0.08 to 0.15",
            note=f"{note}; the worst is {worst}",
        )
    else:
        yield Row(name="predict-time", floor=FLOOR_ERROR, at_most=True, note=note)
    yield Row(
        name="predict-time/order",
        value=correlation([told[n] for n in best], list(best.values())),
        num_pairs=len(best),
        floor=FLOOR_CORRELATION,
        unit="",
        note="rank correlation over all cells",
    )


if __name__ == "__main__":
    harness.main(measure)
