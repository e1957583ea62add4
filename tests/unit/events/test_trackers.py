"""Trackers: each takes the numbers of steps, and what is asked for wrongly is refused."""

import csv
import importlib.util
import json
import os
import socket
import struct
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.events import trackers
from shoal.events.sinks import JsonLinesSink, TensorBoardSink, redact_secrets
from shoal.events.trackers import (
    KNOWN,
    CsvSink,
    MlflowSink,
    PrometheusSink,
    TrackedRun,
    Tracker,
    WandbSink,
    asked_trackers,
    check_trackers,
    make_sinks,
    parse_trackers,
)
from shoal.testing.sinks import SinkConformance, Tracked, Values, step_of
from tests.support.servers import start_mlflow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class TestCsv(SinkConformance):
    @pytest.fixture
    def tracked(self, tmp_path: Path) -> Tracked:
        path = tmp_path / "run" / "metrics.csv"
        return Tracked(open=lambda: CsvSink(path), read=lambda: read_csv(path))


def read_csv(path: Path) -> Values:
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [int(row["step"]) for row in rows] == sorted({int(row["step"]) for row in rows})
    return {
        int(row["step"]): {n: float(v) for n, v in row.items() if n != "step" and v} for row in rows
    }


def test_csv_takes_from_the_record_what_a_writer_that_died_left_out(tmp_path: Path) -> None:
    path, record = tmp_path / "metrics.csv", tmp_path / "metrics.jsonl"
    lines = JsonLinesSink(record)
    lines.write(*(step_of(number) for number in range(1, 7)))
    lines.close()
    CsvSink(path, record).write(step_of(1), step_of(2))
    with path.open("ab") as file:
        file.write(b"3,0.33")  # it was killed within this row
    CsvSink(path, record).write(step_of(6, norm=1.5))
    assert {step: values["loss"] for step, values in read_csv(path).items()} == {
        step: 1 / step for step in range(1, 7)
    }
    CsvSink(path, record).write(step_of(4, loss=9.0))  # a resumed run
    assert sorted(read_csv(path)) == [1, 2, 3, 4]


class TestTensorBoard(SinkConformance):
    @pytest.fixture
    def tracked(self, tmp_path: Path) -> Tracked:
        pytest.importorskip("tensorboardX")
        count = iter(range(100))
        return Tracked(
            # Files are named by the second, and a new one writes over that of the same second.
            open=lambda: TensorBoardSink(tmp_path / f"{next(count):03d}"),
            read=lambda: read_tensorboard(tmp_path),
        )


