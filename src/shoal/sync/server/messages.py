"""What workers and servers say to each other: typed records, tensors in frames beside them.

A question carries a number that its answer repeats, so that a question sent twice, or an answer
that comes late, does no harm; what it asks for is done once, since pieces of a batch are applied
once. What workers say carries the generation, and a message of another one is refused.

What is tall and what is wide: a *row* is the sum over one block of pieces of all gradients of a
shelf; a *key* is a stretch of a shelf that one server holds (`layout.py`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from shoal.comm.shared_memory import Place
from shoal.comm.tree import Block


class FromWorker(msgspec.Struct, frozen=True, tag_field="say", kw_only=True):
    generation: int
    request: int


class Halt(msgspec.Struct, frozen=True):
    """All stop after `step`: for good, or until the next generation. It does not change; one that
    all have come to is over."""

    step: int
    for_good: bool


class Hello(FromWorker, frozen=True, tag="hello"):
    """I sit in this seat, at this batch, and have seen this version of your parameters. `rows` is
    where my rows stand, if we share memory."""

    seat: int
    secret: str
    layout: str
    num_rows: int
    rows: Place | None
    version: int = 0
    batch: int = 0
    halt: Halt | None = None


class Lent(msgspec.Struct, frozen=True):
    """Frames that stand in a worker's memory, each from one byte to another."""

    place: Place
    spans: list[tuple[int, int]]


class Push(FromWorker, frozen=True, tag="push"):
    """Rows of one key for some blocks of a batch: beside this, or in the shared memory.

    Nobody answers; a `Sum` or `Apply` of a worker whose rows did not come is answered with
    `Missing`.
    """

    batch: int
    attempt: int
    key: int
    blocks: list[Block]
    touched: list[bool]
    is_shared: bool
    codec: str = "none"  # by which what stands beside this is packed
    lent: Lent | None = None  # where what would stand beside this is, of a table


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


class Kept(FromWorker, frozen=True, tag="kept"):
    """Are all my rows of this batch there?"""

    batch: int
    attempt: int


class Join(FromWorker, frozen=True, tag="join"):
    """I have brought what I learnt from so many samples, with this mark, for a round: answer when
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


class Look(FromWorker, frozen=True, tag="look"):
    """Give me some rows of a table for this batch, which I have begun; their places are beside
    this."""

    batch: int
    table: int


class Stop(FromWorker, frozen=True, tag="stop"):
    """I was asked to stop, or to wait for all: choose a step after which all do."""

    batch: int
    for_good: bool = True


class Dump(FromWorker, frozen=True, tag="dump"):
    """A stretch of your state, from part `first` on; or of the gradients of the last step; or of
    the rows of tables alone, if `dense` also of those that nobody touched. `kinds`: only names and
    types."""

    gradients: bool = False
    tables: bool = False
    dense: bool = False
    first: int = 0
    kinds: bool = False


class Check(FromWorker, frozen=True, tag="check"):
    """Is my question `request` answered? Messages keep their order, so whoever hears `Checked` and
    no answer knows that the question or the answer was lost, however long either takes to send."""

    turn: int


class Load(FromWorker, frozen=True, tag="load"):
    """Take over the state after `step` that is in the frames: a stretch of it, unless it `begins`
    and `ends` there."""

    step: int
    begins: bool = True
    ends: bool = True


class FromServer(msgspec.Struct, frozen=True, tag_field="say", kw_only=True):
    request: int


class Answer(NamedTuple):
    """To a worker, by its address on the socket."""

    to: bytes
    message: FromServer
    payload: Sequence[Tensor | bytes] = ()
    stays: bool = False  # what is in the payload, until whoever it is for has it


class Welcome(FromServer, frozen=True, tag="welcome"):
    """`is_shared`: your rows are read where they stand, and parameters put there; in lockstep they
    are not put there but read at `values`, where their sets stand, and those of `tables`. What is
    small may come through the `door` of that name (`comm/door.py`)."""

    is_shared: bool
    values: list[Place]
    committed: int
    next_batch: int
    tables: list[Place | None] = []
    door: str = ""


class Missing(FromServer, frozen=True, tag="missing"):
    """These keys' rows are not here. Push them again, then ask again."""

    keys: list[int]


class Summed(FromServer, frozen=True, tag="summed"):
    """With the norms of the sums' blocks in a frame, if they were wanted."""

    finite: bool


class Joined(FromServer, frozen=True, tag="joined"):
    """The round is closed: with you, or you were late. The other fields are those of `referee.py`,
    and tell of all rounds."""

    is_in: bool
    counts: list[float]
    mark: int | None
    num_rounds: int
    num_early: int
    num_late: list[int]


class Values(FromServer, frozen=True, tag="values"):
    """The step is made, or the batch may be begun. Parameters stand in the shared memory; or the
    first few keys of them, in the order of a forward, are in frames, and the others to be fetched.
    """

    committed: int
    version: int  # updates that they are made of, and states that were taken over
    number: int  # of the set in which they stand
    halt: Halt | None
    made: int = -1  # how many updates came before the last one that this worker asked for


class Part(FromServer, frozen=True, tag="part"):
    """The keys that were to be fetched, in frames."""


class Found(FromServer, frozen=True, tag="found"):
    """The rows of a table, in a frame."""


class Done(FromServer, frozen=True, tag="done"):
    """It is so."""


class Checked(FromServer, frozen=True, tag="checked"):
    """All that came before is answered, unless it waits for others."""

    turn: int


class Dumped(FromServer, frozen=True, tag="dumped"):
    """The stretch, in frames; the next one begins with part `next`, unless that is 0."""

    next: int = 0


class Refused(FromServer, frozen=True, tag="refused"):
    """`is_stale`: you belong to another generation."""

    why: str
    is_stale: bool = False


WorkerMessage = (
    Hello
    | Push
    | Pushes
    | Sum
    | Apply
    | Kept
    | Join
    | Pull
    | Fetch
    | Look
    | Stop
    | Dump
    | Load
    | Check
)
ServerMessage = (
    Welcome | Missing | Summed | Joined | Values | Part | Found | Done | Dumped | Checked | Refused
)
