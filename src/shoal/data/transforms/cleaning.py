"""Cleaning: leave out what is broken, unwanted or there twice, and repair what can be.

    shoal.data.clean(rows, schema={"age": (0, 130)}, unique_by="all", quarantine="bad.jsonl")

Each sample is looked at once, in this order: it is loaded, repaired, held against the schema, asked
about with `keep`, and compared with those before it. What comes out is a list of the samples that
stay, a pure function of the source and these rules, so it is the same on every rank. It is kept in
the cache directory and found there the next time, if source and functions can be told apart.

Not for rules that change during a run. Cost: one pass over the source at the first start, by
`workers` processes; 8 bytes a sample afterwards. Next: `jobs.py` for how the pass is divided,
`fingerprint.py` for when it is done again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.data.packing import pack, unpack
from shoal.data.sources import Ids, Pass, Source, as_source, is_sample_error
from shoal.data.transforms.fingerprint import digest, identity_of, result_key
from shoal.data.transforms.jobs import PassJob, run_job
from shoal.data.transforms.quarantine import (
    QuarantineEntry,
    append_missing,
    check_quarantine_path,
    classify_errors,
    shorten,
    source_kinds,
)
from shoal.data.transforms.schema import Schema, Validator, compile_schema
from shoal.data.transforms.wrapped import FilteredSource, apply_to_sample, iterate_loads
from shoal.data.validate import require_function
from shoal.errors import RecipeError, UsageError
from shoal.logs import log

Unique = Callable[[Any], Any] | Literal["all"]


class CleanCounts(msgspec.Struct, frozen=True):
    """What became of the samples: each is counted once."""

    kept: int
    failed: int  # could not be loaded or repaired
    invalid: int  # do not fit the schema
    dropped: int  # `keep` said no
    duplicates: int

    def __str__(self) -> str:
        return (
            f"{self.kept} kept, {self.failed} failed, {self.invalid} do not fit the schema, "
            f"{self.dropped} dropped, {self.duplicates} duplicates"
        )


class Rules(msgspec.Struct, frozen=True):
    """How samples are judged."""

    keep: Callable[[Any], bool] | None
    repair: Callable[[Any], Any] | None
    schema: Schema | None
    unique_by: Unique | None
    goes_on: bool  # past samples that fail or do not fit


class Cleaned(FilteredSource):
    """The samples of a source that stayed; made by `clean`."""

    def __init__(self, source: Source, kept: Ids, rules: Rules, counts: CleanCounts):
        super().__init__(source, kept)
        self.rules, self.counts = rules, counts
        if rules.repair is not None and hasattr(self, "take"):
            del self.take  # it would give them unrepaired

    def _change(self, sample: Any, index: int, of: Pass) -> Any:
        return repaired(sample, index, self.rules.repair)

    def identity(self) -> str:
        """Names this content: what lies below, which samples stayed, how they are repaired."""
        return digest("cleaned", identity_of(self.source), self.kept, self.rules.repair)


def clean(
    source: Any,
    *,
    keep: Callable[[Any], bool] | None = None,
    repair: Callable[[Any], Any] | None = None,
    schema: Schema | None = None,
    unique_by: Unique | None = None,
    quarantine: str | Path | None = None,
    workers: int = 1,
    identity: str | None = None,
) -> Cleaned:
    """The samples of `source` that are good, wanted, and there once; see the head of this file.

    `unique_by` is a function that gives the key by which samples are the same, or "all" for the
    whole sample; the first one stays. With `quarantine`, samples that fail or do not fit the schema
    are written there and left out; without it, the first of them is an error. `identity` names
    source and rules, for those that Shoal cannot tell apart itself: another text when they change.
    """
    source = as_source(source)
    rules = Rules(keep, repair, schema, unique_by, quarantine is not None)
    _check_rules(source, rules)
    path = None if quarantine is None else check_quarantine_path(quarantine)
    key = result_key("clean", source, identity, *([rules] if identity is None else []))
    judge = _Judge(source, rules)
    content = run_job(PassJob("clean", key, len(source), judge.share, _merge), workers)
    found = unpack(content)
    counts = CleanCounts(*found["counts"])
    log.info("clean: of %d samples %s", len(source), counts)
    if path is not None:
        name = source_kinds(source) if key is None else f"{source_kinds(source)} {key[:16]}"
        append_missing(path, [QuarantineEntry(name, *note) for note in found["notes"]])
    if not counts.kept:
        raise UsageError(
            f"clean() left none of {len(source)} samples: {counts}. Look at the rules, or at the "
            "quarantine file."
        )
    return Cleaned(source, found["kept"], rules, counts)


def repaired(sample: Any, index: int, repair: Callable[[Any], Any] | None) -> Any:
    """The sample as `repair` leaves it, if there is such a rule."""
    return sample if repair is None else apply_to_sample(repair, index, sample)


class _Judge:
    """Looks at samples, and remembers nothing of one for the next."""

    def __init__(self, source: Source, rules: Rules):
        self._source, self._rules = source, rules
        self._complaint: Validator | None = None
        if rules.schema is not None:
            self._complaint = compile_schema(rules.schema)

    def share(self, indices: range) -> bytes:
        """The verdicts on neighbouring samples, packed."""
        kept: list[int] = []
        keys: list[bytes] = []
        notes: list[tuple[int, str, str]] = []
        for index, load in iterate_loads(self._source, indices):
            try:
                key = self._key(index, load)
            except _RejectedSample as bad:
                if not self._rules.goes_on:
                    raise RecipeError(
                        f"{bad.reason}. Name a quarantine file to go on without such samples."
                    ) from bad.__cause__
                notes.append((index, bad.error, shorten(bad.reason)))
                continue
            if key is not None:
                kept.append(index)
                keys.append(key)
        width = 0 if self._rules.unique_by is None else 2
        found = np.frombuffer(b"".join(keys), np.uint64).reshape(len(keys), width)
        return bytes(pack({"kept": np.array(kept, np.int64), "keys": found, "notes": notes,
                           "num_seen": len(indices)}))  # fmt: skip

    def _key(self, index: int, load: Callable[[], Any]) -> bytes | None:
        """What the sample is compared by, nothing if samples are not compared; None to drop it."""
        sample = self._load(index, load)
        wrong = None if self._complaint is None else self._complaint(sample)
        if wrong is not None:
            raise _RejectedSample("schema", f"sample {index}: {wrong}")
        rules = self._rules
        try:
            if rules.keep is not None and not rules.keep(sample):
                return None
            if rules.unique_by is None:
                return b""
            key = sample if rules.unique_by == "all" else rules.unique_by(sample)
            return xxhash.xxh3_128_digest(pack(key))
        except Exception as error:
            # A rule that fails says nothing of the sample: it is the recipe's error, always.
            what = f"{type(error).__name__}: {error}"
            raise RecipeError(f"sample {index}: keep or unique_by failed: {what}") from error

    def _load(self, index: int, load: Callable[[], Any]) -> Any:
        try:
            with classify_errors(index):
                return repaired(load(), index, self._rules.repair)
        except RecipeError as error:
            cause = error.__cause__ or error
            raise _RejectedSample(type(cause).__name__, str(error)) from error
        except BaseException as error:
            if not is_sample_error(error):
                raise
            reason = f"sample {index} failed: {type(error).__name__}: {error}"
            raise _RejectedSample(type(error).__name__, reason) from error


class _RejectedSample(Exception):
    """A sample that failed or does not fit."""

    def __init__(self, error: str, reason: str):
        super().__init__(reason)
        self.error, self.reason = error, reason


def _merge(parts: list[bytes]) -> bytes:
    """The verdicts on all samples: those that stay, why others do not, and how many."""
    shares = [unpack(part) for part in parts]
    kept = np.concatenate([share["kept"] for share in shares])
    notes = [tuple(note) for share in shares for note in share["notes"]]
    num_seen = sum(share["num_seen"] for share in shares)
    dropped = num_seen - len(kept) - len(notes)
    invalid = sum(error == "schema" for _, error, _ in notes)
    failed = len(notes) - invalid
    first = _first_alike(np.concatenate([share["keys"] for share in shares]))
    is_first = first == np.arange(len(kept))
    for again in np.flatnonzero(~is_first):
        reason = f"sample {kept[again]} is the same as sample {kept[first[again]]}"
        notes.append((int(kept[again]), "duplicate", reason))
    notes.sort(key=lambda note: note[0])
    stay = kept[is_first]
    counts = [len(stay), failed, invalid, dropped, len(kept) - len(stay)]
    return bytes(pack({"kept": stay, "notes": notes, "counts": counts}))


def _first_alike(keys: NDArray[np.uint64]) -> Ids:
    """For each row the place of the first row that equals it; itself, if rows are empty."""
    places = np.arange(len(keys))
    if not keys.size:
        return places
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable, so the first of a group is the first
    begins = np.ones(len(keys), bool)
    begins[1:] = (keys[order][1:] != keys[order][:-1]).any(axis=1)
    first = np.empty_like(places)
    first[order] = order[begins][np.cumsum(begins) - 1]
    return first


def _check_rules(source: Source, rules: Rules) -> None:
    if not len(source):
        raise UsageError("clean() was given an empty source: len(source) is 0.")
    given = (rules.keep, rules.repair, rules.schema, rules.unique_by)
    if not rules.goes_on and all(rule is None for rule in given):
        raise UsageError(
            "clean() was given no rule. Say what to do: keep, repair, schema, unique_by or "
            "quarantine."
        )
    for name in ("keep", "repair"):
        if getattr(rules, name) is not None:
            require_function(getattr(rules, name), f"clean({name}=...)")
    if rules.unique_by is not None and rules.unique_by != "all" and not callable(rules.unique_by):
        raise UsageError(
            f'unique_by={rules.unique_by!r}. It is "all", or a function from a sample to its key.'
        )
