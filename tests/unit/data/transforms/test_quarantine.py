"""Quarantine: bad samples are left out of their piece and written down, once, in whole lines."""

import errno
import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.batches import Batches, LoadOptions
from shoal.data.packing import BadSample
from shoal.data.pieces import pieces_in_order
from shoal.data.sources import BatchSource, EpochSource, Pass, SkipsBad, tensors
from shoal.data.transforms import tabular
from shoal.data.transforms.cleaning import clean
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.normalizing import normalized
from shoal.data.transforms.quarantine import quarantine
from shoal.data.transforms.randomness import Random, on
from shoal.data.transforms.statistics import statistics
from shoal.data.views import by_length, in_order
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.logs import for_the_screen


class Some:
    """Sixteen samples, some of which fail in their own way."""

    def __init__(self, failing: Mapping[int, BaseException]):
        self.failing = failing

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        if index in self.failing:
            raise self.failing[index]
        return torch.tensor(float(range(16)[index])), 0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FAILING = {3: ValueError("bad bytes"), 7: BadSample("no header"), 9: RecipeError("sample 9: no")}


@pytest.mark.parametrize("num_pieces", [1, 4])
def test_training_goes_on_without_them(tmp_path: Path, num_pieces: int) -> None:
    path = tmp_path / "deep" / "bad.jsonl"
    source = quarantine(Some(FAILING), path)
    assert not path.exists()
    batches = Batches(source, batch_size=8, num_pieces=num_pieces)
    seen: list[int] = []
    for step in range(4):  # two passes
        for number in range(num_pieces):
            piece = batches.at(step).piece(number)
            assert piece.num_samples == len(piece.ids)
            seen += [] if piece.inputs is None else piece.inputs.int().tolist()
    assert sorted(seen) == sorted([index for index in range(16) if index not in FAILING] * 2)
    found = lines(path)
    assert sorted(line["index"] for line in found) == [3, 7, 9]
    assert {line["error"] for line in found} == {"ValueError", "BadSample", "RecipeError"}
    assert all(line["source"] == "Some" for line in found)


ODD = {
    2: torch.ones(3),
    5: torch.ones(2).double(),
    6: torch.tensor(1.0),
    9: np.ones(2, dtype=np.float32),  # goes with tensors
    11: {"x": torch.ones(2)},
    12: "text",
    14: None,
}


@pytest.mark.parametrize("num_pieces", [1, 4, 16])
@pytest.mark.parametrize("loaders", [0, 1])
def test_samples_of_another_form_are_left_out_under_every_plan(
    tmp_path: Path, num_pieces: int, loaders: int
) -> None:
    path = tmp_path / "bad.jsonl"
    source = quarantine([(ODD.get(i, torch.ones(2)), i) for i in range(16)], path)
    batches = Batches(
        source, batch_size=16, num_pieces=num_pieces, loading=LoadOptions(loaders=loaders)
    )
    try:
        pieces = [batches.at(0).piece(number) for number in range(num_pieces)]
    finally:
        batches.close()
    good = [index for index in range(16) if index not in ODD or index == 9]
    assert sorted(int(index) for piece in pieces for index in piece.ids) == good
    assert sorted(line["index"] for line in lines(path)) == [2, 5, 6, 11, 12, 14]
    assert any("inputs is a tensor [2] of float32" in line["reason"] for line in lines(path))


