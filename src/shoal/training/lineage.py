"""What a run was trained on, from its record; and what of today's data it has not seen.

A run directory tells the seed, the name of the order and the steps that were committed. The order
of samples follows from these, or from the recipe's data, so which samples a run has seen needs no
list: it is computed, and compared with the marks that the ranks left (`data/ledger.py`), and with
the name of the order where there are none. Data may grow at its end; then a new run can go on with
what the earlier ones have not seen. Reading a record runs none of its code: a directory may be
anybody's, and the recipe is the one that the user names.

Not for data whose earlier samples were changed or moved: their numbers are what is compared.
Cost: some 40 ns a sample that was trained on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shoal.data.batches import Batches
from shoal.data.ledger import Audit, audit, skipped_ids
from shoal.data.orders import (
    Order,
    Sequential,
    Shuffled,
    SubsetOrder,
    order_before,
    order_name,
    order_of,
    restrict_order,
)
from shoal.data.permutation import Ids
from shoal.data.replay_order import ReplayOrder
from shoal.data.sources import Source, stream_of
from shoal.data.streams import LENGTH as STREAM_LENGTH
from shoal.data.transforms.quarantine import Quarantined, quarantine_files
from shoal.data.transforms.wrapped import FilteredSource, inner_sources
from shoal.data.views import ConcatSource, View
from shoal.errors import UsageError
from shoal.logs import warn_on_screen
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import read_regular_file
from shoal.storage.run_dir import Count, Number, RecordedFields, RunDescription, read_description
from shoal.training.recipe import load_recipe


class RecordedStep(msgspec.Struct, frozen=True):
    """What a line of metrics.jsonl says of the samples of its step."""

    step: Number
    mark: Count | None = None
    left_out: Count = 0

    def as_mapping(self) -> dict[str, Any]:
        return {"step": self.step, "mark": self.mark, "left_out": self.left_out}


class RunRecord(NamedTuple):
    """What a run directory tells of a run."""

    path: Path
    described: RunDescription
    fields: RecordedFields
    num_samples: int
    steps: list[dict[str, Any]]

    def until(self, step: int | None) -> "RunRecord":
        """As it stood after this step; as it stands if none is named."""
        if step is None:
            return self
        return self._replace(steps=[line for line in self.steps if line["step"] <= step])

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.steps), default=0)


def read_record(path: Path) -> RunRecord:
    """The record of the run in this directory."""
    metrics = path / "metrics.jsonl"
    try:
        described = read_description(path)
        lines = read_regular_file(metrics).splitlines()
    except FileNotFoundError as missing:
        raise UsageError(
            f"{path} is no run directory with steps on record: {missing.filename} is missing. Name "
            "the directory of a `shoal train`."
        ) from None
    except OSError as error:
        raise UsageError(f"{metrics} cannot be read: {error.strerror}.") from error
    if described.run is None or described.num_samples is None:
        raise UsageError(f"{path} is not the directory of a `shoal train`. Name one that is.")
    return RunRecord(path, described, described.run, described.num_samples, list(_steps(lines)))


def read_parent_record(parent: str, run: Path) -> RunRecord:
    """The record of the run that `run` went on from; both may have been moved together."""
    for place in (Path(parent), run.parent / Path(parent).name):
        if place != run and _is_run(place):
            return read_record(place)
    raise UsageError(
        f"{run} was trained on what {parent} had not seen, so which samples are its own follows "
        f"from that run's record, and it is gone. Put run.json and metrics.jsonl back to {parent}, "
        f"or to {Path(parent).name} beside {run}."
    )


def _is_run(path: Path) -> bool:
    """False as well of what is no path: a record may say anything."""
    try:
        return (path / "run.json").exists()
    except (OSError, ValueError):
        return False


def data_on_record(record: RunRecord) -> Source | None:
    """Numbers in the place of the run's samples, in the order that it had; None if that is untold.

    No code of the run is loaded: a plain shuffle, and samples as they stand, are known by the name
    of the order. Which samples were left out as bad only the recipe's quarantine files tell.
    """
    is_untold = record.fields.data_order is None or record.num_samples == STREAM_LENGTH
    if is_untold or any(line["left_out"] for line in record.steps):
        return None
    for order in (Shuffled(record.num_samples), Sequential(record.num_samples)):
        if order_name(order, record.fields.seed.value) == record.fields.data_order.value:  # type: ignore[union-attr]
            return View(range(record.num_samples), order)
    return None


def recipe_data(record: RunRecord, recipe: str, settings: Mapping[str, str]) -> Source:
    """The data of a recipe that the user names, as it is today, with the settings of the run."""
    data: Source = load_recipe(recipe, {**record.described.settings, **settings}).data
    return data


def audit_run(record: RunRecord, data: Source) -> Audit:
    """Whether the steps on record were made of the samples that the order gives."""
    found = audit(record.steps, batches_of(record, data), left_out_ids(data).tolist())
    told = sum(line.get("left_out", 0) for line in record.steps)
    missing = [path for path in quarantine_files(data) if not path.exists()]
    if missing and (found.problems or found.num_left_out < told):
        names = ", ".join(map(str, missing))
        found.problems.insert(
            0,
            f"the quarantine file {names} is not there, so it is not known which samples were left "
            f"out ({told} were, by the record); put it back, or make it again from the run's logs",
        )
    elif found.num_left_out < told:
        found.problems.insert(
            0,
            f"{told} samples were left out by the record, and the quarantine files name only "
            f"{found.num_left_out} of them; their lines are in the run's logs, too",
        )
    return found


def refuse_other_marks(record: RunRecord, data: Source) -> None:
    """Refuse to go on with a run whose marks are of other samples than its order gives today."""
    found = audit_run(record, data)
    if found.num_wrong:
        raise UsageError(
            f"{record.path} was trained on other samples than --new-data gives today: "
            f"{found.problems[0]}. Samples would be lost and repeated. Go on with the version of "
            "Shoal and the data that it began with, or begin a new run with its weights (--from)."
        )
    if not found.num_marked:
        warn_on_screen(
            f"Whether the order of new and replayed samples is that with which {record.path} began "
            "could not be told: it has no name on record, and no step a mark."
        )


def batches_of(record: RunRecord, data: Source) -> Batches:
    """The batches of a run as it saw them, by number; `data` may have grown since.

    Those of a stream are its own, since their marks tell of what is in the samples.
    """
    if stream_of(data) is not None:
        fields = record.fields
        return Batches(data, batch_size=fields.batch_size.value, seed=fields.seed.value)
    return _batches(record, _order_before(record, data), _seen_before(record, data))


def seen_in(record: RunRecord, data: Source, missed: Sequence[int] = ()) -> NDArray[np.bool_]:
    """Of each sample of today's data, whether this run or one that it goes back to has seen it.

    Samples that were left out, and are to be tried again, are `missed` (`missed_samples`).
    """
    before, order = _seen_before(record, data), _order_before(record, data)
    batches = _batches(record, order, before)
    _refuse_other_order(
        record, (order, batches.order), audit(record.steps, batches, left_out_ids(data).tolist())
    )
    seen = np.zeros(len(data), dtype=np.bool_) if before is None else before
    for step in record.steps:
        seen[batches.at(step["step"] - 1).ids] = True
    seen[list(missed)] = False
    return seen


def missed_samples(record: RunRecord, data: Source) -> list[int]:
    """Samples that came up in the run, were left out as bad each time, and never trained on.

    Told by quarantine files as they are now, so a run that goes by it must keep the answer.
    """
    bad, before, batches = left_out_ids(data), _seen_before(record, data), batches_of(record, data)
    seen = np.zeros(len(data), dtype=np.bool_) if before is None else before
    out = np.zeros_like(seen)
    for step in record.steps:
        ids = batches.at(step["step"] - 1).ids
        missing = skipped_ids(ids, bad, step)
        seen[ids[~np.isin(ids, missing)]] = True
        out[missing] = True
    return [int(index) for index in _places(out & ~seen)]


def _seen_before(record: RunRecord, data: Source) -> NDArray[np.bool_] | None:
    """What this run's parents had seen when it began; None if it has none."""
    described = record.described
    if not described.new_data:
        return None
    # The run before may have gone on since: what it did then is not in this one's order.
    earlier = read_parent_record(described.new_data, record.path).until(described.new_data_steps)
    missed = described.new_data_missed or ()
    if any(index >= len(data) for index in missed):
        raise UsageError(
            f"{record.path / 'run.json'}: sample {max(missed)} is said to have been left out "
            f"before, and there are {len(data)}. Name a run whose record is whole."
        )
    return seen_in(earlier, data, missed)


