"""Predicted seconds a step and bytes a rank against those that runs take and hold.

Plans of four recipes are run twice each, in turns, and predicted from a profile and a cluster that
were measured here. The error of time counts the cells that fit the cores and whose two runs agree
within 5 %; the rank correlation counts all, with more ranks than cores as emulated devices. Memory
is the peak PSS of the rank that holds most, with what accelerate's and DeepSpeed's estimators say
of the same cells beside it; those know nothing of activations and of the process.

Where other work shares the machine, cells may be measured in parts, each with its prediction:
`python -m bench.predicted RECIPE`, with PREDICTED_CELLS naming a file that keeps them, and is then
read here.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean

from bench import harness
from bench.harness import Row
from bench.predicted import (
    CELLS,
    KEPT,
    Cell,
    fits_cores,
    in_turns,
    model_bytes,
    num_parameters,
    read_cells,
)
from shoal.plans.plan import Plan

FLOOR_TIME, FLOOR_MEMORY, FLOOR_CORRELATION = 0.15, 0.10, 0.9
AGREES = 0.05
QUICK = ("data=1", "data=2", "data=1 pipeline=2")
PUBLISHED = "published on quiet clusters: Proteus 0.03, vTrain 0.08 to 0.15"


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's, of two lists without ties."""
    n = len(left)
    ranks = [sorted(range(n), key=side.__getitem__) for side in (left, right)]
    places = [[order.index(i) for i in range(n)] for order in ranks]
    squares = sum((a - b) ** 2 for a, b in zip(*places, strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def measure(quick: bool) -> Iterator[Row]:
    kept = os.environ.get(KEPT)
    if kept is None:
        plans = {r: [p for p in every if not quick or p in QUICK] for r, every in CELLS.items()}
        cells = [cell for recipe, own in plans.items() for cell in in_turns(recipe, own)]
    else:
        cells = read_cells(Path(kept))
    yield from rows(cells)


def rows(cells: Sequence[Cell]) -> Iterator[Row]:
    counted = [cell for cell in cells if fits_cores(cell.plan) and cell.apart <= AGREES]
    times = {cell.name: abs(cell.told_s / cell.step_s - 1) for cell in counted}
    note = f"{len(counted)} of {len(cells)} cells fit the cores and repeat within 5 %"
    yield _error("predict-time", times, FLOOR_TIME, peer=PUBLISHED, note=note)
    order = correlation([c.told_s for c in cells], [c.step_s for c in cells])
    yield Row(
        name="predict-time/order",
        value=order,
        low=order,
        high=order,
        num_pairs=len(cells),
        floor=FLOOR_CORRELATION,
        unit="",
        note="rank correlation over all cells",
    )
    held = {cell.name: abs(cell.told_bytes / cell.peak_bytes - 1) for cell in cells}
    peers = ", ".join(_peers(cells))
    yield _error("predict-memory", held, FLOOR_MEMORY, peer=peers, note="peak PSS of a rank")


def _error(name: str, errors: dict[str, float], floor: float, *, peer: str, note: str) -> Row:
    if not errors:
        return Row(name=name, floor=floor, at_most=True, note=note)
    seen = harness.spread([*errors.values()])
    worst = max(errors, key=lambda cell: errors[cell])
    return Row(
        name=name,
        value=mean(errors.values()),
        low=seen.low,
        high=seen.high,
        num_pairs=len(errors),
        floor=floor,
        at_most=True,
        unit="",
        peer=peer,
        note=f"mean error; {note}; the worst is {worst}",
    )


def _peers(cells: Sequence[Cell]) -> Iterator[str]:
    """The mean error of other estimators of memory, of the cells that they have a word for."""
    for name, estimate in (("accelerate", _by_accelerate), ("DeepSpeed", _by_deepspeed)):
        try:
            found = _errors_of(cells, estimate)
        except ImportError:
            yield f"{name} is not installed"
            continue
        yield f"{name} {mean(found):.2f} in {len(found)} cells"


def _errors_of(cells: Sequence[Cell], estimate: Callable[[Cell], float | None]) -> list[float]:
    said = [(estimate(cell), cell.peak_bytes) for cell in cells]
    return [abs(told / seen - 1) for told, seen in said if told is not None]


def _by_accelerate(cell: Cell) -> float | None:
    """Training with Adam in one process, or in each of many that hold all."""
    from accelerate.commands.estimate import estimate_training_usage

    plan = Plan.parse(cell.plan)
    if plan.cuts_model or plan.zero or plan.sync == "server":
        return None
    return float(max(estimate_training_usage(model_bytes(cell.recipe), "float32").values()))


def _by_deepspeed(cell: Cell) -> float | None:
    """ZeRO in mixed precision, the only one that it estimates."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    plan, count = Plan.parse(cell.plan), num_parameters(cell.recipe)
    if plan.zero == 2:
        found = stage_1_and_2.estimate_zero2_model_states_mem_needs(
            count, num_gpus_per_node=plan.num_replicas, cpu_offload=False
        )
    elif plan.zero == 3:
        found = stage3.estimate_zero3_model_states_mem_needs(
            count, 0, num_gpus_per_node=plan.num_replicas, cpu_offload=False
        )
    else:
        return None
    return float(found[1])


if __name__ == "__main__":
    harness.main(measure)
