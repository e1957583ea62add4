"""Every event of a run, typed: what happened, when, and to which rank.

Members and the supervisor make them; `events.jsonl` holds them as lines of JSON, under the same
names; the screen, outcomes and watchers of a run get them as they come. Those that are marked
*not recorded* are for watchers alone.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class TimedEvent(msgspec.Struct, tag_field="event", kw_only=True):
    """What all have. `time` is in seconds since 1970, of the supervisor's clock."""

    time: float = 0.0


class SeatedEvent(TimedEvent, kw_only=True):
    """Of one seat: `rank` is None of a member without one, `server` is that of a server's seat."""

    rank: int | None = None
    server: int | UnsetType = UNSET


# ---- members and groups


class MemberStartedEvent(TimedEvent, tag="started", kw_only=True):
    """A process of the run was started."""

    member: int
    pid: int


class SeatEvent(SeatedEvent, tag="seat", kw_only=True):
    """A member got a seat in a new generation."""

    pid: int
    generation: int
    host: int
    log: str


class FormedEvent(TimedEvent, tag="formed", kw_only=True):
    """All seats are filled, and all ranks agree on the state after `step`."""

    generation: int
    step: int


class LostEvent(SeatedEvent, tag="lost", kw_only=True):
    """A member cannot reach another one."""

    why: str


class ExitedEvent(SeatedEvent, tag="exited", kw_only=True):
    """A seated member has ended; `status` is negative for a signal."""

    status: int
    how: str
    step: int


class RecoveredEvent(SeatedEvent, tag="recovered", kw_only=True):
    """A seat that was lost is filled again, `ms` after the loss."""

    generation: int
    cause: str
    step: int
    ms: float
    spare: bool


class ResizedEvent(TimedEvent, tag="resized", kw_only=True):
    """The run has another size from here on."""

    generation: int
    step: int
    plan: str
    change: str
    bytes: int
    ms: float
    lost: str


class NotResizedEvent(TimedEvent, tag="not-resized", kw_only=True):
    """A request for another size was given up."""

    step: int
    why: str


class HostLostEvent(TimedEvent, tag="host-lost", kw_only=True):
    """A host is gone with all of its members; `then` is what the run does about it."""

    host: int
    how: str
    step: int
    then: str


class HostAddedEvent(TimedEvent, tag="host-added", kw_only=True):
    """A host came while the run was under way; `then` is what it is used for."""

    host: int
    slots: int
    step: int
    then: str


class StoppingEvent(TimedEvent, tag="stopping", kw_only=True):
    """The run ends after the step under way; of a member that was asked to, with its rank."""

    signal: str
    rank: int | UnsetType | None = UNSET
    server: int | UnsetType = UNSET


class GaveUpEvent(TimedEvent, tag="gave-up", kw_only=True):
    """The run ends before its last step."""

    cause: str
    step: int


# ---- what takes long


class SpentEvent(SeatedEvent, tag="spent", kw_only=True):
    """In `spent.jsonl`: what a member did in the last `since_s` seconds, told twice a second and
    less often in a long run. Of a rank the seconds of its steps, of a server what its processor
    was busy for (`compute`) and the rest."""

    since_s: float
    steps: int
    data: float
    compute: float
    exchange: float
    waiting: float


class WaitingEvent(SeatedEvent, tag="waiting", kw_only=True):
    """A rank waits for samples."""

    step: int
    samples: str
    seconds: int


class BusyEvent(SeatedEvent, tag="busy", kw_only=True):
    """A member has computed for long, at this line."""

    step: int
    seconds: int
    at: str


class StandstillEvent(TimedEvent, tag="standstill", kw_only=True):
    """No rank gets anything done, and none says why."""

    seconds: int
    step: int


class HangEvent(TimedEvent, tag="hang", kw_only=True):
    """Ranks wait in a collective for others that did not come (`comm/hangs.py`)."""

    step: int
    seconds: int
    op: str
    what: str  # a bucket, and how many bytes
    at: str  # the line that began it
    waiting: list[int]  # ranks that came
    missing: list[int]  # and that did not; empty if they wait for each other
    lines: dict[str, str]  # by rank: where those that did not come are
    text: str


