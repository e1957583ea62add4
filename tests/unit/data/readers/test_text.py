"""Lines, JSON lines and CSV: found by an index, named by line when they are bad."""

import bz2
import csv as standard
import gzip
import io
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.batches import Batches
from shoal.data.readers.csv import csv, split_row
from shoal.data.readers.files import BLOCK_BYTES
from shoal.data.readers.linewise import QuoteStyle, StrayQuote, jsonl, lines, spans_of
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.quarantine import quarantine
from shoal.errors import UsageError
from shoal.testing.sources import Case, SourceConformance, in_fork


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


class TestLines(SourceConformance):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        first = written(tmp_path / "a.txt", "one\n\nthree ü\r\n")
        second = written(tmp_path / "b.txt", "no newline at the end")
        expected = ["one", "", "three ü", "no newline at the end"]
        return Case(lambda: lines([first, second]), expected)


class TestJsonLines(SourceConformance):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        path = written(tmp_path / "a.jsonl", '{"a": 1, "b": [1.5, "x"]}\n\n"text"\r\n[null, true]')
        return Case(lambda: jsonl(path), [{"a": 1, "b": [1.5, "x"]}, "text", [None, True]])


class TestCsv(SourceConformance):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        header = "name,text\r\n"
        first = written(tmp_path / "a.csv", header + 'a,"two\nlines, and ""quotes"""\r\n\r\nb,\r\n')
        second = written(tmp_path / "b.csv", header + 'c,"ü"')
        expected = [
            {"name": "a", "text": 'two\nlines, and "quotes"'},
            {"name": "b", "text": ""},
            {"name": "c", "text": "ü"},
        ]
        return Case(lambda: csv([first, str(second)]), expected)


@given(st.text(alphabet='a,"\n\r\0 é', max_size=60), st.integers(1, 9))
def test_lines_do_not_depend_on_how_a_file_is_cut(text: str, size: int) -> None:
    content = text.encode()
    blocks = [content[at : at + size] for at in range(0, len(content), size)]
    starts, stops = spans_of(blocks)
    found = [content[start:stop] for start, stop in zip(starts, stops, strict=True)]
    *ended, last = content.split(b"\n")
    assert found == [line.removesuffix(b"\r") for line in ended] + ([last] if last else [])
    quotes = QuoteStyle(ord('"'), ord(","))
    assert _quoted_spans([content], quotes) == _quoted_spans(blocks, quotes)


def _quoted_spans(blocks: list[bytes], quotes: QuoteStyle) -> Any:
    try:
        return [part.tolist() for part in spans_of(blocks, quotes)]
    except StrayQuote as stray:
        return stray.offset


@given(
    st.lists(
        st.lists(st.text(alphabet='ab,"\n\r é', max_size=6), min_size=2, max_size=2),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([standard.QUOTE_MINIMAL, standard.QUOTE_ALL]),
)
def test_what_the_standard_library_writes_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], end: str, quoting: Any
) -> None:
    buffer = io.StringIO()
    writer = standard.writer(buffer, lineterminator=end, quoting=quoting)
    if quoting == standard.QUOTE_MINIMAL:  # which leaves a carriage return without quotes
        rows = [[field.replace("\r", "") for field in row] for row in rows]
    writer.writerows([["a", "b"], *rows])
    folder = tmp_path_factory.getbasetemp() / "csv"
    folder.mkdir(exist_ok=True)
    source = csv(written(folder / "a.csv", buffer.getvalue()))
    assert [list(row.values()) for row in source] == rows


@given(st.lists(st.text(alphabet='a,"\n', max_size=5), min_size=1, max_size=4))
def test_a_row_is_split_as_the_standard_library_does(fields: list[str]) -> None:
    buffer = io.StringIO()
    standard.writer(buffer, lineterminator="", quoting=standard.QUOTE_ALL).writerow(fields)
    assert split_row(buffer.getvalue(), ",", '"') == fields


def test_a_mark_of_utf8_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", b'\xef\xbb\xbf"a",b\n1,2\n')
    assert csv(path)[0] == {"a": "1", "b": "2"}
    assert lines(path)[0] == '"a",b'