def test_the_form_is_that_of_the_first_good_sample_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    first = [("text", None), "no pair", (torch.ones(2), 0), (torch.ones(3), 0)]
    source = in_order(quarantine([*first, *[(torch.ones(2), 0)] * 4], path))
    for num_pieces in (2, 4):
        last = Batches(source, batch_size=4, num_pieces=num_pieces).at(0).piece(num_pieces - 1)
        assert last.ids.tolist() == [2][: 4 // num_pieces - 1]
    in_turn = pieces_in_order(source, 4)
    assert [piece.ids.tolist() for piece in in_turn] == [[2], [4, 5, 6, 7]]


def test_sizes_may_differ_where_batches_are_of_one_size_each(tmp_path: Path) -> None:
    samples = [(torch.ones(1 + index % 2), 0) for index in range(8)]
    source = quarantine(samples, tmp_path / "bad.jsonl")
    alone = Batches(source, batch_size=1)
    alike = Batches(by_length(source, [1, 2] * 4, 4), batch_size=4)
    assert all(alone.at(step).piece(0).num_samples for step in range(8))
    assert all(alike.at(step).piece(0).num_samples == 4 for step in range(2))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("x"),
        TimeoutError("x"),
        MemoryError(),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
)
def test_what_is_not_the_samples_fault_ends_the_run(tmp_path: Path, error: Exception) -> None:
    source = quarantine(Some({2: error}), tmp_path / "bad.jsonl")
    with pytest.raises(ShoalError, match="sample 2 was not reached") as caught:
        Batches(source, batch_size=16).at(0).piece(0)
    assert not isinstance(caught.value, RecipeError)
    assert not (tmp_path / "bad.jsonl").exists()


def test_a_missing_or_broken_file_and_an_exit_are_the_samples_fault(tmp_path: Path) -> None:
    failing: dict[int, BaseException] = {
        2: FileNotFoundError(errno.ENOENT, "No such file"),
        4: OSError("image file is truncated"),
        6: SystemExit(0),
    }
    source = quarantine(Some(failing), tmp_path / "bad.jsonl")
    assert Batches(source, batch_size=16).at(0).piece(0).num_samples == 13
    errors = {line["index"]: line["error"] for line in lines(tmp_path / "bad.jsonl")}
    assert errors == {2: "FileNotFoundError", 4: "OSError", 6: "SystemExit"}


def test_so_it_is_for_those_who_look_at_all_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    leaving, outage = Some({6: SystemExit(0)}), Some({6: OSError(errno.EIO, "Input/output error")})
    with pytest.raises(RecipeError, match=r"sample 6 .*SystemExit"):
        statistics(leaving, ["inputs"], identity="leaving")
    with pytest.raises(RecipeError, match=r"sample 6 .*SystemExit"):
        clean(leaving, repair=tuple, identity="leaving")
    assert len(clean(leaving, quarantine=tmp_path / "bad.jsonl", identity="leaving")) == 15
    for look in (
        lambda: statistics(outage, ["inputs"], identity="outage"),
        lambda: clean(outage, quarantine=tmp_path / "none.jsonl", identity="outage"),
    ):
        with pytest.raises(ShoalError, match="sample 6 was not reached: OSError") as caught:
            look()
        assert not isinstance(caught.value, RecipeError)
    with pytest.raises(RecipeError, match=r"sample 2: leave failed: SystemExit"):
        mapped(Some({}), leave)[2]


def leave(sample: Any) -> Any:
    raise SystemExit(0)


def broken_off(sample: Any) -> Any:
    if sample[0] == 2:
        raise ConnectionResetError("gone")
    return sample


@pytest.mark.parametrize("outer", [True, False])
def test_an_outage_in_a_function_ends_the_run(tmp_path: Path, outer: bool) -> None:
    path = tmp_path / "bad.jsonl"
    if outer:
        source: Any = mapped(quarantine(Some({}), path), broken_off)
    else:
        source = quarantine(mapped(Some({}), broken_off), path)
    with pytest.raises(ShoalError, match="sample 2 was not reached: Connection") as caught:
        Batches(source, batch_size=16).at(0).piece(0)
    assert not isinstance(caught.value, RecipeError)
    assert not path.exists()


