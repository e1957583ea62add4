"""Collating: samples become a batch, or an error that says why they cannot.

Each piece of a batch is loaded here, by one call to a source that has `take`, else sample by sample
and collated by torch's `default_collate`, or by the Run's own `collate`. Errors name the samples by
their numbers. Samples that are stacked must have one form, and all pieces the types of the first
sample of the run (`SampleTypeCheck`): else the plan, which decides which samples share a piece,
would decide the types of numbers. Next: `batches.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor, strided
from torch.utils.data import default_collate

from shoal.data.orders import batch_size_of, order_of
from shoal.data.readers.records import load_many
from shoal.data.sources import (
    Collate,
    Ids,
    Pass,
    SkipsBad,
    Source,
    is_outage,
    is_sample_error,
    load_failure,
    load_sample,
    outage_error,
    stream_of,
    tensor_from_array,
)
from shoal.data.transforms.randomness import drawing_from
from shoal.errors import RecipeError

_NUMBERS = {  # those of numpy that torch makes the same of as of Python's own
    "bool": "a bool",
    "int": "an int",
    "float": "a float",
    "int64": "an int",
    "float64": "a float",
}
_NUM_LOOKED = 1024  # samples among which one is sought to compare others with
_ALIKE = (
    "Samples must be alike. Give all of them one type, and pad them to one size "
    "(shoal.data.mapped), or give the Run a `collate` that does; shoal.data.by_length puts samples "
    "of like lengths together, so that little is padded."
)


class SampleTypeCheck:
    """Holds all pieces to the types of the first sample, which any process can look at itself.

    So a sample of another type is refused at its step under every plan. Sizes are not compared:
    pieces are not stacked, and batches of one length each are as good as any. `ids_at` gives the
    samples at positions of the run's order; of the first, those that fail are passed over.

    Where bad samples are left out, those are bad too that do not fit into one batch with the first
    good one, unless sizes may well differ: batches are of one sample, or put together by length.
    """

    def __init__(self, source: Source, ids_at: Callable[[Ids], Ids], batch_size: int):
        self._ids_at = ids_at
        # Of a stream that was entered in its middle, the first samples are far away.
        is_stream = stream_of(source) is not None
        self._num_looked = 0 if is_stream else min(_NUM_LOOKED, len(order_of(source)))
        self._has_sizes = batch_size == 1 or batch_size_of(order_of(source)) is not None
        self._known: tuple[int, dict[str, str]] | None = None
        self._good: tuple[int, Any] | None = None

    def require_fit(self, sample: Any, index: int, load: Callable[[int], Any]) -> None:
        """Refuse a sample that does not fit to the first good one, which `load` loads."""
        if self._has_sizes:
            return
        if self._good is None:
            self._good = self._first_good(load) or (index, sample)
        first, good = self._good
        if describe_mismatch([good, sample], np.array([first, index])):
            # It may fit all the same, as an array beside tensors does.
            collate_samples([good, sample], ids=np.array([first, index]))

    def _first(self) -> Ids:
        return self._ids_at(np.arange(self._num_looked, dtype=np.int64))

    def _first_good(self, load: Callable[[int], Any]) -> tuple[int, Any] | None:
        for index in self._first().tolist():
            with suppress(RecipeError):
                collate_samples([sample := load(index)])
                return index, sample
        return None

    def require(self, piece: tuple[Any, Any], ids: Ids, load: Callable[[Ids], Any]) -> None:
        """Refuse a loaded piece of other types; `load` loads one of the first samples."""
        found = _types_of(piece)
        if self._known is None:
            self._known = self._look(int(ids[0]), found, load)
        index, types = self._known
        for field, kind in types.items() if types != found else ():
            if found.get(field, kind) != kind:
                raise RecipeError(
                    f"samples {index} and {ids[0]} are not alike: {field} is {kind} in the first "
                    f"and {found[field]} in the other. {_ALIKE}"
                )

    def _look(
        self, own: int, found: dict[str, str], load: Callable[[Ids], Any]
    ) -> tuple[int, dict[str, str]]:
        first = self._first()
        for at, index in enumerate(first.tolist()):
            with suppress(RecipeError):
                return index, found if index == own else _types_of(load(first[at : at + 1]))
        return own, found


def load_good_samples(
    source: SkipsBad, ids: Ids, of: Pass | None, type_check: SampleTypeCheck | None = None
) -> tuple[list[Any], Ids]:
    """The samples that load and fit, and their ids; the source records the others."""
    samples, good = [], []
    begun = None if of is None else of._replace(epoch=0)
    found = _asked_for(source, ids, of)
    for at, index in enumerate(ids):
        try:
            sample = load_sample(source, int(index), of) if found is None else found[at]
            if type_check is not None:
                _pair(sample, f"sample {index}")
                type_check.require_fit(
                    sample, int(index), lambda other: load_sample(source, other, begun)
                )
        except RecipeError as error:
            source.record(int(index), error)
        else:
            samples.append(sample)
            good.append(index)
    return samples, np.asarray(good, dtype=np.int64)


def load_collated(
    source: Source, ids: Ids, collate: Collate | None, of: Pass | None = None
) -> tuple[Any, Any]:
    """The collated samples `ids`: by `take` where the source has it and no `collate` is given.

    Samples that differ from pass to pass are those of the pass `of`, if one is given.
    """
    # By name: asking whether it fits a protocol takes longer than a gather.
    take = getattr(source, "take", None) if collate is None else None
    if take is not None and (of is None or not hasattr(source, "vary")):
        try:
            return _with_rows(_pair(take(ids), "take()"), len(ids))
        except BaseException as error:
            if not is_sample_error(error):
                raise
            if is_outage(error):
                raise outage_error(int(ids[0]), error) from error
            found = None
            if len(ids) > 1:
                for at in range(len(ids)):  # find the one to name
                    load_collated(source, ids[at : at + 1], None)
                found = describe_mismatch([load_sample(source, int(index)) for index in ids], ids)
            raise RecipeError(found or load_failure(ids, error)) from error
    samples = _asked_for(source, ids, of)
    if samples is None:
        samples = [load_sample(source, int(index), of) for index in ids]
    return collate_samples(samples, collate, ids, of)


def _with_rows(pair: tuple[Any, Any], num_rows: int) -> tuple[Any, Any]:
    """The pair itself, if it has as many rows as were asked for: else who is in it is unknown."""
    lengths: list[int] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            lengths.append(len(value) if value.dim() else 0)
        elif isinstance(value, Mapping | tuple | list):
            for part in value.values() if isinstance(value, Mapping) else value:
                look(part)

    look(pair)
    if lengths and num_rows not in lengths:
        raise RecipeError(
            f"take() gave {lengths[0]} rows for {num_rows} samples. Row i must be that of sample "
            "ids[i]; to leave bad samples out, let data[i] raise, without take(), under "
            "shoal.data.quarantine."
        )
    return pair


def _asked_for(source: Source, ids: Ids, of: Pass | None) -> list[Any] | None:
    """All samples in one call, where that gives those of this pass."""
    return None if of is not None and hasattr(source, "vary") else load_many(source, ids)


def collate_samples(
    samples: list[Any],
    collate: Collate | None = None,
    ids: Ids | None = None,
    of: Pass | None = None,
) -> tuple[Any, Any]:
    """One pair `(inputs, target)` of batched values; `ids` are named when it cannot be made.

    What `collate` draws depends on the pass `of` and on `ids` alone.
    """
    if not samples:
        raise RecipeError("no samples were given, and a batch is made of one at least.")
    names = np.arange(len(samples)) if ids is None else ids
    if collate is not None:
        try:
            with drawing_from((*(of or (0, 0)), *map(int, names))):
                return _batch_pair(collate([_own(sample) for sample in samples]))
        except BaseException as error:
            if not is_sample_error(error):
                raise
            raise RecipeError(f"collate failed on {load_failure(names, error)}") from error
    for index, sample in zip(names, samples, strict=True):
        _pair(sample, f"sample {index}")
    columns = [[sample[part] for sample in samples] for part in (0, 1)]
    try:
        inputs, target = map(_stacked, columns)
    except Exception as error:
        told = describe_mismatch(samples, names) or _unfit(samples, names)
        if told is not None:  # all is said
            raise RecipeError(told) from None
        raise RecipeError(load_failure(names, error)) from error
    if not all(map(_are_of_one_type, columns)):  # torch would convert them, by what is in a batch
        raise RecipeError(describe_mismatch(samples, names))
    # default_collate makes lists of tuples; a list would not be spread over the model's arguments.
    return _tuple_of_list(inputs), _tuple_of_list(target)


def _stacked(column: list[Any]) -> Any:
    try:
        return default_collate(column)
    except (TypeError, ValueError):  # arrays beside tensors, or that lie otherwise than those
        return default_collate([_with_tensors(value) for value in column])


def _with_tensors(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return tensor_from_array(value)
    if isinstance(value, Mapping):
        return {name: _with_tensors(part) for name, part in value.items()}
    if not isinstance(value, (tuple, list)):
        return value
    parts = [_with_tensors(part) for part in value]
    return value._make(parts) if hasattr(value, "_make") else parts


def _batch_pair(batch: Any) -> tuple[Any, Any]:
    """What a collate made: a pair, or a dict as those of transformers give, with `labels`."""
    if isinstance(batch, Mapping) and "labels" in batch:
        return {name: part for name, part in batch.items() if name != "labels"}, batch["labels"]
    return _pair(batch, "collate")


def _own(sample: Any) -> Any:
    """A dict that a collate may write to: some of transformers do."""
    return dict(sample) if type(sample) is dict else sample


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _pair(value: Any, origin: str) -> tuple[Any, Any]:
    if _is_pair(value):
        return value[0], value[1]
    size = f" of {len(value)}" if isinstance(value, (tuple, list, Mapping)) else ""
    raise RecipeError(
        f"{origin} gave a {type(value).__name__}{size}. It must be a pair (inputs, target); "
        "several inputs go into a tuple or dict of their own."
    )


def describe_mismatch(samples: list[Any], names: Ids) -> str | None:
    """The first sample that is not made like the first one, and where, in a sentence."""
    for index, sample in zip(names, samples, strict=True):
        if not _is_pair(sample) or not _is_pair(samples[0]):
            return None
        for part, field in enumerate(("inputs", "target")):
            found = _difference(samples[0][part], sample[part], field)
            if found is not None:
                return (
                    f"samples {names[0]} and {index} do not fit into one batch: {found}. {_ALIKE}"
                )
    return None


def _unfit(samples: list[Any], names: Ids) -> str | None:
    """The first value of the samples that no batch can hold, in a sentence."""
    for index, (inputs, target) in zip(names, samples, strict=True):
        for field, what in (*_strange(inputs, "inputs"), *_strange(target, "target")):
            return (
                f"sample {index} cannot be put into a batch: {field} is {what}. A batch is made of "
                "dense tensors, arrays and numbers of up to 64 bits, and of text, in tuples, lists "
                "and dicts. Put such a value in its place (0 for a target that is not needed, say; "
                "shoal.data.mapped), or give the Run a `collate`."
            )
    return None


def _strange(value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, (Mapping, tuple, list)):
        for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _strange(part, f"{field}.{name}")
    elif isinstance(value, Tensor):
        if value.layout != strided:
            yield field, f"a tensor of {str(value.layout).removeprefix('torch.')}"
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            yield field, f"the number {value}" if value.bit_length() < 128 else "a huge number"
    elif not isinstance(value, (float, str, bytes, np.ndarray, np.generic)):
        yield field, "None" if value is None else f"a {type(value).__name__}"


def _are_of_one_type(values: Sequence[Any]) -> bool:
    """Whether values at one place of the samples have one dtype, or are numbers of one kind."""
    first = values[0]
    if isinstance(first, (Tensor, np.ndarray)):
        kinds = {getattr(value, "dtype", None) for value in values}
        return len({str(kind).removeprefix("torch.") for kind in kinds}) == 1
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            return False
        return all(_are_of_one_type([value[name] for value in values]) for name in first)
    if isinstance(first, (tuple, list)):
        return all(map(_are_of_one_type, zip(*values, strict=True)))
    return len({_form(value) for value in values}) == 1


def _difference(one: Any, other: Any, field: str) -> str | None:
    """Where two values differ in form: the field, and what it is in each."""
    if _form(one) != _form(other):
        return f"{field} is {_form(one)} in the first and {_form(other)} in the other"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(one, Mapping):
        pairs = [(name, part, other.get(name)) for name, part in one.items()]
    elif isinstance(one, (tuple, list)):
        pairs = [(at, part, other[at]) for at, part in enumerate(one)]
    found = (_difference(a, b, f"{field}.{name}") for name, a, b in pairs)
    return next((text for text in found if text is not None), None)


def _form(value: Any) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return f"{kind} {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(sorted(map(str, value)))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, np.number | np.bool_):
        return _NUMBERS.get(str(value.dtype), f"a number of {value.dtype}")
    found = (kind for kind in (bool, int, float) if isinstance(value, kind))  # a bool is an int
    kind = next(found, type(value)).__name__
    return _NUMBERS.get(kind, kind)


def _types_of(piece: tuple[Any, Any]) -> dict[str, str]:
    return dict([*_types(piece[0], "inputs"), *_types(piece[1], "target")])


def _types(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Each field and what it is, whatever its size."""
    if isinstance(value, Tensor):
        yield field, str(value.dtype).removeprefix("torch.")
    elif isinstance(value, Mapping):
        yield field, _form(value)
        for name, part in value.items():
            yield from _types(part, f"{field}.{name}")
    else:
        yield field, type(value).__name__
        for name, part in enumerate(value if isinstance(value, (tuple, list)) else ()):
            yield from _types(part, f"{field}.{name}")


def _tuple_of_list(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
