"""Sinks: whole lines, TensorBoard scalars, and a queue that never holds up a step."""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shoal import logs
from shoal.errors import UsageError
from shoal.events.images import encode_png
from shoal.events.sinks import BackgroundSink, JsonLinesSink, TensorBoardSink, scalars


class Kept:
    """A sink that keeps what it gets; `gate` holds it back and `broken` makes it fail."""

    def __init__(self, broken: bool = False) -> None:
        self.records: list[dict[str, object]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.broken = broken
        self.entered = threading.Event()
        self.closed = threading.Event()

    def write(self, *records):
        self.entered.set()
        self.gate.wait()
        if self.broken:
            raise OSError("disk full")
        self.records.extend(records)

    def close(self):
        self.closed.set()


@pytest.fixture
def warnings(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logs.log, "warning", said.append)
    monkeypatch.setattr(logs, "_said", set())
    return said


def lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_json_lines_appends_and_writes_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    for step in (1, 2):
        sink = JsonLinesSink(path)
        sink.write({"step": step, "loss": float("nan"), "rate": float("inf")})
        sink.close()
    assert lines(path) == [{"step": step, "loss": None, "rate": None} for step in (1, 2)]


def test_json_lines_knows_numbers_of_numpy_and_torch_and_paths(tmp_path):
    import numpy as np
    import torch

    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    sink.write({"a": np.float32(1.5), "b": torch.tensor(2), "c": Path("x")})
    with pytest.raises(TypeError, match="object has no form in JSON"):
        sink.write({"a": object()})
    sink.write({"after": 1})
    sink.close()
    assert lines(path) == [{"a": 1.5, "b": 2, "c": "x"}, {"after": 1}]


def test_json_lines_starts_afresh_after_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    sink = JsonLinesSink(path)
    sink.write({"step": 3})
    sink.close()
    assert path.read_bytes() == b'{"step": 1}\n{"st\n{"step":3}\n'


def test_json_lines_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be opened for writing"):
        JsonLinesSink(tmp_path / "file" / "metrics.jsonl")


def test_scalars_are_flat_numbers():
    record = {"step": 1, "times": {"data": 0.5}, "note": "text", "none": None, "flag": True}
    assert dict(scalars(record)) == {"step": 1.0, "times/data": 0.5}


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorBoardSink(tmp_path)
    assert not list(tmp_path.iterdir())
    sink.write({"step": 1, "loss": 2.0, "times": {"data": 0.1}, "time": 1.0, "mark": 77})
    with pytest.raises(UsageError, match="has no step"):
        sink.write({"event": "seat"})
    sink.close()
    (events,) = tmp_path.iterdir()
    assert b"times/data" in events.read_bytes() and b"loss" in events.read_bytes()
    assert b"mark" not in events.read_bytes(), "which means nothing to people"


def test_tensorboard_has_what_callbacks_log(tmp_path):
    pytest.importorskip("tensorboardX")
    pixels = np.zeros((2, 3, 1), dtype=np.uint8)
    (tmp_path / "image.png").write_bytes(encode_png(pixels))
    sink = TensorBoardSink(tmp_path / "tensorboard")
    images = {"sample": "image.png", "gone": "missing.png"}
    sink.write({"step": 1, "logged": {"gap": 0.5}, "texts": {"note": "words"}, "images": images})
    sink.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    content = events.read_bytes()
    assert b"logged/gap" in content and b"words" in content
    assert b"sample" in content and encode_png(pixels) in content and b"gone" not in content


def test_background_writes_in_order_and_encodes_in_its_thread():
    sink = Kept()
    threads = set()

    def encode(item):
        threads.add(threading.current_thread().name)
        return {"value": item}

    background = BackgroundSink(sink, "kept", encode=encode)
    for item in range(100):
        background.put(item)
    assert background.flush()
    assert sink.records == [{"value": item} for item in range(100)]
    assert threads == {"sink-kept"}
    background.close()
    assert sink.closed.is_set() and background.num_dropped == 0


def test_background_closed_at_once_loses_nothing():
    sink = Kept()
    background = BackgroundSink(sink, "kept")
    for step in range(1000):
        background.put({"step": step})
    background.close()
    background.close()
    assert len(sink.records) == 1000
    with pytest.raises(UsageError, match="at least 1"):
        BackgroundSink(sink, "kept", capacity=0)


def test_background_put_after_close_is_an_error_in_a_new_process_too():
    background = BackgroundSink(Kept(), "kept")
    background.close()
    background._pid = 0
    with pytest.raises(RuntimeError, match="closed"):
        background.put({})


def test_a_sink_that_fails_costs_one_warning(warnings):
    sink = Kept(broken=True)
    background = BackgroundSink(sink, "broken")
    for step in range(10):
        background.put({"step": step})
    assert background.flush()
    sink.broken = False
    background.put({"step": 10})
    background.close()
    assert sink.records == [{"step": 10}]
    assert background.num_dropped == 10
    assert len(warnings) == 1 and "disk full" in warnings[0]


def test_a_sink_that_blocks_costs_one_warning_and_the_oldest_records(warnings):
    sink = Kept()
    sink.gate.clear()
    background = BackgroundSink(sink, "slow", capacity=8)
    background.put({"step": -1})
    background.flush(0.0)
    assert sink.entered.wait(5)
    for step in range(100):
        background.put({"step": step})
    assert not background.flush(0.01)
    assert background.num_dropped == 92
    sink.gate.set()
    background.close()
    assert [record["step"] for record in sink.records] == [-1, *range(92, 100)]
    assert len(warnings) == 1 and "keep up" in warnings[0]


def test_closing_a_sink_that_hangs_is_bounded(warnings):
    sink = Kept()
    sink.gate.clear()
    background = BackgroundSink(sink, "stuck")
    background.put({})
    background.flush(0.0)
    assert sink.entered.wait(5)
    background.put({})
    background.close(timeout_s=0.05)
    assert "did not finish" in warnings[0] and background.num_dropped == 1
    sink.gate.set()
    assert sink.closed.wait(5)


def test_a_forked_process_writes_its_own_records_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    background = BackgroundSink(JsonLinesSink(path), "forked")
    background.put({"from": "parent"})
    child = os.fork()
    if child == 0:
        background.put({"from": "child"})
        background.close()
        os._exit(0)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    background.close()
    assert sorted(record["from"] for record in lines(path)) == ["child", "parent"]
