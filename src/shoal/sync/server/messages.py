"""The messages between workers and servers: typed records, tensors in frames beside them.

A request carries a number that its reply repeats, so a request sent twice, or a late reply, does no
harm; it is done once, since pieces of a batch are applied once. Workers' messages carry the
generation, and a message of another one is refused.

A *row* is the sum over one block of pieces of all gradients of a flat buffer; a *key* is a span of
a flat buffer that one server holds (`layout.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from shoal.comm.shared_memory import SegmentHandle
from shoal.comm.tree import Block


class FromWorker(msgspec.Struct, frozen=True, tag_field="say", kw_only=True):
    generation: int
    request: int


class Halt(msgspec.Struct, frozen=True):
    """All stop after `step`: for good, or until the next generation. It does not change; one that
    all have come to is over."""

    step: int
    for_good: bool


class WorkerHello(FromWorker, frozen=True, tag="hello"):
    """I sit in this seat, at this batch, and have seen this version of your parameters. `rows` is
    where my rows stand, if we share memory."""

    seat: int
    secret: str
    layout: str
    num_rows: int
    rows: SegmentHandle | None
    version: int = 0
    batch: int = 0
    halt: Halt | None = None


class SharedFrames(msgspec.Struct, frozen=True):
    """Frames that stand in a worker's memory, each from one byte to another."""

    place: SegmentHandle
    spans: list[tuple[int, int]]


class Push(FromWorker, frozen=True, tag="push"):
    """Rows of one key for some blocks of a batch: beside this, or in the shared memory.

    There is no reply; a `Sum` or `Apply` of a worker whose rows did not come is answered with
    `MissingRows`.
    """

    batch: int
    attempt: int
    key: int
    blocks: list[Block]
    touched: list[bool]
    is_shared: bool
    codec: str = "none"  # by which what stands beside this is packed
    lent: SharedFrames | None = None  # where what would stand beside this is, of a table


class Sum(FromWorker, frozen=True, tag="sum"):
    """Answer when the pieces from `first` to `last` of a batch are here: norms, and are all
    finite."""

    batch: int
    attempt: int
    first: int
    last: int
    want_norms: bool
    want_finite: bool


class Apply(FromWorker, frozen=True, tag="apply"):
    """Step on these pieces' gradients times `scale`, as soon as all are here, with learning rates
    times `factor`; less, if `pulled` is said, the more updates came since that version. Then give
    me the parameters for the next batch, as for a `Pull`."""

    batch: int
    attempt: int
    first: int
    last: int
    scale: float
    factor: float
    pulled: int | None
    settings: list[dict[str, Any]]
    meets: bool = False
    counts: list[float] = []  # of a round that closed early: how much each piece counts, 0 if out


class Pushes(FromWorker, frozen=True, tag="pushes"):
    """Several in one message, with so many frames each; and what is asked when they are here."""

    pushes: list[Push]
    counts: list[int]
    then: Sum | Apply | None = None


class CheckRows(FromWorker, frozen=True, tag="kept"):
    """Are all my rows of this batch there?"""

    batch: int
    attempt: int


class JoinRound(FromWorker, frozen=True, tag="join"):
    """I pushed my progress of so many samples, with this mark, for a round: reply when
    it is closed. `waits`: it is to wait for all."""

    batch: int
    attempt: int
    num_samples: int
    mark: int
    waits: bool


class Pull(FromWorker, frozen=True, tag="pull"):
    """Give me the parameters for this batch, as soon as I may begin it; or, if `meets`, when all
    before it are applied. If I do not wait, those of now: I will ask again before I begin."""

    batch: int
    meets: bool
    waits: bool = True


class Fetch(FromWorker, frozen=True, tag="fetch"):
    """Give me these keys of the parameters that you last told me the version of."""

    version: int
    keys: list[int]


class LookUpRows(FromWorker, frozen=True, tag="look"):
    """Give me some rows of a table for this batch, which I have begun; their places are beside
    this."""

    batch: int
    table: int