def _order_before(record: RunRecord, data: Source) -> Order:
    """The order of the recipe's data as it stood when the run began."""
    num_samples = record.num_samples
    order = order_before(data, num_samples)
    if order is None:
        raise UsageError(
            f"{record.path} was trained on {num_samples} samples and there are {len(data)} now, "
            "and this order of samples cannot tell how they stood then. Data may grow at its end "
            "if it is shuffled as a whole, or by further sets of shards: shards([OLD, NEW])."
        )
    return order


def _refuse_other_order(record: RunRecord, orders: tuple[Order, Order], found: Audit) -> None:
    """By an order that was not the run's, samples that it has seen would be taken for new ones.

    `orders` are the recipe's, and that of what was new to the run.
    """
    fields, is_other = record.fields, found.num_wrong > 0
    for told, order in zip((fields.data_order, fields.new_data_order), orders, strict=True):
        is_other |= told is not None and told.value != order_name(order, fields.seed.value)
    if is_other:
        raise UsageError(
            f"{record.path} was trained on samples in another order than its recipe gives today, "
            "so it cannot be told which it has seen. Give the data the order (in_order, weighted, "
            "by_length, some, mix) that it had, or train on all of it without --new-data."
        )


def _batches(record: RunRecord, order: Order, before: NDArray[np.bool_] | None) -> Batches:
    num_samples, fields = record.num_samples, record.fields
    if before is not None:
        order = _order_of_new(order, before[:num_samples], record.described.replay or 0.0)
    return Batches(
        View(range(num_samples), order),
        batch_size=fields.batch_size.value,
        seed=fields.seed.value,
        end=fields.end.value,
    )


