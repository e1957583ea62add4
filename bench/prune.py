"""`prune`: what is left of the digits recipe's accuracy at a sparsity of 50, 80 and 90 %.

Three ways: `magnitude` at once, `movement` while the recipe trains half as long once more, and
`structured`, which removes channels, at once and with that training. Size and latency before and
after stand beside each figure; zeros change neither by themselves.
"""

from collections.abc import Iterator
from pathlib import Path

import shoal
from bench import harness, quality
from bench.harness import Row

# How, with training or not, and for each sparsity the share of accuracy that must be left.
ARMS = {
    "magnitude": (("magnitude", False), {0.5: 0.95, 0.8: 0.7, 0.9: 0.1}),
    "movement": (("movement", True), {0.5: 0.97, 0.8: 0.95, 0.9: 0.9}),
    "structured": (("structured", False), {0.5: 0.1}),
    "structured-trained": (("structured", True), {0.5: 0.95}),
}


def measure(quick: bool) -> Iterator[Row]:
    with quality.folder() as place:
        begun = quality.trained(quality.DIGITS, quality.steps(quick, 210), place / "run")
        for name, (how, floors) in ARMS.items():
            for sparsity, floor in floors.items():
                yield _row(name, how, sparsity, floor, begun, quick)


def _row(
    name: str, how: tuple[str, bool], sparsity: float, floor: float, begun: Path, quick: bool
) -> Row:
    percent = f"{100 * sparsity:.0f}"
    place = begun.with_name(f"{name}-{percent}")
    training = shoal.slim.Training("data=1", begun.with_name(f"{place.name}-run"), progress=False)
    table = shoal.slim.prune(
        quality.DIGITS,
        begun,
        out=place,
        sparsity=sparsity,
        how=how[0],
        settings=quality.steps(quick, 105),
        training=training if how[1] else None,
    )
    note = f"sparsity {table.sparsity:.3f}"
    return quality.quality_row(f"prune/{name}/{percent}", floor, "accuracy", [table], note=note)


if __name__ == "__main__":
    harness.main(measure)
