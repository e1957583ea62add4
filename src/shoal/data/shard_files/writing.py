"""Building a set of shards from any source: streaming, resumable, independent of the workers.

Samples are taken in order and cut into blocks and shards by their lengths alone, so the result does
not depend on the number of workers or on how often the build was cut short. The layout is `rows` if
all samples have leaves of one shape and type; the first that does not makes the builder start over
with `packed`. A sample that fails ends the build, or is skipped by a source that skips such
samples; one that is not reached (a server is gone, say) always ends it. A finished shard is durable
and noted in the draft. A build that was killed resumes after the last of them, if the source is the
same as far as can be seen: its length, the settings, its `identity`, some samples throughout, and
the first and last sample of every finished shard; otherwise it starts over. A full disk ends it and
leaves nothing.

Cost: each sample is loaded once, sixteen of them twice; those before a first one that is unlike,
and the ends of finished shards of a resumed build, once more. Memory for one block (in an object
store, one shard). Next: `encoding.py` for workers, `drafts.py` for the commit,
docs/how-to/shards.md.
"""

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from shoal import __version__
from shoal.data.orders import is_shuffle, order_of
from shoal.data.packing import pack
from shoal.data.shard_files import layout
from shoal.data.shard_files.cutting import (
    BuildSettings,
    FinishedShard,
    PeekableSamples,
    ShardCutter,
)
from shoal.data.shard_files.drafts import NOTE, BucketDraft, FolderDraft, draft_at
from shoal.data.shard_files.encoding import MOST_WORKERS, LayoutMismatch, encode_samples
from shoal.data.shard_files.format import (
    COMPRESSIONS,
    FORMAT,
    VERSION,
    Index,
    PackedLayout,
    ShardInfo,
    encode,
    shard_name,
)
from shoal.data.shard_files.locations import ShardMirror, open_location
from shoal.data.shard_files.syncing import mirror_set
from shoal.data.sources import EpochSource, SkipsBad, Source, as_source, load_sample
from shoal.data.stalls import STALLS
from shoal.data.transforms.fingerprint import NoIdentity, identity_of
from shoal.data.validate import require_whole
from shoal.errors import RecipeError, ShoalError, UsageError, nearest, require
from shoal.logs import log
from shoal.storage.decoding import try_decode_json

SHARD_BYTES = 64 << 20
_NUM_PROBES = 16

Progress = Callable[[int, int], None]


def build(
    source: Any,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    compress: str | None = None,
    workers: int = 1,
    force: bool = False,
    identity: str = "",
    progress: Progress | None = None,
) -> Index:
    """Write the samples of a source as a set of shards, and return its index.

    `shard_bytes` is the size of a shard before compression; `compress` is None or "zstd". A set
    that is there already is replaced only with `force`: in a directory when the new one is whole,
    at a URL when the build begins. In a mirror it is built in the first place, and copied to the
    others. `identity` is text that changes when the source does (a file's
    name and time, say). `progress` gets samples and bytes so far.
    """
    source = as_source(source)
    _check(len(source), shard_bytes, compress, workers)
    _refuse_varied(source)
    place = open_location(out)
    mirror = place if isinstance(place, ShardMirror) else None
    place = place.places[0] if isinstance(place, ShardMirror) else place
    draft = draft_at(place)
    draft.refuse_others(force)
    described, probes = _probe(source)
    wanted = layout.row_layout_of(described, shard_bytes) if described else PackedLayout()
    identity = " ".join(filter(None, (identity, _own_name(source))))
    settings = BuildSettings(
        FORMAT, VERSION, len(source), identity, probes, shard_bytes, compress, wanted
    )
    job = _Build(source, draft, settings, workers, progress or (lambda samples, num_bytes: None))
    try:
        index = job.run()
    except OSError as error:
        if isinstance(error, ShoalError):
            raise
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        job.discards = job.discards or is_full
        after = "Nothing was left behind; make room" if is_full else "Mend that"
        raise UsageError(
            f"{place} cannot be written: {error.strerror}. {after}, and build it again."
        ) from error
    finally:
        draft.close(job.discards)
    if mirror is not None:
        mirror_set(mirror, index, force)
    return index


def _refuse_varied(source: Source) -> None:
    """Shards hold samples, and neither what varies them nor the order they are visited in."""
    if isinstance(source, EpochSource):
        raise UsageError(
            f"build() was given a {type(source).__name__} whose samples differ from pass to pass "
            "(an augmentation). Shards would hold those of one pass alone. Build before it: "
            "mapped(shards(OUT), augment)."
        )
    order = order_of(source)
    if not is_shuffle(order):
        log.warning(
            "the samples are written as they stand; their order (%s) is not, so put it over the "
            "shards again",
            type(order).__name__,
        )