def select_new(
    data: Source, before: RunRecord, replay: float = 0.0, missed: Sequence[int] = ()
) -> View:
    """The samples that a run has not seen; of its batches `replay` is a share of those it has."""
    if not 0 <= replay < 1:
        raise UsageError(f"--replay {replay}: the share of old samples is from 0 to below 1.")
    order = _order_of_new(order_of(data), seen_in(before, data, missed), replay)
    if not len(order):
        raise UsageError(
            f"All {len(data)} samples were seen by {before.path} and the runs before it. Add data "
            "at the end of the source, or train on all of it without --new-data."
        )
    return View(data, order)


def _order_of_new(order: Order, seen: NDArray[np.bool_], replay: float) -> Order:
    """The order of a recipe's data without the samples that were seen, or with some of them."""
    unseen, old = _places(~seen), _places(seen)
    new = SubsetOrder(unseen, restrict_order(order, unseen))
    if not replay or not len(old) or not len(new):
        return new
    if new.batch_size is not None:
        raise UsageError(
            "--replay mixes old samples in between the new ones, and batches of like lengths "
            "(by_length) would be lost. Leave one of the two out."
        )
    return ReplayOrder(new, SubsetOrder(old), replay)


def _places(which: NDArray[np.bool_]) -> Ids:
    return np.flatnonzero(which).astype(np.int64)


def left_out_ids(data: Any) -> Ids:
    """The numbers, in this source, of the samples that the quarantine files of its parts name."""
    if isinstance(data, Quarantined):
        return np.array(sorted(data.left_out()), dtype=np.int64)
    found = [left_out_ids(source) for source in inner_sources(data)]
    if isinstance(data, ConcatSource):
        found = [start + part for start, part in zip(data.starts, found, strict=False)]
    ids = np.concatenate([np.empty(0, dtype=np.int64), *found])
    if isinstance(data, FilteredSource):
        ids = _places(np.isin(data.kept, ids))
    return ids


def _steps(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The steps on record. A torn line is of a process that was killed; another wrote it again."""
    for line in lines:
        if (found := try_decode_json(line, RecordedStep)) is not None:
            yield found.as_mapping()