def test_columns_names_delimiters_and_encodings(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tsv", 'é\t5" disk\n'.encode("latin-1"))
    source = csv(path, names=["x", "y"], delimiter="\t", quote=None, encoding="latin-1")
    assert source[0] == {"x": "é", "y": '5" disk'}
    assert csv(written(tmp_path / "b.csv", "a,b,c\n1,2,3\n"), columns=["c", "a"])[0] == {
        "c": "3",
        "a": "1",
    }


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        ("a,b\n1,2\n", {"columns": ["aa"]}, "has no column 'aa'. Did you mean 'a'"),
        ("", {}, "is empty. It must have a header"),
        ("a,a\n1,2\n", {}, "two columns 'a'"),
        ('a,b\n1,2\n5" disk,3\n', {}, r"a.csv, line 3: a quote stands inside"),
        ('a,b\n1,"2\n', {}, "ends inside a quoted field"),
        ("a,b\n", {"delimiter": "::"}, "one ASCII character"),
        ("a,b\n", {"delimiter": '"'}, "must differ"),
        ("a,b\n", {"encoding": "utf-16"}, "several bytes"),
        ("a,b\n", {"encoding": "klingon"}, "is not known"),
        (b"\xff,b\n", {}, "in the header, byte 0xff"),
        ("a,b\n", {"names": []}, "at least one"),
    ],
)
def test_what_is_no_table_is_refused(
    tmp_path: Path, content: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        csv(written(tmp_path / "a.csv", content), **options)


@pytest.mark.parametrize("content", [b'a,b\r"1",2\r', b'{"a": 1}\r{"a": 2}', b"x\r" * (1 << 20)])
def test_lines_that_end_with_a_carriage_return_alone_are_refused(
    tmp_path: Path, content: bytes
) -> None:
    path = written(tmp_path / "a.txt", content)
    for read in (lines, jsonl, csv):
        with pytest.raises(UsageError, match=r"a\.txt: lines end with CR alone.*tr '\\r' '\\n'"):
            read(path)


def test_a_table_whose_last_line_alone_ends_in_a_newline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lines end with CR alone"):
        csv(written(tmp_path / "a.csv", b"x,y\r1,2\r3,4\n"))


def test_a_carriage_return_within_a_line_is_part_of_it(tmp_path: Path) -> None:
    assert list(lines(written(tmp_path / "a.txt", "10 %\r20 %\ndone\r\n"))) == [
        "10 %\r20 %",
        "done",
    ]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_file_is_refused(tmp_path: Path, pack: Any) -> None:
    path = written(tmp_path / "a.csv.packed", pack(b"a,b\n1,2\n"))
    for read in (lines, jsonl, csv):
        with pytest.raises(UsageError, match=r"a\.csv\.packed is compressed.*Unpack.*data build"):
            read(path)
    assert list(lines(written(tmp_path / "a.txt", "BZhang\nPKW\n"))) == ["BZhang", "PKW"]


def test_files_of_one_source_have_one_header(tmp_path: Path) -> None:
    paths = [written(tmp_path / "a.csv", "a,b\n"), written(tmp_path / "b.csv", "a,c\n")]
    with pytest.raises(UsageError, match=r"b.csv has the columns a, c"):
        csv(paths)


def test_a_bad_row_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    text = 'a,b\n"1\n1",2\n3\n4,5\n"6"x,7\n8,\udcff\n'.encode("utf-8", "surrogateescape")
    source = csv(written(tmp_path / "a.csv", text))
    assert len(source) == 5
    assert source[0] == {"a": "1\n1", "b": "2"} and source[2] == {"a": "4", "b": "5"}
    with pytest.raises(BadRecord, match=r"a.csv, line 4 \(sample 1\): 1 fields"):
        source[1]
    with pytest.raises(BadRecord, match=r"line 6 \(sample 3\): .,. expected after"):
        source[3]
    with pytest.raises(BadRecord, match=r"line 7 \(sample 4\): byte 0xff is not utf-8"):
        source[-1]


def test_a_carriage_return_behind_a_quoted_row_is_named(tmp_path: Path) -> None:
    source = csv(written(tmp_path / "a.csv", b'a,b\n"1",2\r\r\n"3",4\r5\n"6\r",7\n'))
    for index, said in ((0, "behind the last field"), (1, "new-line character")):
        with pytest.raises(BadRecord, match=rf"line {index + 2} .*{said}"):
            source[index]
    assert source[2] == {"a": "6\r", "b": "7"}


def test_a_bad_line_of_json_is_named(tmp_path: Path) -> None:
    source = jsonl(written(tmp_path / "a.jsonl", b'1\n\n{"a": \n\xff\n' + b"[" * 5000 + b"\n2"))
    assert source[0] == 1 and source[-1] == 2
    with pytest.raises(BadRecord, match=r"a.jsonl, line 3 \(sample 1\): no JSON"):
        source[1]
    with pytest.raises(BadRecord, match=r"line 4 \(sample 2\): byte 0xff"):
        source[2]
    with pytest.raises(BadRecord, match=r"line 5 \(sample 3\)"):
        source[3]


def test_empty_and_single(tmp_path: Path) -> None:
    assert len(lines(written(tmp_path / "a", ""))) == 0
    assert list(lines(written(tmp_path / "b", "\n"))) == [""]
    assert len(jsonl(written(tmp_path / "c", "\n\r\n"))) == 0
    assert len(csv(written(tmp_path / "d", "a,b\n"))) == 0
    assert list(csv(written(tmp_path / "e", "a\n7"))) == [{"a": "7"}]


def test_a_field_may_be_larger_than_a_block(tmp_path: Path) -> None:
    long = "x\n" * (BLOCK_BYTES // 2 + 10)
    source = csv(written(tmp_path / "a.csv", f'a,b\n1,"{long}"\n2,3\n'))
    assert source[0]["b"] == long and source[1] == {"a": "2", "b": "3"}


def test_a_file_that_changed_or_vanished_is_lost(tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "one\ntwo\n")
    source = lines(path)
    assert source[1] == "two"
    path.write_text("one\nTWO\n")
    os.utime(path, ns=(0, 0))
    with pytest.raises(SourceLost, match=r"a.txt changed after it was opened"):
        source[1]
    fresh = lines(path)
    path.unlink()
    assert fresh[0] == "one"  # this process has it open

    def elsewhere() -> None:
        with pytest.raises(SourceLost, match=r"a.txt cannot be opened any more: No such file"):
            fresh[0]

    in_fork(elsewhere)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, said in [("missing", "does not exist"), (".", "directory"), ("pipe", "regular")]:
        with pytest.raises(UsageError, match=said):
            lines(tmp_path / path)
    with pytest.raises(UsageError, match="no file was named"):
        lines([])


def test_identity_follows_the_content(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a", "x\n1\n"), written(tmp_path / "b", "x\n1\n")
    assert lines(first).identity() == lines(second).identity() != jsonl(second).identity()
    assert csv(first).identity() != csv(first, names=["x"]).identity()
    assert lines(written(tmp_path / "b", "x\n2\n")).identity() != lines(first).identity()


def test_many_files_keep_few_open(tmp_path: Path) -> None:
    paths = [written(tmp_path / f"{number}", f"{number}\n") for number in range(200)]
    source = lines(paths)
    before = len(os.listdir("/proc/self/fd"))
    assert [source[number] for number in range(200)] == [str(number) for number in range(200)]
    assert len(os.listdir("/proc/self/fd")) <= before + 64


def test_a_bad_row_is_left_out_of_training_under_quarantine(tmp_path: Path) -> None:
    source = csv(written(tmp_path / "a.csv", "x,y\n1,0\n2\n3,1\n4,0\n"))
    pairs = mapped(source, lambda row: (torch.tensor([float(row["x"])]), int(row["y"])))
    with pytest.raises(BadRecord, match=r"a.csv, line 3 \(sample 1\)"):
        Batches(pairs, batch_size=4).at(0).piece(0)
    kept = quarantine(pairs, tmp_path / "bad.jsonl")
    piece = Batches(kept, batch_size=4).at(0).piece(0)
    assert sorted(piece.inputs[:, 0].tolist()) == [1, 3, 4]
    (line,) = (tmp_path / "bad.jsonl").read_text().splitlines()
    assert "line 3" in line
    (tmp_path / "a.csv").write_text("x,y\n")
    with pytest.raises(SourceLost, match=r"a.csv changed"):  # no sample's fault
        Batches(kept, batch_size=4).at(0).piece(0)


def test_a_file_that_changes_while_it_is_read_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    os.utime(path, ns=(0, 0))
    source, read = lines(path), os.pread

    def after_a_change(*arguments: int) -> bytes:
        path.write_text("ONE\nTWO\n")
        return read(*arguments)

    monkeypatch.setattr(os, "pread", after_a_change)
    with pytest.raises(SourceLost, match=r"a.txt changed"):
        source[0]
