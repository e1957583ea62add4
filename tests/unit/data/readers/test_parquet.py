"""Parquet: rows by index, a row group at a time, and pairs out of columns."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.batches import Batches
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.readers.tables import _ParquetFile, parquet
from shoal.data.readers.tables import table as open_table
from shoal.errors import UsageError
from shoal.testing.sources import Case, SourceConformance, in_fork

pa = pytest.importorskip("pyarrow", reason="needs the extra parquet")
pq = pytest.importorskip("pyarrow.parquet")


def table(start: int, stop: int) -> Any:
    rows = range(start, stop)
    return pa.table(
        {
            "x": pa.array([[row, row + 0.5] for row in rows], pa.list_(pa.float32())),
            "y": pa.array(list(rows), pa.int64()),
            "text": pa.array([f"row {row}" if row % 3 else None for row in rows], pa.string()),
            "fixed": pa.array([[row, 1, 2] for row in rows], pa.list_(pa.int16(), 3)),
            "ragged": pa.array([list(range(row % 3)) for row in rows], pa.list_(pa.int64())),
            "gaps": pa.array([row if row != 4 else None for row in rows], pa.int32()),
            "kind": pa.array(
                [["a", "b"][row % 2] for row in rows], pa.string()
            ).dictionary_encode(),
        }
    )


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pq.write_table(table(0, 7), made[0], row_group_size=3)
    pq.write_table(table(7, 9), made[1], write_page_checksum=True)
    return made


class TestRows(SourceConformance):
    @pytest.fixture
    def case(self, paths: list[Path]) -> Case:
        expected = [
            {
                "text": f"row {row}" if row % 3 else None,
                "x": np.array([row, row + 0.5], np.float32),
                "ragged": np.arange(row % 3),
                "y": row,
                "kind": "ab"[row % 2],
            }
            for row in range(9)
        ]
        return Case(lambda: parquet(paths, columns=list(expected[0]), window=2), expected)


class TestPairs(SourceConformance):
    @pytest.fixture
    def case(self, paths: list[Path], memory: Any) -> Case:
        for path in paths:
            memory.put(str(path), f"/shoal-parquet/{path.name}")
        expected = [
            (
                (torch.tensor([row, row + 0.5]), torch.tensor([row, 1, 2], dtype=torch.int16)),
                {"label": torch.tensor(row)},
            )
            for row in range(9)
        ]
        urls = [f"memory://shoal-parquet/{path.name}" for path in paths]
        return Case(lambda: parquet(urls).pairs(("x", "fixed"), {"label": "y"}), expected)


def test_a_pass_decodes_each_group_once(paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    read = _ParquetFile.read
    monkeypatch.setattr(
        _ParquetFile,
        "read",
        lambda self, block, columns, where: (
            decoded.append(tuple(columns)) or read(self, block, columns, where)
        ),
    )
    source = parquet(paths, columns=["x", "y"], window=2).pairs("x", "y")
    batches = Batches(source, batch_size=3, seed=1)
    seen = [batches.at(step).piece(0).target.tolist() for step in range(3)]
    visited = [row for rows in seen for row in rows]
    assert sorted(visited) == list(range(9)) != visited
    assert len(decoded) == 4 and set(decoded) == {("x", "y")}


def test_irregular_columns_are_named(paths: list[Path]) -> None:
    rows = parquet(paths)
    with pytest.raises(BadRecord, match=r"sample 4\): a value is null"):
        rows.pairs("gaps", "y").take(np.array([0, 4, 5]))
    with pytest.raises(BadRecord, match=r"'ragged' of sample 2 has the shape \[2\], and of sample"):
        rows.pairs("ragged", "y").take(np.array([1, 4, 2]))
    with pytest.raises(BadRecord, match=r"'ragged' of sample 8 has the shape \[2\]"):
        rows.pairs("ragged", "y").take(np.array([1, 8]))
    assert rows.pairs("gaps", "y")[3][0] == 3


def test_wrong_columns_are_refused(paths: list[Path]) -> None:
    with pytest.raises(UsageError, match=r"a.parquet has no column 'txt'. Did you mean 'text'"):
        parquet(paths, columns=["txt"])
    with pytest.raises(UsageError, match="has no column 'why'"):
        parquet(paths).pairs("x", "why")
    with pytest.raises(UsageError, match=r"column 'text' of .* holds string, which is no number"):
        parquet(paths).pairs("text", "y")
    with pytest.raises(UsageError, match="window=0"):
        parquet(paths, window=0)


def test_files_that_disagree_are_refused(paths: list[Path]) -> None:
    pq.write_table(pa.table({"y": pa.array([1.0])}), paths[1])
    with pytest.raises(UsageError, match=r"'y' holds double in .*b.parquet and int64 in .*a.par"):
        parquet(paths, columns=["y"])
    with pytest.raises(UsageError, match=r"b.parquet has no column 'x'"):
        parquet(paths)


def test_damage_is_seen(paths: list[Path], tmp_path: Path) -> None:
    whole = paths[1].read_bytes()
    for content in (b"", b"PAR1", whole[:-9], b"no parquet file at all"):
        paths[0].write_bytes(content)
        with pytest.raises(UsageError, match=r"a.parquet is no Parquet file"):
            parquet(paths[0])
    at = whole.index(b"row 7")
    paths[1].write_bytes(whole[:at] + b"ROW" + whole[at + 3 :])
    with pytest.raises(BadRecord, match=r"b.parquet: row group 0 \(sample 0\) cannot be decoded"):
        parquet(paths[1])[0]


def test_a_changed_file_is_lost(paths: list[Path]) -> None:
    source = parquet(paths)
    assert source[0]["y"] == 0
    pq.write_table(table(20, 27), paths[0], row_group_size=3)
    os.utime(paths[0], ns=(0, 0))
    with pytest.raises(SourceLost, match=r"a.parquet changed"):
        source[6]
    assert source[0]["y"] == 0  # of a group that was decoded before

    def elsewhere() -> None:
        with pytest.raises(SourceLost, match=r"a.parquet changed"):
            source[0]

    in_fork(elsewhere)


def test_empty_and_single(tmp_path: Path) -> None:
    pq.write_table(table(0, 0), tmp_path / "none.parquet")
    pq.write_table(table(0, 1), tmp_path / "one.parquet")
    assert len(parquet(tmp_path / "none.parquet")) == 0
    both = parquet([tmp_path / "none.parquet", tmp_path / "one.parquet"])
    assert len(both) == 1 and both[0]["y"] == 0


def test_want_of_memory_is_no_fault_of_a_row(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    monkeypatch.setattr(_ParquetFile, "read", fail)
    with pytest.raises(MemoryError):
        parquet(paths)[0]


def written(tmp_path: Path, kind: str) -> list[Path]:
    """The same rows in two files of a kind."""
    paths = [tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"]
    for path, (start, stop) in zip(paths, [(0, 7), (7, 9)], strict=True):
        rows = pa.table({"y": list(range(start, stop)), "z": [n / 2 for n in range(start, stop)]})
        if kind == "csv":
            pytest.importorskip("pyarrow.csv").write_csv(rows, path)
        elif kind == "json":
            path.write_text("".join(f'{{"y": {n}, "z": {n / 2}}}\n' for n in range(start, stop)))
        elif kind == "arrow":
            with pa.ipc.new_file(path, rows.schema) as file:
                file.write_table(rows, max_chunksize=3)
        else:
            pq.write_table(rows, path, row_group_size=3)
    return paths


KINDS = ["parquet", "arrow", "csv", "json"]


@pytest.mark.full
class TestKinds(SourceConformance):
    @pytest.fixture(params=KINDS)
    def case(self, request: pytest.FixtureRequest, tmp_path: Path) -> Case:
        paths = written(tmp_path, request.param)
        kept = [{"z": n / 2, "y": n} for n in range(9) if n >= 4]
        found = [("y", ">=", 4)]
        return Case(lambda: open_table(paths, columns=["z", "y"], where=found), kept)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    paths = written(tmp_path, kind)
    rows = open_table(paths)
    assert list(rows) == [{"y": n, "z": n / 2} for n in range(9)]
    inputs, target = rows.pairs("z", "y").take(np.array([8, 0, 5]))
    assert inputs.tolist() == [4.0, 0.0, 2.5] and target.tolist() == [8, 0, 5]
    some = open_table(paths, where=pa.dataset.field("y") == 7)
    assert list(some) == [{"y": 7, "z": 3.5}] and some.identity() != rows.identity()
    assert some.content_name() != rows.content_name()
    with pytest.raises(UsageError, match=r"(?s)a\.\w+ cannot be filtered: .*`where`"):
        open_table(paths, where=[("why", "=", 1)])
    paths[1].write_bytes(b"\x00\xff not a table")
    with pytest.raises(UsageError, match=r"b\.\w+"):
        open_table(paths)


MANY = 200_000  # rows, more than the first megabyte, from which a scan takes fields and types


def test_fields_and_types_are_those_of_all_rows(tmp_path: Path) -> None:
    for name, content, last in [
        ("a.jsonl", '{"a": 1}\n' * MANY + '{"a": 2, "late": "x"}', {"a": 2, "late": "x"}),
        ("b.jsonl", '{"a": 1}\n' * MANY + '{"a": 1.5}', {"a": 1.5}),
        ("c.csv", "a,b\n" + "1,2\n" * 2 * MANY + "x,3\n", {"a": "x", "b": 3}),
        ("d.csv", "a,b\n" + '1,"x\ny ""z"""\n' * MANY, {"a": 1, "b": 'x\ny "z"'}),
    ]:
        (tmp_path / name).write_text(content)
        assert open_table(tmp_path / name)[-1] == last, name