def test_a_wrong_argument_is_no_samples_fault(tmp_path: Path) -> None:
    percent = partial(tabular.drop, chance=50)
    rows = [(np.zeros(2, np.float32), 0)] * 16
    source = quarantine(mapped(rows, on("inputs", percent)), tmp_path / "bad.jsonl")
    with pytest.raises(UsageError, match="chance=50"):
        Batches(source, batch_size=16).at(0).piece(0)


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    source = quarantine(Some({}), path)
    pids = []
    for _ in range(4):
        pid = os.fork()
        if pid == 0:
            for index in range(50):
                source.record(index, ValueError("x" * 500))
                source.record(index, ValueError("again"))
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    assert sorted(line["index"] for line in lines(path)) == sorted(list(range(50)) * 4)
    source.record(1, ValueError("y" * 5000))
    assert len(lines(path)[-1]["reason"]) == 2000


def test_vary_is_passed_through(tmp_path: Path) -> None:
    def drawn(sample: Any, random: Random) -> Any:
        return random.random(), 0

    plain = quarantine(tensors(torch.arange(4.0), torch.arange(4)), tmp_path / "a")
    assert not isinstance(plain, BatchSource | EpochSource)
    inner = mapped([(1, 2)], drawn)
    varied = quarantine(inner, tmp_path / "b")
    assert isinstance(varied, EpochSource) and not isinstance(varied, BatchSource)
    assert varied.vary(0, Pass(1, 2)) == inner.vary(0, Pass(1, 2))


def test_what_lies_over_it_still_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    source: Any = quarantine(Some(FAILING), path)
    of = statistics([(0.0, 0), (2.0, 0)], ["inputs"])
    source = clean(normalized(mapped(source, tuple), statistics=of), keep=even, quarantine=path)
    before = len(lines(path))
    assert isinstance(source, SkipsBad)
    source.record(2, ValueError("now"))
    assert lines(path)[before]["index"] == source.kept[2] == 4


def even(sample: Any) -> bool:
    return int(sample[0]) % 2 == 1  # scaled: one less


def test_its_notes_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    source = quarantine(Some({}), path)
    assert source.left_out() == set()
    other = quarantine([(0, 0)] * 16, path)
    for index in (4, 2):
        source.record(index, ValueError("odd"))
        other.record(index + 5, ValueError("odd"))
    assert source.left_out() == {2, 4} and other.left_out() == {7, 9}
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"source":"Some","ind')  # being written, or cut off
    assert source.left_out() == {2, 4}
    path.write_bytes(whole[:-9] + b"\n" + whole)
    with pytest.raises(UsageError, match=r"line 4 of the quarantine file .* is damaged"):
        source.left_out()


def test_a_full_disk_is_said_and_the_line_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("shoal"), "propagate", True)
    source = quarantine(Some({}), tmp_path / "bad.jsonl")
    source.path = Path("/dev/full")
    source.record(5, ValueError("odd"))
    assert "cannot be written: No space left" in caplog.text and '"index":5' in caplog.text
    assert "cannot be written: No space left" in for_the_screen[-1]


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match=r"data\.csv holds something other"):
        quarantine(Some({}), tmp_path / "data.csv")
    with pytest.raises(UsageError, match="cannot be written"):
        quarantine(Some({}), tmp_path)
    with pytest.raises(UsageError, match="cannot be written"):
        quarantine(Some({}), tmp_path / "data.csv" / "x")
    assert (tmp_path / "data.csv").read_text() == "a,b\n1,2\n"


def test_a_reason_with_a_name_that_is_no_text_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    source = Some({3: ValueError(os.fsdecode(b"photo-\xff.jpg"))})
    piece = Batches(quarantine(source, tmp_path / "a.jsonl"), batch_size=16).at(0).piece(0)
    assert piece.num_samples == 15
    assert len(clean(source, quarantine=tmp_path / "b.jsonl", identity="odd")) == 15
    for name in ("a.jsonl", "b.jsonl"):
        (line,) = lines(tmp_path / name)
        assert line["index"] == 3 and r"photo-\udcff.jpg" in line["reason"]