class SlowEvent(TimedEvent, tag="slow", kw_only=True):
    """Replicas that take several times as long as the others."""

    step: int
    slow: dict[str, float]
    advice: str


class MeasuredPlanEvent(TimedEvent, tag="measured-plan", kw_only=True):
    """What `codec=auto` and `bucket=auto` have become, and by which figures."""

    plan: str  # with both settled
    codec: str
    bucket: int
    open: list[str]  # of the two, what was left to be measured
    step_s: dict[str, float]  # of a step with each choice that was tried
    link: dict[str, float]
    codecs: dict[str, dict[str, float]]  # by codec: share of the bytes, seconds of packing
    text: str


class BalancedEvent(TimedEvent, tag="balanced", kw_only=True):
    """Work has moved from slow replicas to fast ones."""

    step: int
    rounds: list[int]
    before: list[int]
    slow: dict[str, float]


# ---- checkpoints and the model


class ResumedEvent(TimedEvent, tag="resumed", kw_only=True):
    """The run continues from a checkpoint."""

    step: int
    name: str
    plan: str
    pieces: int
    pieces_now: int


class NothingToResumeEvent(TimedEvent, tag="begun", kw_only=True):
    """A resume was asked for, and there was nothing to resume from."""

    step: int
    store: str
    num_bad: int


class CheckpointRefusedEvent(TimedEvent, tag="checkpoint-refused", kw_only=True):
    """A checkpoint was passed over."""

    name: str
    why: str


class SavedEvent(TimedEvent, tag="saved", kw_only=True):
    """A checkpoint is complete."""

    step: int
    name: str
    bytes: int
    ms: float


class SaveFailedEvent(TimedEvent, tag="save-failed", kw_only=True):
    """A checkpoint could not be written; an `echo` if another rank could not."""

    step: int
    why: str
    echo: bool = False


class SaveSkippedEvent(TimedEvent, tag="save-skipped", kw_only=True):
    """A checkpoint was not begun."""

    step: int
    why: str


class RescuedEvent(TimedEvent, tag="rescued", kw_only=True):
    """The last checkpoint is elsewhere, since its place could not be written."""

    step: int
    place: str


class ModelNotSavableEvent(TimedEvent, tag="unholdable", kw_only=True):
    """No checkpoint can hold this model."""

    why: str


class ModelFailedEvent(TimedEvent, tag="model-failed", kw_only=True):
    """model.safetensors could not be written."""

    step: int
    why: str


# ---- results


class EvaluatedEvent(TimedEvent, tag="evaluated", kw_only=True):
    """An evaluation after a step."""

    step: int
    evaluation: dict[str, float]


class EndedEarlyEvent(TimedEvent, tag="ended-early", kw_only=True):
    """A callback ended the training before its last step: a success."""

    step: int
    why: str


class PredictionEvent(TimedEvent, tag="predicted", kw_only=True):
    """At the end of a run: what was predicted of it (`from` says by what), and what was measured,
    both as `step_s` and `memory_bytes` of a rank."""

    plan: str
    predicted: dict[str, float | str | None]
    measured: dict[str, float | None]


class BatchEmptyEvent(TimedEvent, tag="emptied", kw_only=True):
    """Quarantine left out all samples of a batch."""

    step: int
    left_out: int


class ConsistencyEvent(TimedEvent, kw_only=True):
    """Of state that replicas share: which ranks differ, since when, in how many tensors."""

    step: int
    since: int
    ranks: list[int]
    count: int
    tensors: list[str]  # the first of them


class ReplicaRepairedEvent(ConsistencyEvent, tag="replica-repaired", kw_only=True):
    """The odd replica took the state of the majority."""


class ReplicasDifferEvent(ConsistencyEvent, tag="replicas-differ", kw_only=True):
    """Replicas differ, and no majority says which is right."""


