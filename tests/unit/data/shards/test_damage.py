"""2,000 flips, truncations and swaps: none is accepted, and no wrong sample is ever given.

The quick suite has some 200 of them, the long one all.
"""

import errno
import hashlib
import os
import random
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from shoal.data.readers.records import SourceLost
from shoal.data.shard_files import format as formats
from shoal.data.shard_files import reading
from shoal.data.shard_files.format import INDEX, SEAL, BadShards, NoShards
from shoal.data.shard_files.locations import ShardDirectory, read_index
from shoal.data.shard_files.reading import LostSample, shards
from shoal.data.shard_files.verifying import find_faults
from shoal.errors import ShoalError
from tests.unit.data.shards.made import KINDS, NUM, Small, files, make, same, small_blocks

__all__ = ["small_blocks"]

Contents = dict[str, bytes]


def flip(contents: Contents, draw: random.Random) -> Contents:
    name = draw.choice(list(contents))
    changed = bytearray(contents[name])
    changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return contents | {name: bytes(changed)}


def truncate(contents: Contents, draw: random.Random) -> Contents:
    name = draw.choice(list(contents))
    return contents | {name: contents[name][: draw.randrange(len(contents[name]))]}


def lengthen(contents: Contents, draw: random.Random) -> Contents:
    name = draw.choice(list(contents))
    return contents | {name: contents[name] + draw.randbytes(draw.randint(1, 9))}


def swap_files(contents: Contents, draw: random.Random) -> Contents:
    one, other = draw.sample(sorted(contents), 2)
    return contents | {one: contents[other], other: contents[one]}


def swap_parts(contents: Contents, draw: random.Random) -> Contents:
    """Two stretches of a shard change places."""
    name = draw.choice([name for name in contents if name.endswith(".bin")])
    changed, size = bytearray(contents[name]), draw.choice([1, 8, 48, 100])
    one, other = draw.randrange(len(changed) - size), draw.randrange(len(changed) - size)
    kept = changed[one : one + size]
    changed[one : one + size] = changed[other : other + size]
    changed[other : other + size] = kept
    return contents | {name: bytes(changed)}


def zero(contents: Contents, draw: random.Random) -> Contents:
    name = draw.choice([name for name in contents if name.endswith(".bin")])
    start = draw.randrange(len(contents[name]))
    changed = contents[name][:start] + bytes(len(contents[name]) - start)
    return contents | {name: changed}


def remove(contents: Contents, draw: random.Random) -> Contents:
    name = draw.choice(sorted(contents))
    return {key: value for key, value in contents.items() if key != name}


HARMS: list[Callable[[Contents, random.Random], Contents]] = [
    *(flip, flip, flip, truncate, lengthen, swap_files, swap_parts, zero, remove)
]


def write(folder: Path, before: Contents, after: Contents) -> None:
    for name in before.keys() - after.keys():
        os.unlink(folder / name)
    for name, content in after.items():
        if before.get(name) != content:
            (folder / name).write_bytes(content)


def is_found(folder: Path) -> bool:
    try:
        return any(find_faults(ShardDirectory(folder), read_index(ShardDirectory(folder))))
    except BadShards:
        return True


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("num", [50, pytest.param(500, marks=pytest.mark.full)])
@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_damage_is_accepted(tmp_path: Path, kind: str, compress: str | None, num: int) -> None:
    folder, draw, num_harmed = tmp_path / "out", random.Random(f"{kind}{compress}"), 0
    make(kind, folder, compress)
    whole = [Small(kind)[number] for number in range(NUM)]
    contents = files(folder)
    while num_harmed < num:
        harmed = draw.choice(HARMS)(contents, draw)
        if harmed == contents:
            continue
        num_harmed += 1
        write(folder, contents, harmed)
        assert is_found(folder), f"harm {num_harmed} was not found"
        assert num_lost(folder, whole), f"harm {num_harmed} was read over"
        write(folder, harmed, contents)
        for name in harmed.keys() - contents.keys():
            os.unlink(folder / name)
    assert not is_found(folder) and not num_lost(folder, whole)


