"""`fuse`: models of the digits recipe made one, against the best single one of them.

The models begin with the weights of one short run and see the data in orders of their own; so
`soup` (the mean of all), `greedy` and `task` may average them. `ensemble` asks all of them, and
takes as many times as long. Quality is the accuracy of held-out samples; `greedy`, `task` and
`ensemble` choose by the loss of the same samples, which flatters them a little.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import shoal
from bench import harness, quality
from bench.harness import Row

# The share of the best single model's accuracy that must be left.
ARMS = {"soup": 0.99, "greedy": 0.99, "task": 0.99, "ensemble": 0.99}


def measure(quick: bool) -> Iterator[Row]:
    with quality.folder() as place:
        base = quality.trained(quality.DIGITS, quality.steps(quick, 70), place / "base")
        models = [_tuned(base, seed, quick) for seed in quality.SEEDS]
        for how, floor in ARMS.items():
            yield _row(how, floor, base, models)


def _tuned(base: Path, seed: int, quick: bool) -> Path:
    """A model that goes on from the base, with an order of the data of its own."""
    run_dir = base.with_name(f"seed-{seed}")
    settings = {**quality.steps(quick, 140), "seed": seed}
    more = {"settings": settings, "run_dir": run_dir, "begin_from": str(base)}
    shoal.train(quality.DIGITS, "data=1", progress=False, **more)
    return run_dir


def _row(how: str, floor: float, base: Path, models: Sequence[Path]) -> Row:
    table = shoal.slim.fuse(
        quality.DIGITS,
        models,
        how=how,
        out=base.with_name(how),
        base=base if how == "task" else None,
    )
    weights = " ".join(f"{weight:.2f}" for weight in table.weights)
    note = f"of {len(models)} models, weights {weights}"
    return quality.quality_row(f"fuse/{how}", floor, "accuracy", [table], note=note)


if __name__ == "__main__":
    harness.main(measure)
