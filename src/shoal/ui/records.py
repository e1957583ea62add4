"""What a page or a terminal shows of one run: one typed record, whatever the run's size.

`run_reader.py` makes it from a run directory, `findings.py` judges it, and the report, the live
page and `shoal top` show it; nothing else reaches them. It is bounded: curves have at most a
thousand points and lists a few hundred entries, for a run of any length.

Read next: `run_reader.py`.
"""

from typing import Any, Literal

import msgspec

Grade = Literal["bad", "warn", "good", "info"]
RunState = Literal["queued", "running", "stopped", "done", "failed", "unreadable"]


class Figure(msgspec.Struct, frozen=True):
    """The values of one curve, a point a bucket of steps; None where it has none."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """All curves over one axis: the last step of each bucket, and when it was made."""

    step: list[int] = []
    time: list[float] = []
    figures: dict[str, Figure] = {}


class Strip(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. `shares` holds a text a kind of time, a character a bucket of `Strips`: its
    share of that bucket, from `0` for none to 64 characters later for all of it. `gone` are times
    without a process in the seat."""

    name: str
    host: int = 0
    pid: int = 0
    is_server: bool = False
    is_alive: bool = True
    shares: dict[str, str] = {}
    totals: dict[str, float] = {}  # seconds by kind
    gone: list[tuple[float, float | None]] = []  # from, to; None: still


class Strips(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker did, over the time of the run."""

    begin: list[float] = []
    end: list[float] = []
    workers: list[Strip] = []


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, in words: what, why, and the time that it cost."""

    kind: str
    grade: Grade
    time: float
    step: int | None = None
    what: str
    cause: str = ""
    lost_s: float | None = None
    count: int = 1  # of the same


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and the command that goes on from it."""

    step: int
    name: str
    bytes: int = 0
    ms: float = 0.0
    is_there: bool = True
    resume: str = ""


class Setting(msgspec.Struct, frozen=True):
    """A value that the run was made with, and where it came from."""

    name: str
    value: str
    origin: str


class Bottleneck(msgspec.Struct, frozen=True, kw_only=True):
    """What most of a step's time goes to, in a sentence, and what to try."""

    kind: Literal["none", "compute", "exchange", "data", "waiting", "lost"] = "none"
    sentence: str = ""
    tries: list[str] = []


class HostUseSeries(msgspec.Struct, frozen=True, kw_only=True):
    """What a host used over time: shares of CPU and memory, bytes a second of disk and network."""

    host: str
    time: list[float] = []
    figures: dict[str, list[float | None]] = {}


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the steps of the record."""

    steps: int = 0
    samples: int = 0
    bytes_sent: int = 0  # by the rank that writes the record
    seconds: dict[str, float] = {}  # data, compute, exchange and waiting of a step, over all ranks
    slowest: str = ""  # the worker that the others waited for most
    slowest_times: float = 1.0  # as long as the middle one
    samples_per_s: float | None = None
    ideal_samples_per_s: float | None = None
    goodput: float | None = None
    wall_s: float = 0.0
    paused_s: float = 0.0  # of it, between two commands of the run


class RunHead(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of a run in a list of runs, too."""

    name: str
    state: RunState
    reason: str = ""
    recipe: str = ""
    plan: str = ""
    step: int = 0
    num_steps: int = 0
    loss: float | None = None


class RunView(RunHead, frozen=True, kw_only=True):
    """All that is shown of one run."""

    path: str
    began_at: float | None = None
    seen_at: float = 0.0  # the last that is known of it
    remaining_s: float | None = None
    generation: int | None = None
    totals: Totals = Totals()
    curves: Curves = Curves()
    strips: Strips = Strips()
    incidents: list[Incident] = []
    num_incidents: int = 0  # with those that the list has no room for
    checkpoints: list[Saved] = []
    bottleneck: Bottleneck = Bottleneck()
    settings: list[Setting] = []
    environment: dict[str, str] = {}
    compression: str = ""
    staleness: dict[str, Any] | None = None
    predicted: list[tuple[str, float | None, float | None]] = []  # name, predicted, measured
    hosts: list[HostUseSeries] = []
    peak_memory_bytes: int | None = None
    traces: list[str] = []  # files for Perfetto
    problems: list[str] = []  # of the record itself, in words


class SettingsDifference(msgspec.Struct, frozen=True):
    """A setting that is not the same in all of several runs."""

    name: str
    values: list[str | None]  # a run each; None where it has none
