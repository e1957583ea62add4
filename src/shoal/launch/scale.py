"""How a recipe scales: the same training on several numbers of ranks, really run and taken apart.

Each number of ranks is a short run of its own, without evaluation. Seconds are those that ranks
recorded for each step; the first steps, in which caches and allocators fill, do not count. Of the
figures of a step the median is taken, since one that was disturbed is far out.

The batch stays as it is, so this is strong scaling. Not for a proof of speed on a machine that does
other work: that is measured too. Read next: `cost/predict.py`, for what stands beside it.
"""

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.cost.cluster import Cluster
from shoal.cost.prediction import Prediction
from shoal.cost.profile_index import profile_recipe
from shoal.cost.this_machine import this_cluster
from shoal.errors import ShoalError, UsageError
from shoal.events.events import OnEvent
from shoal.formatting import in_seconds, plural
from shoal.launch.inspect import inspect_recipe
from shoal.launch.outcome import how_it_ended
from shoal.launch.step_times import PARTS, mean_times, median_step_s, read_steps, settled_steps
from shoal.launch.train import Options, train
from shoal.training.options import Recipe

if TYPE_CHECKING:
    from shoal.launch.outcome import Outcome
    from shoal.training.run import Run

MOST_COUNTS = 32
SMALL_LOSS = 0.05  # of a step: less is no bottleneck


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One number of ranks. `times` are the seconds of a step on the mean over all ranks."""

    ranks: int
    plan: str
    samples_per_s: float
    step_s: float
    speedup: float  # over the fewest ranks
    efficiency: float  # of the speed-up that as many more ranks could give
    times: dict[str, float]
    bytes_sent: int  # in a step, by rank 0
    memory_bytes: int | None
    predicted: Prediction | None


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    rows: list[ScaleRow]
    bottleneck: str
    notes: list[str]


class _Foreseen(msgspec.Struct, frozen=True):
    """What is known of the runs before the first begins."""

    plans: list[str]
    predictions: list[Prediction | None]
    notes: list[str]


def parse_ranks(text: str) -> list[int]:
    """Numbers of ranks, as in `1,2,4`; in ascending order."""
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdecimal() for word in words):
        raise UsageError(f"--ranks {text} is no list of numbers. Write them as in --ranks 1,2,4.")
    counts = [int(word) for word in words]
    if min(counts) < 1:
        raise UsageError(f"--ranks {text}: no run has {min(counts)} ranks. Start at 1.")
    repeated = next((count for count in counts if counts.count(count) > 1), None)
    if repeated is not None:
        raise UsageError(f"--ranks {text}: {repeated} is given twice. Give each number once.")
    if len(counts) > MOST_COUNTS:
        raise UsageError(f"--ranks has {len(counts)} numbers, and may have {MOST_COUNTS}.")
    return sorted(counts)


def measure_scaling(
    recipe: Recipe,
    plan: str | None,
    counts: Sequence[int],
    num_steps: int,
    *,
    cores: int,
    watch: Callable[[int], OnEvent] = lambda ranks: lambda event: None,
) -> Scaling:
    """Train `num_steps` steps on each number of ranks; `watch(ranks)` gets a run's events.

    All of them are checked before the first begins. Raises UsageError if a run does not finish.
    """
    short = replace(recipe, change=partial(_shortened, num_steps, recipe.change))
    look = partial(_foresee, recipe, plan, list(counts), this_cluster())
    foreseen = inspect_recipe(short, look, _Foreseen, plan)
    measured = [
        _measure(short, text, count, watch(count))
        for text, count in zip(foreseen.plans, counts, strict=True)
    ]
    rows = [
        _row(measured[0], run, prediction)
        for run, prediction in zip(measured, foreseen.predictions, strict=True)
    ]
    return Scaling(rows=rows, bottleneck=bottleneck(rows, cores), notes=foreseen.notes)


def _shortened(num_steps: int, change: "Callable[[Run], Run] | None", run: "Run") -> "Run":
    run = run if change is None else change(run)
    return replace(
        run, steps=num_steps, epochs=None, evaluate=None, evaluate_every=None, save_every=None
    )


def _foresee(
    recipe: Recipe, plan: str | None, counts: Sequence[int], cluster: Cluster, run: "Run"
) -> _Foreseen:
    from shoal.cost.planning import predict_each
    from shoal.training.run import resolve

    plans = [resolve(run, plan, count) for count in counts]
    texts = [str(resolved) for resolved in plans]
    try:
        profile = profile_recipe(recipe, run)
    except ShoalError as error:
        return _Foreseen(texts, [None] * len(texts), [f"Nothing is predicted: {error}"])
    predictions, notes = predict_each(profile, plans, cluster)
    return _Foreseen(texts, predictions, notes)


class _Measured(msgspec.Struct, frozen=True):
    ranks: int
    plan: str
    step_s: float
    samples_per_s: float
    times: dict[str, float]
    bytes_sent: int
    memory_bytes: int | None


def _measure(recipe: Recipe, plan: str, ranks: int, watch: OnEvent) -> _Measured:
    with tempfile.TemporaryDirectory(prefix="shoal-scale-") as name:
        run_dir = Path(name) / "run"
        outcome = train(recipe, Options(plan=plan, spares=0), run_dir, watch=watch)
        if not outcome.is_finished or outcome.exit_code:
            raise _not_finished(outcome, ranks)
        steps = settled_steps(read_steps(run_dir / "metrics.jsonl"))
    step_s, memory = median_step_s(steps), outcome.summary.measured["memory_bytes"]
    return _Measured(
        ranks=ranks,
        plan=plan,
        step_s=step_s,
        samples_per_s=statistics.median(step.samples for step in steps) / step_s,
        times=mean_times(steps),
        bytes_sent=round(statistics.median(step.bytes_sent for step in steps)),
        memory_bytes=None if memory is None else int(memory),
    )


def _not_finished(outcome: "Outcome", ranks: int) -> UsageError:
    error = UsageError(f"The run on {plural(ranks, 'rank')}: {how_it_ended(outcome)}")
    error.exit_code, error.trace = outcome.exit_code or 1, outcome.trace
    return error


def _row(first: _Measured, run: _Measured, prediction: Prediction | None) -> ScaleRow:
    speedup = run.samples_per_s / first.samples_per_s
    return ScaleRow(
        ranks=run.ranks,
        plan=run.plan,
        samples_per_s=run.samples_per_s,
        step_s=run.step_s,
        speedup=speedup,
        efficiency=speedup * first.ranks / run.ranks,
        times=run.times,
        bytes_sent=run.bytes_sent,
        memory_bytes=run.memory_bytes,
        predicted=prediction,
    )


def bottleneck(rows: Sequence[ScaleRow], cores: int) -> str:
    """What keeps the most ranks from their share of the speed-up, in a sentence. Pure."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        part = max(PARTS, key=lambda name: last.times[name])
        share = last.times[part] / (last.step_s or 1.0)
        return f"On {plural(last.ranks, 'rank')} {share:.0%} of a step is {part}."
    ideal = first.ranks / last.ranks
    losses = {
        "compute": last.times["compute"] - ideal * first.times["compute"],
        "exchange": last.times["exchange"] - ideal * first.times["exchange"],
        "waiting": last.times["waiting"] - ideal * first.times["waiting"],
        "data": last.times["data"] - ideal * first.times["data"],
    }
    lost = last.step_s - ideal * first.step_s
    what = f"On {last.ranks} ranks a step takes {in_seconds(last.step_s)}"
    if lost < SMALL_LOSS * last.step_s:
        return f"{what}, its share of the time on {first.ranks}: nothing stands in the way yet."
    part = max(losses, key=lambda name: losses[name])
    told = f"{what}, {in_seconds(lost)} more than its share of the time on {first.ranks}. Most of "
    return f"{told}that is {part}: {_cause(part, last, cores)}"


def _cause(part: str, row: ScaleRow, cores: int) -> str:
    seconds = in_seconds(row.times[part])
    if part == "compute" and row.ranks > cores:
        return f"{row.ranks} ranks share {plural(cores, 'core')}."
    causes: Mapping[str, str] = {
        "compute": "smaller pieces keep a core less busy, or cores share their caches and memory. "
        "A larger batch gives each rank more to do.",
        "exchange": f"{seconds} of each step go into messages. Larger batches, zero=0, local_steps "
        "or a codec send less for each sample.",
        "waiting": f"ranks wait {seconds} in each step for the slowest. Uneven pieces, stages or "
        "cores make one slower than the others.",
        "data": f"{seconds} of each step are spent on samples. Load ahead (loaders=2), or cache.",
    }
    return causes[part]