class _Build:
    """One build; `discards` says that nothing of the draft is worth keeping."""

    def __init__(
        self,
        source: Source,
        draft: FolderDraft | BucketDraft,
        settings: BuildSettings,
        workers: int,
        progress: Progress,
    ):
        self._source, self._draft, self._settings = source, draft, settings
        self._workers, self._progress = workers, progress
        self._num_bytes = 0
        self.discards = False

    def run(self) -> Index:
        self._draft.begin()
        finished = None
        while finished is None:  # a second time at most: everything can be packed
            finished = self._finish()
        if not finished:
            self.discards = True
            raise RecipeError(
                "no sample of the source could be loaded, so there is no set. Try source[0] by "
                "itself."
            )
        index = _index(self._settings, [done.shard for done in finished])
        self._draft.commit(encode(index), map(_note, range(len(finished))))
        return index

    def _finish(self) -> list[FinishedShard] | None:
        """All shards; None if a sample does not fit the layout, which is another from then on."""
        finished = self._take_up()
        try:
            return finished + self._write(finished)
        except LayoutMismatch as unlike:
            log.info(
                "sample %d is not like the first, so samples are packed one by one", unlike.number
            )
        self._settings = self._if_packed()
        return None

    def _if_packed(self) -> BuildSettings:
        return msgspec.structs.replace(self._settings, layout=PackedLayout())

    def _take_up(self) -> list[FinishedShard]:
        """Finished shards of an earlier build of the same; of any other nothing stays."""
        self._num_bytes = 0
        noted = self._draft.read(NOTE)
        for settings in (self._settings, self._if_packed()):  # it may have met an unlike sample
            if noted == msgspec.json.encode(settings):
                self._settings = settings
                finished = list(self._still_good())
                if finished:
                    log.info("resuming after %d finished shards", len(finished))
                self._num_bytes = sum(done.shard.data_bytes for done in finished)
                return finished
        if noted is not None:
            log.info("an unfinished build was of something else; starting over")
        self._draft.clear()
        self._draft.write(NOTE, [msgspec.json.encode(self._settings)])
        return []

    def _still_good(self) -> Iterator[FinishedShard]:
        done: list[FinishedShard] = []
        while (content := self._draft.read(_note(len(done)))) is not None:
            found = try_decode_json(content, FinishedShard)
            if found is None:
                return
            done.append(found)
            index = _index(self._settings, [each.shard for each in done])
            if not self._draft.is_sound(index, len(done) - 1) or not self._is_of_source(found):
                return
            yield found

    def _is_of_source(self, done: FinishedShard) -> bool:
        for number, wanted in ((done.first, done.first_hash), (done.last, done.last_hash)):
            try:
                content = self._encode(_waited_for(self._source, number))
            except (RecipeError, LayoutMismatch):
                return False
            if xxhash.xxh3_128_hexdigest(content) != wanted:
                return False
        return True

    def _write(self, finished: list[FinishedShard]) -> list[FinishedShard]:
        done: list[FinishedShard] = []
        first = finished[-1].last + 1 if finished else 0
        samples = PeekableSamples(encode_samples(self._source, self._encode, first, self._workers))
        num_samples = sum(each.shard.num_samples for each in finished)
        try:
            while samples.has_more():
                number = len(finished) + len(done)
                shard = ShardCutter(self._settings, samples)
                self._draft.write(shard_name(number), shard.parts())
                done.append(shard.finished())
                self._draft.write(_note(number), [msgspec.json.encode(done[-1])])
                num_samples += done[-1].shard.num_samples
                self._num_bytes += done[-1].shard.data_bytes
                self._progress(num_samples, self._num_bytes)
        finally:
            samples.close()
        return done

    def _encode(self, sample: Any) -> bytes | bytearray:
        wanted = self._settings.layout
        if isinstance(wanted, PackedLayout):
            return pack(sample)
        try:
            described = layout.describe(sample)
        except layout.NotFixedSize:
            raise LayoutMismatch(-1) from None
        if described.tree != wanted.tree or described.leaves != wanted.leaves:
            raise LayoutMismatch(-1)
        return layout.encode_row(wanted, described)


def _index(settings: BuildSettings, shards: list[ShardInfo]) -> Index:
    return Index(
        format=FORMAT,
        version=VERSION,
        num_samples=sum(shard.num_samples for shard in shards),
        layout=settings.layout,
        compression=settings.compression,
        shards=tuple(shards),
        origin={"source": settings.identity, "shoal": __version__},
    )


def _note(number: int) -> str:
    return shard_name(number).replace(".bin", ".json")


def _own_name(source: Source) -> str:
    """What a source that can tell calls its content."""
    try:
        return identity_of(source)
    except NoIdentity:
        return ""


def _probe(source: Source) -> tuple[layout.DescribedSample | None, str]:
    """What the first sample is made of, if some others are like it; and a hash of them all."""
    found: list[layout.DescribedSample] = []
    is_rows, digest = True, xxhash.xxh3_128()
    for number in np.unique(np.linspace(0, len(source) - 1, _NUM_PROBES).astype(np.int64)):
        try:
            sample = _waited_for(source, int(number))
        except RecipeError:
            if isinstance(source, SkipsBad):
                continue
            raise
        try:
            described = layout.describe(sample)
            digest.update(repr((described.tree, described.leaves)).encode())
            for content in described.contents:
                digest.update(content.data)
        except layout.NotFixedSize:
            is_rows = False
            digest.update(_packed(sample, int(number)))
            continue
        found.append(described)
        is_rows = is_rows and described[:2] == found[0][:2]
    return (found[0] if is_rows and found else None), digest.hexdigest()


def _waited_for(source: Source, number: int) -> Any:
    with STALLS.on(np.array([number])):
        return load_sample(source, number)


def _packed(sample: Any, number: int) -> bytearray:
    try:
        return pack(sample)
    except RecipeError as error:
        raise RecipeError(f"sample {number}: {error}") from error


def _check(num_samples: int, shard_bytes: int, compress: str | None, workers: int) -> None:
    if num_samples == 0:
        raise UsageError("the source is empty: len() is 0. A set has at least 1 sample.")
    require_whole(shard_bytes, "build(shard_bytes=...)")
    require_whole(workers, "build(workers=...)")
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes={shard_bytes}. A shard holds at least 1 byte.")
    if not 1 <= workers <= MOST_WORKERS:
        raise UsageError(f"workers={workers}. From 1 to {MOST_WORKERS} processes load samples.")
    if compress is not None:
        if compress not in COMPRESSIONS:
            raise UsageError(
                f"compress={compress!r} is not known. {nearest(compress, COMPRESSIONS)}"
            )
        require("zstandard", "zstd")