def num_lost(folder: Path, whole: list) -> int:
    """How many samples are refused; those that are given must be the right ones."""
    try:
        source, lost = shards(folder, strict=False), 0
    except BadShards:
        return len(whole)
    for number, wanted in enumerate(whole):
        try:
            assert same(source[number], wanted), f"sample {number} is wrong"
        except LostSample as error:
            assert f"sample {number} of {folder}" in str(error) and "shard-" in str(error)
            lost += 1
    return lost


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_a_bad_block_costs_its_own_samples_alone(tmp_path: Path, compress: str | None) -> None:
    make("rows", tmp_path / "out", compress)
    name = tmp_path / "out" / "shard-00001.bin"
    content = bytearray(name.read_bytes())
    content[3] ^= 4
    name.write_bytes(content)
    source = shards(tmp_path / "out")
    per_shard = source.index.shards[0].num_samples
    bad = range(per_shard, 2 * per_shard)
    for number in range(NUM):
        if number in bad:
            with pytest.raises(LostSample, match=r"shard-00001.bin: the bytes 0 to \d+, which are"):
                source[number]
        else:
            source[number]
    source.take(np.arange(per_shard))
    with pytest.raises(LostSample, match=f"sample {per_shard} of"):
        source.take(np.arange(per_shard - 2, per_shard + 3))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.unlink(), "shard-00001.bin is missing"),
        (lambda path: os.truncate(path, 40), r"shard-00001.bin has 40 bytes; \d+ were written"),
        (lambda path: (path.unlink(), path.mkdir()), "shard-00001.bin is not a file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "shard-00001.bin is not a file"),
    ],
)
def test_a_set_that_is_not_whole_is_refused(tmp_path: Path, harm, told: str) -> None:
    make("rows", tmp_path / "out")
    harm(tmp_path / "out" / "shard-00001.bin")
    with pytest.raises(BadShards, match=told):
        shards(tmp_path / "out")
    source = shards(tmp_path / "out", strict=False)
    source[0]
    with pytest.raises(LostSample, match=told):
        source[source.index.shards[0].num_samples]


@pytest.mark.parametrize("file", ["index.json", "index.sha256"])
def test_a_pipe_in_the_place_of_a_small_file_is_not_waited_for(tmp_path: Path, file: str) -> None:
    make("rows", tmp_path / "out")
    (tmp_path / "out" / file).unlink()
    os.mkfifo(tmp_path / "out" / file)
    with pytest.raises(BadShards, match=f"{file} is not a file"):
        shards(tmp_path / "out")


def test_missing_shards_are_named(tmp_path: Path) -> None:
    make("packed", tmp_path / "out", shard_bytes=300)
    for number in range(1, 6):
        (tmp_path / "out" / f"shard-{number:05d}.bin").unlink()
    told = r"shard-00001.bin, shard-00002.bin, shard-00003.bin and 2 more are missing. .*build it"
    with pytest.raises(BadShards, match=told):
        shards(tmp_path / "out")


def test_errors_do_not_grow(tmp_path: Path) -> None:
    """A shard that failed is refused for a minute, each time with an error of its own."""
    make("rows", tmp_path / "out")
    (tmp_path / "out" / "shard-00000.bin").unlink()
    source, depths = shards(tmp_path / "out", strict=False), []
    for _ in range(5):
        with pytest.raises(LostSample) as lost:
            source[0]
        assert lost.value.__cause__ is not None
        depths.append(len(traceback.extract_tb(lost.value.__cause__.__traceback__)))
    assert len(set(depths[1:])) == 1


def test_a_disk_that_does_not_let_us_is_no_sample_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", tmp_path / "out")
    source = shards(tmp_path / "out")

    def refuse(path: Path) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(reading, "map_file", refuse)
    with pytest.raises(SourceLost, match=r"sample 0 of .* was not reached: .*Too many open files"):
        source[0]


def test_the_digest_is_the_one_that_was_sealed(tmp_path: Path) -> None:
    """Even with fields that this version does not know."""
    make("rows", tmp_path / "out")
    content, seal = changed(tmp_path / "out", later="more")
    assert formats.decode(content, seal).digest == hashlib.sha256(content).hexdigest()
    index = read_index(ShardDirectory(tmp_path / "out"))
    assert index.digest == hashlib.sha256(formats.encode(index)).hexdigest()


def test_there_may_be_no_set(tmp_path: Path) -> None:
    with pytest.raises(NoShards, match=f"{SEAL} is missing"):
        shards(tmp_path)
    make("rows", tmp_path / "out")
    (tmp_path / "out" / INDEX).unlink()
    with pytest.raises(BadShards, match=f"{INDEX} is missing"):
        shards(tmp_path / "out")
    with pytest.raises(NoShards):
        shards(tmp_path / "out" / SEAL)