def read_tensorboard(directory: Path) -> Values:
    from tensorboardX.proto.event_pb2 import Event

    found: Values = {}
    for path in sorted(directory.glob("*/events*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                found.setdefault(event.step, {})[value.tag] = value.simple_value
    return found


class TestPrometheus(SinkConformance):
    @pytest.fixture
    def tracked(self) -> Tracked:
        pytest.importorskip("prometheus_client")
        port = free_port()
        return Tracked(
            open=lambda: PrometheusSink("127.0.0.1", port, run="a-run"),
            read=lambda: scrape(port),
            keeps_all=False,
            while_open=True,
        )


def scrape(port: int) -> Values:
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["run"] == "a-run"
            name = sample.name.removeprefix("shoal_")
            found[f"{name}/{sample.labels['name']}" if "name" in sample.labels else name] = (
                sample.value
            )
    return {int(found.pop("step")): found}


@pytest.fixture(scope="module")
def wandb_is_there() -> None:
    """Loaded before the first test: it makes temporary directories, once, and keeps them."""
    pytest.importorskip("wandb")


@pytest.mark.full
@pytest.mark.usefixtures("wandb_is_there")
class TestWandb(SinkConformance):
    @pytest.fixture
    def tracked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracked]:
        before = dict(os.environ)
        monkeypatch.setenv("WANDB_MODE", "offline")
        run = TrackedRun(tmp_path / "run", "recipe.py:small", {"lr": 0.1})
        yield Tracked(open=lambda: WandbSink(run), read=lambda: read_wandb(tmp_path / "run"))
        for name in {*os.environ} - {*before}:
            del os.environ[name]


def read_wandb(run_dir: Path) -> Values:
    """The history of offline runs, in their order."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    found: Values = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime):
        store = DataStore()
        store.open_for_scan(str(path))
        while (content := store.scan_data()) is not None:
            record = Record.FromString(content)
            if record.WhichOneof("record_type") != "history":
                continue
            names = ["/".join(i.nested_key) or i.key for i in record.history.item]
            row = {
                name: json.loads(item.value_json)
                for name, item in zip(names, record.history.item, strict=True)
            }
            step = int(row.pop("step"))
            found[step] = {n: v for n, v in row.items() if not n.startswith("_")}
    return found


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("csv", ["csv"]),
        ("csv, tensorboard", ["csv", "tensorboard"]),
        ("wandb:my-project,prometheus:9400", ["wandb", "prometheus"]),
        ("mlflow:http://127.0.0.1:5000", ["mlflow"]),
        ("prometheus:[::1]:9400", ["prometheus"]),
    ],
)
def test_what_can_be_asked_for(text: str, names: list[str], tmp_path: Path) -> None:
    found = parse_trackers(text)
    assert [tracker.name for tracker in found] == names
    assert [*make_sinks(found, TrackedRun(tmp_path))] == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tensorbord", "no such tracker. Did you mean 'tensorboard'?"),
        ("csv,csv", "csv twice"),
        (",", "names no tracker. Known: csv, mlflow"),
        ("csv:here", "csv takes nothing after a colon"),
        ("prometheus", "nothing is not a port"),
        ("prometheus:http", "http is not a port"),
        ("prometheus:99999", "99999 is not a port"),
        ("mlflow", "set MLFLOW_TRACKING_URI"),
        ("mlflow:server", "is not the address of a server"),
        ("mlflow:file:///tmp/x", "is not the address of a server"),
        ("mlflow:https://me:hunter2@host/", "has a user or a password in it"),
    ],
)
def test_what_cannot_be_asked_for(text: str, words: str, monkeypatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(UsageError) as error:
        parse_trackers(text)
    assert words in str(error.value) and "hunter2" not in str(error.value)


@settings(max_examples=50)
@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        found = parse_trackers(text)
    except UsageError:
        return
    assert found and {tracker.name for tracker in found} <= {*KNOWN}


def test_the_flag_for_tensorboard_is_one_of_them() -> None:
    assert asked_trackers(None, True) == (Tracker("tensorboard"),)
    assert asked_trackers("csv,tensorboard", True) == (Tracker("csv"), Tracker("tensorboard"))
    assert asked_trackers(None, False) == ()


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1:{port} cannot be listened on"):
            check_trackers(parse_trackers(f"prometheus:{port}"))
    check_trackers(parse_trackers(f"prometheus:{port}"))


def test_an_extra_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(trackers.KNOWN, "csv", ("no_such_module", "tracking", ""))
    with pytest.raises(UsageError, match=r"pip install 'shoal-ml\[tracking\]'"):
        check_trackers([Tracker("csv")])


def test_wandb_without_a_key_is_refused(monkeypatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UsageError, match=r"no key for api\.wandb\.ai"):
        check_trackers([Tracker("wandb")])
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    check_trackers([Tracker("wandb")])
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_trackers([Tracker("wandb")])


def test_messages_hold_no_secret(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    told = redact_secrets("401 for https://me:word@host/x with key 0123456789abcdef")
    assert told == "401 for https://***@host/x with key ***"


@pytest.fixture(scope="module")
def mlflow_server() -> Iterator[str]:
    pytest.importorskip("mlflow")  # before the first test: it keeps threads
    with start_mlflow() as server:
        yield server.url


@pytest.mark.full
@pytest.mark.timeout(300)
class TestMlflow(SinkConformance):
    @pytest.fixture
    def tracked(
        self, mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Tracked:
        for name, value in trackers._MLFLOW_DEFAULTS.items():  # which it sets for its process
            monkeypatch.setenv(f"MLFLOW_{name}", value)
        run = TrackedRun(tmp_path / "run", "recipe.py:small", {"lr": 0.1})
        return Tracked(
            open=lambda: MlflowSink(run, mlflow_server),
            read=lambda: read_mlflow(mlflow_server, tmp_path / "run"),
        )


def read_mlflow(url: str, run_dir: Path) -> Values:
    """Of each name and step the last value, as the server has them."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=url)
    run_id = (run_dir / "mlflow" / "run-id").read_text()
    found: Values = {}
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            found.setdefault(metric.step, {})[name] = metric.value
    return found