class AskHalt(FromWorker, frozen=True, tag="stop"):
    """I was asked to stop, or to wait for all: choose a step after which all do."""

    batch: int
    for_good: bool = True


class DumpState(FromWorker, frozen=True, tag="dump"):
    """A chunk of your state, from part `first` on; or of the gradients of the last step; or of
    the rows of tables alone, if `dense` also the untouched ones. `types`: only names and
    types."""

    gradients: bool = False
    tables: bool = False
    dense: bool = False
    first: int = 0
    types: bool = False


class CheckRequest(FromWorker, frozen=True, tag="check"):
    """Is my question `request` answered? Messages keep their order, so a worker that gets
    `RequestChecked` and no answer knows that the question or the answer was lost, however long
    either takes to send."""

    turn: int


class LoadState(FromWorker, frozen=True, tag="load"):
    """Take over the state after `step` that is in the frames: a chunk of it, unless it `begins`
    and `ends` there."""

    step: int
    begins: bool = True
    ends: bool = True


class FromServer(msgspec.Struct, frozen=True, tag_field="say", kw_only=True):
    request: int


class Reply(NamedTuple):
    """To a worker, by its address on the socket."""

    to: bytes
    message: FromServer
    payload: Sequence[Tensor | bytes] = ()
    stays: bool = False  # the payload does not change before it is delivered


class ServerWelcome(FromServer, frozen=True, tag="welcome"):
    """`is_shared`: your rows are read where they stand, and parameters put there; in lockstep they
    are not put there but read at `values`, where their sets stand, and those of `tables`. What is
    small may come through the local `listener` of that name (`comm/local_listener.py`)."""

    is_shared: bool
    values: list[SegmentHandle]
    committed: int
    next_batch: int
    tables: list[SegmentHandle | None] = []
    listener: str = ""


class MissingRows(FromServer, frozen=True, tag="missing"):
    """These keys' rows are not here. Push them again, then ask again."""

    keys: list[int]


class Summed(FromServer, frozen=True, tag="summed"):
    """With the norms of the sums' blocks in a frame, if they were wanted."""

    finite: bool


class RoundClosed(FromServer, frozen=True, tag="joined"):
    """The round is closed: with you, or you were late. The other fields are those of
    `round_coordinator.py`, and tell of all rounds."""

    is_in: bool
    counts: list[float]
    mark: int | None
    num_rounds: int
    num_early: int
    num_late: list[int]


class PulledParameters(FromServer, frozen=True, tag="values"):
    """The step is made, or the batch may be begun. Parameters stand in the shared memory; or the
    first few keys of them, in the order of a forward, are in frames, and the others to be fetched.
    """

    committed: int
    version: int  # updates that they are made of, and states that were taken over
    number: int  # of the set in which they stand
    halt: Halt | None
    made: int = -1  # how many updates came before the last one that this worker asked for


class FetchedKeys(FromServer, frozen=True, tag="part"):
    """The keys that were to be fetched, in frames."""


class FoundRows(FromServer, frozen=True, tag="found"):
    """The rows of a table, in a frame."""


class Acknowledged(FromServer, frozen=True, tag="done"):
    """It is so."""


class RequestChecked(FromServer, frozen=True, tag="checked"):
    """All that came before is answered, unless it waits for others."""

    turn: int


class DumpedState(FromServer, frozen=True, tag="dumped"):
    """The chunk, in frames; the next one begins with part `next`, unless that is 0."""

    next: int = 0


class RequestRefused(FromServer, frozen=True, tag="refused"):
    """`is_stale`: you belong to another generation."""

    why: str
    is_stale: bool = False


WorkerMessage = (
    WorkerHello
    | Push
    | Pushes
    | Sum
    | Apply
    | CheckRows
    | JoinRound
    | Pull
    | Fetch
    | LookUpRows
    | AskHalt
    | DumpState
    | LoadState
    | CheckRequest
)
ServerMessage = (
    ServerWelcome
    | MissingRows
    | Summed
    | RoundClosed
    | PulledParameters
    | FetchedKeys
    | FoundRows
    | Acknowledged
    | DumpedState
    | RequestChecked
    | RequestRefused
)