def test_a_stray_shard_is_named(tmp_path: Path) -> None:
    make("rows", tmp_path / "out")
    (tmp_path / "out" / "shard-00099.bin").touch()
    (tmp_path / "out" / "README").touch()
    place = ShardDirectory(tmp_path / "out")
    assert list(find_faults(place, read_index(place), 2)) == [
        "shard-00099.bin does not belong to it."
    ]


def sealed(content: bytes) -> tuple[bytes, bytes]:
    return content, formats.seal(content)


def changed(folder: Path, **fields: object) -> tuple[bytes, bytes]:
    index = msgspec.json.decode((folder / INDEX).read_bytes())
    return sealed(msgspec.json.encode(index | fields))


LAYOUT = {"kind": "rows", "row_bytes": 48, "block_rows": 1, "shard_rows": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "other"},
        {"version": 2},
        {"num_samples": 61},
        {"compression": "gzip"},
        {"shards": []},
        {"shards": [{"num_samples": -1, "num_blocks": 1, "data_bytes": 1, "hash": "0" * 32}]},
        {"shards": [{"num_samples": 2**60, "num_blocks": 1, "data_bytes": 1, "hash": "0" * 32}]},
        {"shards": [{"num_samples": 60, "num_blocks": 2, "data_bytes": 1, "hash": "0" * 32}]},
        {"shards": [{"num_samples": 60, "num_blocks": 1, "data_bytes": 2880, "hash": "x"}]},
        {"layout": {"kind": "packed"}, "num_samples": 1},
        {"layout": LAYOUT | {"tree": 0, "leaves": []}},
        {"layout": LAYOUT | {"tree": {"dict": [[[], 0]]}, "leaves": []}},
        {"layout": LAYOUT | {"tree": {"tuple": "ab"}, "leaves": []}},
        {"layout": LAYOUT | {"row_bytes": 0, "tree": {"tuple": []}, "leaves": []}},
        {"layout": LAYOUT | {"row_bytes": 2**60, "tree": {"tuple": []}, "leaves": []}},
        {
            "layout": LAYOUT
            | {
                "tree": 0,
                "leaves": [{"kind": "tensor", "dtype": "int64", "shape": [7], "start": 0}],
            }
        },
        {
            "layout": LAYOUT
            | {"tree": 0, "leaves": [{"kind": "int", "dtype": "int8", "shape": [], "start": 0}]}
        },
        {
            "layout": LAYOUT
            | {"tree": 0, "leaves": [{"kind": "tensor", "dtype": "x", "shape": [], "start": 0}]}
        },
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, fields: dict) -> None:
    make("rows", tmp_path / "out")
    with pytest.raises(BadShards, match=INDEX):
        formats.decode(*changed(tmp_path / "out", **fields))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff", b"[" * 100_000])
def test_what_is_no_index_is_refused(content: bytes) -> None:
    with pytest.raises(BadShards, match=INDEX):
        formats.decode(*sealed(content))


def test_a_table_that_was_made_up_is_refused(tmp_path: Path) -> None:
    """Sealed and hashed as it should be, with offsets that point elsewhere."""
    make("packed", tmp_path / "out")
    place = ShardDirectory(tmp_path / "out")
    index = read_index(place)
    shard = index.shards[0]
    words = np.frombuffer(
        (tmp_path / "out" / "shard-00000.bin").read_bytes()[shard.data_bytes :][
            -shard.data_bytes % 8 :
        ],
        "<u8",
    )
    for at in range(shard.num_blocks, len(words)):
        for value in (0, 2**63, int(words[at]) + 1):
            made = words.copy()
            made[at] = value
            if (made == words).all():
                continue
            table = bytes(-shard.data_bytes % 8) + made.tobytes()
            forged = msgspec.structs.replace(shard, hash=formats.table_hash(table))
            wrong = msgspec.structs.replace(index, shards=(forged, *index.shards[1:]))
            try:
                found = formats.decode_table(wrong, 0, table)
            except ShoalError:
                continue
            assert found.offsets is not None  # a sample ends elsewhere, inside of its block
            assert (np.diff(found.offsets.astype(np.int64)) > 0).all()
