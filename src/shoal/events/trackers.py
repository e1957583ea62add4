"""Trackers: where the numbers of a run go beside metrics.jsonl, for the tools that people have.

Each is a `Sink` of `sinks.py`: it takes records of steps, in a thread behind a bounded queue, so
one that is slow, raises or is gone costs one warning and no step. A tracker opens with its first
record, in the process that writes, and tries again with the next one if it could not. The rank that
writes the record of the run has them; when it dies, the one that takes over opens them again, and
`open` files, W&B runs and MLflow runs go on where they were.

Passwords and keys come from the environment alone (WANDB_API_KEY, MLFLOW_TRACKING_PASSWORD), so
that none is on a command line, in run.json or in a log. Cost: that of the tracker's own library, in
a thread of one rank; W&B and MLflow take some 0.1 ms of it a step. Read next: `sinks.py`;
`shoal.testing.sinks` has the tests that each tracker passes.
"""

import csv
import importlib.util
import math
import netrc
import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from shoal.errors import UsageError, nearest, require
from shoal.events.sinks import NO_SCALARS, Record, Sink, TensorBoardSink, scalars
from shoal.storage.decoding import try_decode_json

KNOWN = {  # name -> the module that it needs, the extra that brings it, what may follow a colon
    "tensorboard": ("tensorboardX", "tensorboard", ""),
    "csv": ("csv", "", ""),
    "wandb": ("wandb", "wandb", "PROJECT"),
    "mlflow": ("mlflow", "mlflow", "URI"),
    "prometheus": ("prometheus_client", "prometheus", "PORT"),
}
_OFFLINE = ("offline", "disabled", "dryrun")  # values of WANDB_MODE that need no key
_AT_ONCE = 1000  # metrics in one request to MLflow, which takes no more
_MOST_PARAMETER = 500  # characters of a setting
_MOST_UNSENT = 100_000  # numbers that are kept for a server that is away
# Its own patience is minutes, at doubling times; and it prints where the run can be seen.
_MLFLOW_DEFAULTS = {
    "HTTP_REQUEST_MAX_RETRIES": "1",
    "HTTP_REQUEST_TIMEOUT": "10",
    "SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Tracker(NamedTuple):
    """One that was asked for: its name, and what followed the colon."""

    name: str
    where: str = ""


class TrackedRun(NamedTuple):
    """What trackers are told of a run beside its steps."""

    run_dir: Path
    recipe: str = ""
    settings: Mapping[str, Any] = {}


def parse_trackers(text: str | None) -> tuple[Tracker, ...]:
    """What `--track` asks for, or an error that says what cannot be. Pure."""
    found = [Tracker(*_split(word.strip())) for word in (text or "").split(",") if word.strip()]
    for tracker in found:
        _check_words(tracker)
    names = [tracker.name for tracker in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--track names {min(twice)} twice. Each tracker can be had once.")
    if text is not None and not found:
        raise UsageError(f"--track {text!r} names no tracker. {nearest('', KNOWN)}")
    return tuple(found)


def asked_trackers(track: str | None, tensorboard: bool) -> tuple[Tracker, ...]:
    """Those of `--track` and, once, that of `--tensorboard`."""
    found = parse_trackers(track)
    has_it = any(tracker.name == "tensorboard" for tracker in found)
    return (*found, Tracker("tensorboard")) if tensorboard and not has_it else found


def _split(word: str) -> tuple[str, str]:
    name, _, where = word.partition(":")
    return name, where


def _check_words(tracker: Tracker) -> None:
    name, where = tracker
    if name not in KNOWN:
        raise UsageError(f"--track {name}: there is no such tracker. {nearest(name, KNOWN)}")
    takes = KNOWN[name][2]
    if where and not takes:
        raise UsageError(f"--track {name}:{where}: {name} takes nothing after a colon.")
    if name == "mlflow":
        _check_uri(where or os.environ.get("MLFLOW_TRACKING_URI", ""))
    elif name == "prometheus":
        _address(where)


def _check_uri(uri: str) -> None:
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise UsageError(
            "--track mlflow: the URI has a user or a password in it, which others would read in "
            "run.json and in the list of processes. Set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, and leave them out of the URI."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"--track mlflow: {uri or 'nothing'} is not the address of a server. Give one, as in "
            "mlflow:http://127.0.0.1:5000, or set MLFLOW_TRACKING_URI."
        )


def _address(where: str) -> tuple[str, int]:
    """`PORT` of loopback, or `HOST:PORT`."""
    host, _, port = where.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--track prometheus:{where}: {port or 'nothing'} is not a port. Give one from 1 to "
            "65535, as in prometheus:9400, which is of loopback; or prometheus:0.0.0.0:9400."
        )
    return host.strip("[]") or "127.0.0.1", int(port)


def check_trackers(trackers: Iterable[Tracker]) -> None:
    """Refuse what cannot be, on the host of the command: an extra that is missing, a port that is
    taken, W&B without a key. Loads nothing heavy."""
    for tracker in trackers:
        module, extra, _ = KNOWN[tracker.name]
        if importlib.util.find_spec(module) is None:
            require(module, extra)
        if tracker.name == "prometheus":
            _refuse_taken(*_address(tracker.where))
        elif tracker.name == "wandb":
            _refuse_without_key()


def _refuse_taken(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise UsageError(
            f"--track prometheus: {host}:{port} cannot be listened on: {error.strerror}. Choose "
            "another port."
        ) from None


def _refuse_without_key() -> None:
    named = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
    if os.environ.get("WANDB_MODE") in _OFFLINE or any(os.environ.get(name) for name in named):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None:
            return
    raise UsageError(
        f"--track wandb: there is no key for {host}. Run `wandb login`, set WANDB_API_KEY, or set "
        "WANDB_MODE=offline to keep the run in its directory, from where `wandb sync` sends it."
    )


def make_sinks(trackers: Iterable[Tracker], run: TrackedRun) -> dict[str, Callable[[], Sink]]:
    """How to open each tracker, by its name."""

    def csv_of(where: str) -> Sink:
        return CsvSink(run.run_dir / "metrics.csv", run.run_dir / "metrics.jsonl")

    kinds: dict[str, Callable[[str], Sink]] = {
        "tensorboard": lambda where: TensorBoardSink(run.run_dir / "tensorboard"),
        "csv": csv_of,
        "wandb": lambda where: WandbSink(run, where),
        "mlflow": lambda where: MlflowSink(run, where or os.environ["MLFLOW_TRACKING_URI"]),
        "prometheus": lambda where: PrometheusSink(*_address(where), run=run.run_dir.name),
    }

    def opener(tracker: Tracker) -> Callable[[], Sink]:
        return lambda: kinds[tracker.name](tracker.where)

    return {tracker.name: opener(tracker) for tracker in trackers}


def tracked_scalars(record: Record) -> dict[str, float]:
    """The numbers of a record that are drawn, by names with slashes; its step is not among them."""
    return {name: value for name, value in scalars(record) if name not in NO_SCALARS}


def _remembered(path: Path) -> str:
    """What an earlier writer put there, or nothing."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def _remember(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


class CsvSink:
    """One row a step in `path`, one column a name; names that come later get columns at the end.

    When it opens, rows from the first record's step on are removed, since a resumed run repeats
    them, and steps that a writer before did not get to are taken from `record`, the metrics.jsonl.
    Cost: a column that comes later copies the file once.
    """

    def __init__(self, path: Path, record: Path | None = None):
        self.path, self._record = path, record
        self._columns: list[str] = []

    def write(self, *records: Record) -> None:
        if not records:
            return
        if not self._columns:
            self._open(int(records[0]["step"]))
        self._append([(int(record["step"]), tracked_scalars(record)) for record in records])

    def close(self) -> None:
        """Nothing is held open between two writes."""

    def _open(self, first: int) -> None:
        self._columns, last = ["step"], 0
        if self.path.is_file():
            _cut_torn_line(self.path)
            with self.path.open(newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), ["step"])
            last = self._rewrite(below=first)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._rewrite()
        self._append([row for row in self._recorded() if last < row[0] < first])

    def _recorded(self) -> Iterator[tuple[int, dict[str, float]]]:
        if self._record is None or not self._record.is_file():
            return
        with self._record.open("rb") as file:
            for line in file:
                found = try_decode_json(line, dict[str, Any])
                if found is not None and isinstance(found.get("step"), int):
                    yield found["step"], tracked_scalars(found)

    def _append(self, rows: list[tuple[int, dict[str, float]]]) -> None:
        new = list(dict.fromkeys(n for _, row in rows for n in row if n not in self._columns))
        if new:
            self._columns += new
            self._rewrite()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [step, *(row.get(name, "") for name in self._columns[1:])] for step, row in rows
            )

    def _rewrite(self, below: int | None = None) -> int:
        """Copy the file under the columns there are now, without steps from `below` on and without
        a torn last row; returns the last step."""
        draft, last = self.path.with_suffix(".csv.new"), 0
        with draft.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            writer.writerow(self._columns)
            for row in self._rows():
                if row[0].isdecimal() and (below is None or int(row[0]) < below):
                    writer.writerow(row + [""] * (len(self._columns) - len(row)))
                    last = int(row[0])
        draft.replace(self.path)
        return last

    def _rows(self) -> Iterator[list[str]]:
        if not self.path.is_file():
            return
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            width = len(next(rows, []))
            yield from (row for row in rows if len(row) == width)


def _cut_torn_line(path: Path) -> None:
    """Remove a last line without its end, of a writer that was killed within it."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 65536))
        tail = file.read()
        if tail and not tail.endswith(b"\n"):
            file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)


class WandbSink:
    """A run of Weights & Biases: online, or offline as WANDB_MODE says, below the run directory.

    Numbers are drawn over `step`, and a resumed run goes on in the same run of W&B.
    """

    def __init__(self, run: TrackedRun, project: str = ""):
        self._run, self._project = run, project
        self._wandb = require("wandb", extra="wandb")
        self._open: Any = None

    def write(self, *records: Record) -> None:
        if self._open is None:
            self._open = self._begin()
        for record in records:
            values = {n: v for n, v in tracked_scalars(record).items() if math.isfinite(v)}
            self._open.log({"step": int(record["step"]), **values})

    def close(self) -> None:
        if self._open is not None:
            self._open.finish()
            self._wandb.teardown()
            # W&B removes these when the interpreter ends, and a rank ends before.
            with suppress(ImportError, AttributeError):
                require("wandb.sdk.data_types._private", "wandb").MEDIA_TMP.cleanup()
                require("wandb.sdk.artifacts.artifact", "wandb").Artifact._TMP_DIR.cleanup()

    def _begin(self) -> Any:
        name = self._run.run_dir / "wandb" / "run-id"
        if not (known := _remembered(name)):
            _remember(name, known := secrets.token_hex(4))
        settings = self._wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        run = self._wandb.init(
            project=self._project or os.environ.get("WANDB_PROJECT") or "shoal",
            name=self._run.run_dir.name,
            id=known,
            resume="allow",
            dir=str(self._run.run_dir),
            config={"recipe": self._run.recipe, **self._run.settings},
            settings=settings,
        )
        run.define_metric("*", step_metric="step")
        return run


class MlflowSink:
    """A run on an MLflow server, in the experiment `shoal` or MLFLOW_EXPERIMENT_NAME.

    Records go in requests of many numbers. What a server that is away did not take is kept, up to a
    bound, and goes with the next records, or at the end.
    """

    def __init__(self, run: TrackedRun, uri: str):
        self._run = run
        for name, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(f"MLFLOW_{name}", value)
        self._client = require("mlflow", extra="mlflow").MlflowClient(tracking_uri=uri)
        self._entities = require("mlflow.entities", extra="mlflow")
        self._run_id = ""
        self._unsent: deque[Any] = deque(maxlen=_MOST_UNSENT)

    def write(self, *records: Record) -> None:
        now = int(time.time() * 1000)
        for record in records:
            for name, value in tracked_scalars(record).items():
                if math.isfinite(value):
                    key = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)[:250]
                    metric = self._entities.Metric(key, value, now, int(record["step"]))
                    self._unsent.append(metric)
        if not self._run_id:
            self._run_id = self._begin()
        while self._unsent:
            count = min(len(self._unsent), _AT_ONCE)
            self._client.log_batch(self._run_id, metrics=[*islice(self._unsent, count)])
            for _ in range(count):
                self._unsent.popleft()

    def close(self) -> None:
        if self._unsent:
            self.write()
        if self._run_id:
            self._client.set_terminated(self._run_id)

    def _begin(self) -> str:
        place = self._run.run_dir / "mlflow" / "run-id"
        if known := _remembered(place):
            self._client.update_run(known, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
            found = self._client.get_experiment_by_name(name)
            number = found.experiment_id if found else self._client.create_experiment(name)
            known = self._client.create_run(number, run_name=self._run.run_dir.name).info.run_id
            _remember(place, known)
        if not self._client.get_run(known).data.params:  # they cannot be changed later
            told = {"recipe": self._run.recipe, **self._run.settings}
            params = [self._entities.Param(k, str(v)[:_MOST_PARAMETER]) for k, v in told.items()]
            self._client.log_batch(known, params=params[:100])
        return known


class PrometheusSink:
    """The newest numbers at http://HOST:PORT/metrics, for Prometheus to scrape.

    A number of a record is the gauge `shoal_<name>`; those of a mapping in it are told apart by the
    label `name`, as in `shoal_times{name="compute"}`.
    """

    def __init__(self, host: str, port: int, run: str = ""):
        self._address, self._run = (host, port), run
        self._library = require("prometheus_client", extra="prometheus")
        self._family = require("prometheus_client.core", extra="prometheus").GaugeMetricFamily
        self._latest: dict[str, float] = {}
        self._server: Any = None

    def write(self, *records: Record) -> None:
        for record in records:
            self._latest = {**self._latest, "step": float(record["step"])}
            self._latest |= tracked_scalars(record)
        if self._server is None and records:
            registry = self._library.CollectorRegistry()
            registry.register(self)
            host, port = self._address
            self._server, self._thread = self._library.start_http_server(port, host, registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Called by the library for each scrape."""
        families: dict[tuple[str, bool], Any] = {}
        for name, value in self._latest.items():
            metric, _, label = name.partition("/")
            metric, labels = re.sub(r"\W", "_", metric, flags=re.ASCII), [self._run]
            if (key := (metric, bool(label))) not in families:
                names = ["run", "name"] if label else ["run"]
                families[key] = self._family(f"shoal_{metric}", "of the last step", labels=names)
            families[key].add_metric([*labels, label] if label else labels, value)
        yield from families.values()