class StateCorruptedEvent(ConsistencyEvent, tag="state-corrupted", kw_only=True):
    """State that one rank holds alone has changed between two steps."""


class HostUseEvent(TimedEvent, tag="host-use", kw_only=True):
    """What a host uses, every few seconds; rates are since the sample before (`hosts.py`)."""

    host: int
    step: int  # the last one when it was sampled
    cpu_percent: float  # of all its cores
    memory_bytes: int
    memory_total_bytes: int
    disk_read_bytes_per_s: int
    disk_written_bytes_per_s: int
    disk_free_bytes: int  # where the run works
    network_sent_bytes_per_s: int  # without loopback
    network_received_bytes_per_s: int


class WarningEvent(TimedEvent, tag="warning", kw_only=True):
    """A sentence for people."""

    text: str


# ---- for watchers


class ProgressEvent(TimedEvent, tag="progress", kw_only=True):
    """How far the run is, several times a second. Not recorded."""

    step: int
    loss: float
    samples_per_s: float
    communication: float  # the share of time
    rate: float = 0.0  # learning rate of the first parameter group
    memory_bytes: int = 0  # resident, of the rank that says so
    scalars: dict[str, float] = {}  # named parts of the loss, and what callbacks logged


class TraceSpan(msgspec.Struct, frozen=True, array_like=True):
    """What a thread of a rank did: microseconds of the clock of rank 0's host."""

    name: str
    kind: str
    thread: str
    start_us: float
    duration_us: float
    about: dict[str, Any] = {}


class TraceEvent(TimedEvent, tag="trace", kw_only=True):
    """Spans of a rank, of steps that are traced. Not recorded: trace/ has them."""

    rank: int
    spans: list[TraceSpan]


class PrintedEvent(TimedEvent, tag="printed", kw_only=True):
    """Lines that rank 0 has printed to standard output. Not recorded: its log has them."""

    lines: list[str]


class TickEvent(TimedEvent, tag="tick", kw_only=True):
    """The supervisor is alive, ten times a second. Not recorded."""


class HostJoinedEvent(TimedEvent, tag="host-joined", kw_only=True):
    """Another host joined, before the run begins. Not recorded."""

    name: str


class HostLeftEvent(TimedEvent, tag="host-left", kw_only=True):
    """A host that had joined is gone, before the run begins. Not recorded."""

    name: str


class HostsMissingEvent(TimedEvent, tag="hosts-missing", kw_only=True):
    """The run waits for hosts. Not recorded."""

    count: int
    run_dir: str


Event = (
    MemberStartedEvent
    | SeatEvent
    | FormedEvent
    | LostEvent
    | ExitedEvent
    | RecoveredEvent
    | ResizedEvent
    | NotResizedEvent
    | HostLostEvent
    | HostAddedEvent
    | StoppingEvent
    | GaveUpEvent
    | SpentEvent
    | WaitingEvent
    | BusyEvent
    | StandstillEvent
    | HangEvent
    | SlowEvent
    | BalancedEvent
    | MeasuredPlanEvent
    | ResumedEvent
    | NothingToResumeEvent
    | CheckpointRefusedEvent
    | SavedEvent
    | SaveFailedEvent
    | SaveSkippedEvent
    | RescuedEvent
    | ModelNotSavableEvent
    | ModelFailedEvent
    | EvaluatedEvent
    | EndedEarlyEvent
    | PredictionEvent
    | BatchEmptyEvent
    | ReplicaRepairedEvent
    | ReplicasDifferEvent
    | StateCorruptedEvent
    | HostUseEvent
    | WarningEvent
    | ProgressEvent
    | TraceEvent
    | PrintedEvent
    | TickEvent
    | HostJoinedEvent
    | HostLeftEvent
    | HostsMissingEvent
)
OnEvent = Callable[[Event], None]


def kind_of(event: Event) -> str:
    """The name of an event in records, as in `save-failed`."""
    return str(type(event).__struct_config__.tag)