def test_a_row_that_does_not_fit_is_named(tmp_path: Path) -> None:
    for name, content, said in [
        ("a.csv", "a,b\n" + "1,2\n" * 2 * MANY + "3\n", r"a\.csv .*Row #400002: Expected 2 col"),
        ("b.json", '{"a": 1}\n' * MANY + '{"a": "x"}', r"b\.json .*to string in row 200000"),
        ("c.csv", "a,a\n1,2\n", r"c\.csv has two columns 'a'"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match=said) as caught:
            open_table(tmp_path / name)
        assert "`where`" not in str(caught.value)


def test_what_a_filter_rules_out_is_not_read(tmp_path: Path) -> None:
    """Statistics of row groups: a damaged one that cannot match is never decoded."""
    path = tmp_path / "a.parquet"
    rows = pa.table({"y": list(range(2000)), "t": [f"text {n}" for n in range(2000)]})
    pq.write_table(rows, path, row_group_size=1000, compression=None, use_dictionary=False)
    whole = path.read_bytes()
    at = whole.index((3).to_bytes(8, "little"))  # of the first group
    path.write_bytes(whole[: at - 30] + bytes(20) + whole[at - 10 :])
    some = parquet(path, where=[("y", ">=", 1500)])
    assert len(some) == 500 and some[0] == {"y": 1500, "t": "text 1500"}


def test_wrong_kinds_and_filters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n")
    with pytest.raises(UsageError, match="'txt' is no kind of table"):
        open_table(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="is no filter"):
        open_table(written(tmp_path, "csv"), where=[("y", "~", 1)])
