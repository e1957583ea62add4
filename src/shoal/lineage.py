"""What a run was trained on, from its record; and what of today's data it has not seen.

A run directory tells the recipe, the seed and the steps that were committed. The order of samples
follows from these, so which samples a run has seen needs no list: it is computed, and compared with
the marks that the ranks left (`data/ledger.py`). Data may grow at its end; then a new run can go on
with what the earlier ones have not seen.

Not for data whose earlier samples were changed or moved: their numbers are what is compared.
Cost: some 40 ns a sample that was trained on.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.data.ledger import Audit, audit
from shoal.data.loader import Batches
from shoal.data.order import Ids
from shoal.data.orders import Mixed, Order, Some, order_before
from shoal.data.sources import Source
from shoal.data.transforms.layers import below
from shoal.data.transforms.normalizing import Normalized
from shoal.data.transforms.quarantine import Quarantined
from shoal.data.transforms.statistics import Statistics
from shoal.data.views import View
from shoal.errors import UsageError
from shoal.recipe import load_recipe


class Record(NamedTuple):
    """What a run directory tells of a run."""

    path: Path
    described: dict[str, Any]
    steps: list[dict[str, Any]]

    def field(self, name: str) -> Any:
        return self.described["run"][name]["value"]


def read_record(path: Path) -> Record:
    """The record of the run in this directory."""
    try:
        described = json.loads((path / "run.json").read_bytes())
        lines = (path / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError as missing:
        raise UsageError(
            f"{path} is no run directory with steps on record: {missing.filename} is missing."
        ) from None
    except ValueError as error:
        raise UsageError(f"{path / 'run.json'} cannot be read: {error}") from None
    if "run" not in described or "num_samples" not in described:
        raise UsageError(f"{path} is not the directory of a `shoal train`.")
    return Record(path, described, list(_steps(lines)))


def recipe_data(record: Record) -> Source:
    """The data of the run's recipe, as it is today."""
    data: Source = load_recipe(record.described["recipe"], record.described["settings"]).data
    return data


def audit_run(record: Record, data: Source) -> Audit:
    """Whether the steps on record were made of the samples that the order gives."""
    return audit(record.steps, batches_of(record, data), _left_out(data))


def batches_of(record: Record, data: Source) -> Batches:
    """The batches of a run as it saw them, by number; `data` may have grown since."""
    num_samples = record.described["num_samples"]
    order = order_before(data, num_samples)
    if order is None:
        raise UsageError(
            f"{record.path} was trained on {num_samples} samples and there are {len(data)} now, "
            "and this order of samples cannot tell how they stood then. Data may grow at its end "
            "if it is shuffled as a whole, or by whole shards."
        )
    parent = record.described.get("new_data")
    if parent:
        seen = seen_in(read_record(Path(parent)), data)
        order = _order_of_new(seen, num_samples, record.described.get("replay") or 0.0)
    return Batches(
        View(range(num_samples), order),
        batch_size=record.field("batch_size"),
        seed=record.field("seed"),
        end=record.field("end"),
    )


def seen_in(record: Record, data: Source) -> NDArray[np.bool_]:
    """Of each sample of today's data, whether this run or one that it goes back to has seen it."""
    seen = np.zeros(len(data), dtype=np.bool_)
    parent = record.described.get("new_data")
    if parent:
        seen |= seen_in(read_record(Path(parent)), data)
    batches = batches_of(record, data)
    for step in record.steps:
        seen[batches.at(step["step"] - 1).ids] = True
    return seen


def keep_statistics(data: Any, run_dir: Path) -> None:
    """Write what samples are normalised by into the run's directory, where it can be read later."""
    for number, found in enumerate(_statistics_in(data)):
        name = "statistics.json" if not number else f"statistics-{number + 1}.json"
        found.save(run_dir / name)


def _statistics_in(data: Any) -> Iterator[Statistics]:
    if isinstance(data, Normalized):
        yield data.statistics
    for source in below(data):
        yield from _statistics_in(source)


def only_new(data: Source, run_dir: Path, replay: float = 0.0) -> View:
    """The samples that a run has not seen; of its batches `replay` is a share of those it has."""
    if not 0 <= replay < 1:
        raise UsageError(f"--replay {replay}: the share of old samples is from 0 to below 1.")
    seen = seen_in(read_record(run_dir), data)
    if seen.all():
        raise UsageError(
            f"All {len(data)} samples were seen by {run_dir} and the runs before it. Add data at "
            "the end of the source, or train on all of it without --new-data."
        )
    return View(data, _order_of_new(seen, len(data), replay))


def _order_of_new(seen: NDArray[np.bool_], num_samples: int, replay: float) -> Order:
    seen = seen[:num_samples]
    new, old = Some(_places(~seen)), _places(seen)
    if not replay or not len(old):
        return new
    num_positions = round(len(new) / (1 - replay))
    return Mixed([new, Some(old)], [0, 0], [1 - replay, replay], num_positions)


def _places(which: NDArray[np.bool_]) -> Ids:
    return np.flatnonzero(which).astype(np.int64)


def _left_out(data: Any) -> set[int]:
    """The samples in the quarantine files of a source."""
    if not isinstance(data, Quarantined):
        return {index for source in below(data) for index in _left_out(source)}
    lines = data.path.read_bytes().splitlines() if data.path.exists() else []
    return {int(line["index"]) for line in _decoded(lines)}


def _steps(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    return (line for line in _decoded(lines) if isinstance(line.get("step"), int))


def _decoded(lines: Iterable[bytes]) -> Iterable[dict[str, Any]]:
    """The lines of a file whose last one may be torn."""
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError:
            continue
