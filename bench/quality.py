"""What the benches of smaller models share: recipes that are trained, and rows of quality.

Quality is that of held-out samples, by the recipe's own evaluation. A figure is a ratio that is 1
if nothing was lost, and above if something was gained; sizes and latencies stand beside it, and no
floor is a time. Training is `shoal.train` in one rank, so that seeds give the same weights again.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import shoal
from bench import harness
from bench.harness import Row
from shoal.slim.figures import Figures, ModelTable

RECIPES = harness.ROOT / "recipes"
DIGITS, CHARLM = f"{RECIPES / 'digits.py'}:small", f"{RECIPES / 'charlm.py'}:small"
SEEDS = (1, 2, 3)
# A quarter of the shipped size, which a core trains in a minute.
GPT = {"layers": 2, "width": 64, "heads": 4, "length": 64}


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shoal-quality-") as made:
        yield Path(made)


def trained(recipe: str, settings: Mapping[str, Any], run_dir: Path) -> Path:
    """Train a recipe, and return its run directory."""
    shoal.train(recipe, "data=1", settings=settings, run_dir=run_dir, progress=False)
    return run_dir


def steps(quick: bool, many: int) -> dict[str, int]:
    return {"steps": 20 if quick else many}


def quality_row(
    name: str, floor: float, metric: str, tables: Sequence[ModelTable], *, note: str = ""
) -> Row:
    """How much of a metric is left after a verb: of an accuracy after / before, of a loss before /
    after."""
    kept = harness.spread([_ratio(metric, one.before, one.after) for one in tables])
    last = tables[-1]
    size = f"size {last.before.bytes / 1e3:.0f} -> {last.after.bytes / 1e3:.0f} kB"
    latency = f"latency {last.before.latency_ms:.3g} -> {last.after.latency_ms:.3g} ms"
    after = f"after {last.after.metrics[metric]:.4f}"
    return Row(
        name=name,
        value=kept.median,
        low=kept.low,
        high=kept.high,
        num_pairs=kept.num_pairs,
        floor=floor,
        peer=f"before: {metric} {last.before.metrics[metric]:.4f}",
        ceiling="as before",
        note=", ".join(filter(None, (after, size, latency, note))),
    )


def _ratio(metric: str, before: Figures, after: Figures) -> float:
    ones = before.metrics[metric], after.metrics[metric]
    return ones[0] / ones[1] if metric == "loss" else ones[1] / ones[0]
