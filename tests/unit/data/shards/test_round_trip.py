"""What is built comes back: bit for bit, in both layouts, alone and in batches."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shoal
from shoal.data.batches import Batches
from shoal.data.collating import collate_samples
from shoal.data.orders import order_name
from shoal.data.packing import pack, unpack
from shoal.data.shard_files.format import PackedLayout, RowLayout
from shoal.data.shard_files.reading import PackedSource, RowSource, shards
from shoal.data.shard_files.writing import build
from shoal.errors import UsageError
from tests.unit.data.shards.made import KINDS, NUM, Small, files, make, same, small_blocks

__all__ = ["small_blocks"]

TENSOR_TYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]
ARRAY_TYPES = ["<f4", "<f8", "<f2", "?", "u1", "<u2", "<u4", "<u8", "<i4", "<i8"]
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    shape = tuple(draw(SHAPES))
    dtype = draw(st.sampled_from(TENSOR_TYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@st.composite
def arrays(draw: Any) -> np.ndarray:
    made = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, tuple(draw(SHAPES)))
    return np.asarray(made.astype(draw(st.sampled_from(ARRAY_TYPES))))


NUMBERS = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats())
LEAVES = st.one_of(tensors(), arrays(), NUMBERS)
KEYS = st.one_of(st.text(max_size=3), st.integers(0, 9))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=5,
)
ANYTHING = st.one_of(TREES, st.text(), st.binary(), st.none(), st.integers(2**63, 2**64 - 1))


def like(value: Any, seed: int) -> Any:
    """Another value of the same shapes and types."""
    if isinstance(value, torch.Tensor):
        return (torch.randint(0, 50, tuple(value.shape)) + seed).to(value.dtype)
    if isinstance(value, np.ndarray):
        return np.full_like(value, seed % 2)
    if isinstance(value, dict):
        return {key: like(part, seed) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(like(part, seed) for part in value)
    return type(value)(seed)


def in_tuples(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(in_tuples, value))
    return {k: in_tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=TREES, num=st.integers(1, 5), compress=st.sampled_from([None, "zstd"]))
def test_samples_of_one_shape_are_rows(
    tmp_path_factory: pytest.TempPathFactory, tree: Any, num: int, compress: str | None
) -> None:
    out = tmp_path_factory.mktemp("set") / "out"
    samples = [like(tree, seed) for seed in range(num)]
    index = build(samples, out, shard_bytes=64, compress=compress)
    source = shards(out)
    assert isinstance(index.layout, RowLayout) and isinstance(source, RowSource)
    assert len(source) == num
    for number, sample in enumerate(samples):
        assert same(source[number], sample)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=st.tuples(TREES, TREES), data=st.data(), compress=st.sampled_from([None, "zstd"]))
def test_batches_are_what_collating_gives(
    tmp_path_factory: pytest.TempPathFactory, pair: Any, data: Any, compress: str | None
) -> None:
    samples = [like(pair, seed) for seed in range(5)]
    ids = np.asarray(data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12)))
    out = tmp_path_factory.mktemp("set") / "out"
    build(samples, out, shard_bytes=100, compress=compress)
    source = shards(out)
    assert isinstance(source, RowSource)
    try:
        wanted = collate_samples([samples[number] for number in ids])
    except Exception:  # noqa: BLE001 (an empty container cannot be collated)
        return
    assert same(in_tuples(source.take(ids)), in_tuples(wanted))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(samples=st.lists(ANYTHING, min_size=1, max_size=5), size=st.integers(1, 900))
def test_any_samples_come_back(
    tmp_path_factory: pytest.TempPathFactory, samples: list[Any], size: int
) -> None:
    for compress in (None, "zstd"):
        out = tmp_path_factory.mktemp("set") / "out"
        build(samples, out, shard_bytes=size, compress=compress)
        source = shards(out)
        assert [same(source[i], sample) for i, sample in enumerate(samples)] == [True] * len(source)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_access(tmp_path: Path, kind: str, compress: str | None) -> None:
    source = make(kind, tmp_path / "out", compress)
    opened = shards(tmp_path / "out")
    assert len(opened.index.shards) >= 3 and opened.index.shards[0].num_blocks > 1
    for number in np.random.default_rng(0).integers(-NUM, NUM, 300):
        assert same(opened[int(number)], source[int(number)])
    for number in (NUM, -NUM - 1):
        with pytest.raises(IndexError):
            opened[number]


@pytest.mark.parametrize("size", [1, 24, 40, 4092, 5000, 66000, 150_528])
def test_rows_of_every_length_are_gathered(tmp_path: Path, size: int) -> None:
    """Slots of shards whose length is no multiple of a page have a gap behind them."""
    samples = [(torch.full((size,), i, dtype=torch.uint8), i) for i in range(40)]
    index = build(samples, tmp_path / "out", shard_bytes=9 * size)
    assert isinstance(index.layout, RowLayout)
    source = shards(tmp_path / "out")
    ids = np.random.default_rng(0).permutation(40)
    inputs, target = source.take(ids)
    assert target.tolist() == ids.tolist() and target.dtype == torch.int64
    assert (inputs == torch.from_numpy(ids)[:, None]).all() and inputs.is_contiguous()
    for bad in ([0, 40], [-1], [3, -41]):
        with pytest.raises(IndexError):
            source.take(np.asarray(bad))


def test_samples_are_copies(tmp_path: Path) -> None:
    """Who writes into a sample writes into nothing else."""
    for kind in KINDS:
        source = make(kind, tmp_path / kind)
        opened = shards(tmp_path / kind)
        sample = opened[1]
        for tensor in (sample[0] if kind == "rows" else sample[0]["x"], opened[1][1]):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(99)
        assert same(opened[1], source[1])


@pytest.mark.parametrize("dtype", TENSOR_TYPES, ids=str)
def test_every_type_of_tensor_is_packed(dtype: torch.dtype) -> None:
    """The types of packed samples are those of rows."""
    tensor = torch.arange(6).view(2, 3).to(dtype)
    assert same(unpack(pack((tensor, "text")))[0], tensor)


def test_what_is_only_noted_of_a_tensor_is_kept(tmp_path: Path) -> None:
    seen = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for sample in ((seen, seen.imag), (seen, seen.imag, "packed")):
        build([sample], tmp_path / str(len(sample)))
        found = shards(tmp_path / str(len(sample)))[0]
        assert found[0].tolist() == [1 - 2j, 3 + 4j] and found[1].tolist() == [-2, 4]


def test_the_names_for_python() -> None:
    assert shoal.data.build is build and shoal.data.shards is shards
    assert callable(shoal.data.load_statistics)


def test_one_sample_that_is_unlike_makes_all_packed(tmp_path: Path) -> None:
    samples = [(torch.arange(4), i) for i in range(200)]
    samples[77] = (torch.arange(5), 77)
    index = build(samples, tmp_path / "out", shard_bytes=400)
    assert isinstance(index.layout, PackedLayout)
    source = shards(tmp_path / "out")
    assert all(same(source[i], sample) for i, sample in enumerate(samples))
    assert isinstance(source, PackedSource) and not hasattr(source, "take")


def test_records_are_no_pairs(tmp_path: Path) -> None:
    build([{"x": 1.5, "y": 2}] * 5, tmp_path / "out")
    source = shards(tmp_path / "out")
    assert source[4] == {"x": 1.5, "y": 2} and not hasattr(source, "take")


def test_the_order_goes_by_shards(tmp_path: Path) -> None:
    make("rows", tmp_path / "out")
    source = shards(tmp_path / "out")
    sizes = [shard.num_samples for shard in source.index.shards]
    ids = source.order.ids(np.arange(NUM), 3, 0)
    assert sorted(ids.tolist()) == list(range(NUM)) and len(sizes) >= 3


def test_a_run_reads_them(tmp_path: Path) -> None:
    source = make("rows", tmp_path / "out")
    batches = Batches(shards(tmp_path / "out"), batch_size=6, num_pieces=2)
    seen = []
    for step in range(10):
        for piece in (0, 1):
            found = batches.at(step).piece(piece)
            wanted = collate_samples([source[int(i)] for i in found.ids])
            assert same((found.inputs, found.target), wanted)
            seen += found.ids.tolist()
    assert sorted(seen) == list(range(NUM))


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_workers_does_not_show(tmp_path: Path, kind: str) -> None:
    for workers in (1, 2, 3):
        make(kind, tmp_path / str(workers), workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "3")


def test_a_set_is_a_source_for_another(tmp_path: Path) -> None:
    make("packed", tmp_path / "a", "zstd")
    build(shards(tmp_path / "a"), tmp_path / "b")
    one, other = shards(tmp_path / "a"), shards(tmp_path / "b")
    assert all(same(one[i], other[i]) for i in range(NUM))
    assert one.identity() != other.identity() == shards(tmp_path / "b").identity()


def test_a_source_need_not_have_many_samples(tmp_path: Path) -> None:
    build([(torch.ones(2), 1)], tmp_path / "out")
    assert same(shards(tmp_path / "out").take(np.asarray([0, 0]))[1], torch.tensor([1, 1]))
    assert Small("rows")[NUM - 1][1] == (NUM - 1) % 7


@pytest.mark.parametrize("setting", [{"cache_dir": "copies"}, {"cache_bytes": 5}])
def test_settings_of_copies_are_refused_without_copies(tmp_path: Path, setting: Any) -> None:
    make("rows", tmp_path / "out")
    for where in (tmp_path / "out", str(tmp_path / "out"), f"file://{tmp_path}/out"):
        assert len(shards(where)) == NUM
        with pytest.raises(UsageError, match="cache_dir and cache_bytes have no effect"):
            shards(where, **setting)


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_that_are_open_hold_no_descriptors(
    tmp_path: Path, kind: str, compress: str | None
) -> None:
    make(kind, tmp_path / "out", compress, shard_bytes=100)
    source = shards(tmp_path / "out")
    before = len(os.listdir("/proc/self/fd"))
    for number in range(NUM):
        assert same(source[number], Small(kind)[number])
    assert len(source.index.shards) > 20 and len(source._open) == len(source.index.shards)
    assert len(os.listdir("/proc/self/fd")) == before
    del source
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_several_sets_are_one_source(tmp_path: Path, kind: str) -> None:
    for name, num, size in (("a", 23, 300), ("b", 30, 200)):
        build(Small(kind, num), tmp_path / name, shard_bytes=size)
    one, both = shards([tmp_path / "a"]), shards([tmp_path / "a", str(tmp_path / "b")])
    assert len(both) == 53 and len(one) == 23
    wanted = [*range(23), *range(30)]
    ids = np.random.default_rng(0).permutation(53)
    for number in ids:
        assert same(both[int(number)], KINDS[kind](wanted[number]))
    if kind == "rows":
        assert both.take(ids)[1].tolist() == [KINDS[kind](wanted[n])[1] for n in ids]
    else:
        assert all(map(same, both.many(ids), [KINDS[kind](wanted[n]) for n in ids]))
    alone = shards(tmp_path / "a").order
    for order in (one.order, both.order.first(23)):
        assert order_name(order, 3) == order_name(alone, 3)
    visited = both.order.ids(np.arange(53), 0, 0)
    assert sorted(visited.tolist()) == list(range(53))
    with pytest.raises(UsageError, match="no set was named"):
        shards([])
