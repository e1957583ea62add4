"""What is wrong with a lookup or a push of rows is said, and changes nothing."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.shared_memory import NotShared, SharedSegment
from shoal.comm.wire import BadFrame, bytes_of
from shoal.errors import RecipeError
from shoal.sync.server.lookups import WorkerLookups, empty_tables
from shoal.sync.server.messages import ServerWelcome, SharedFrames, WorkerHello
from shoal.sync.server.session import open_session
from shoal.sync.server.shard import layout_of
from shoal.sync.server.table_memory import FrameReader, FrameWriter, share_tables
from shoal.sync.server.tables import ServerTables
from shoal.sync.server.worker_memory import WorkerMemory

ROWS, WIDTH = 100, 4


def model() -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(ROWS, WIDTH, sparse=True)


def frame(tensor: Tensor) -> memoryview:
    return memoryview(bytearray(bytes_of(tensor.contiguous())))


def held(number: int = 0, num_servers: int = 1) -> ServerTables:
    tables = ServerTables(model(), number, num_servers)
    tables.number_from(7)
    return tables


def step(tables: ServerTables, places: list[int], by: float) -> None:
    """Add to some rows, as SGD does that climbs."""
    (key,) = tables.keys
    rows = torch.full((len(places), WIDTH), by)
    (sum_,) = tables.rows_of(key, [frame(torch.tensor(places)), frame(rows)])
    tables.take_gradients({key: sum_}, {key: [True]}, 1.0)
    torch.optim.SGD(tables.slabs, lr=1.0, maximize=True).step()


def test_rows_of_all_servers_are_the_table() -> None:
    whole = model().weight.detach()
    for server in range(3):
        tables = held(server, 3)
        assert tables.keys == [7 + server]
        (stripes,) = (run.stripes for run in tables.runs.values())
        ids = torch.tensor([row for stripe in stripes for row in stripe])
        found = tables.look_up(0, [frame(torch.arange(len(ids)))], before=False)
        assert torch.equal(found, whole[ids])


def test_rows_can_be_had_as_they_were_before_the_last_step() -> None:
    tables, first = held(), model().weight.detach()
    step(tables, [3, 5], 1.0)
    step(tables, [5, 9], 2.0)
    asked = [frame(torch.tensor([9, 3, 5, 5, 0]))]
    now, before = (tables.look_up(0, asked, before=b) for b in (False, True))
    ids, once = torch.tensor([9, 3, 5, 5, 0]), torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0])[:, None]
    assert torch.equal(before, first[ids] + once)
    assert torch.equal(now, first[ids] + once + torch.tensor([2.0, 0, 2, 2, 0])[:, None])
    tables.forget()
    assert torch.equal(tables.look_up(0, asked, before=True), now)


def test_who_takes_its_place_knows_the_rows_before_the_last_step() -> None:
    tables, other = held(), held()
    step(tables, [3, 5], 1.0)
    with torch.no_grad():
        other.slabs[0].copy_(tables.slabs[0])
    other.recall(tables.before_state())
    asked = [frame(torch.tensor([3, 4, 5]))]
    for before in (False, True):
        rows = tables.look_up(0, asked, before=before)
        assert torch.equal(other.look_up(0, asked, before=before), rows)


@pytest.mark.parametrize("places", [[ROWS], [-1], [3, 2**62], [0, -(2**62)]])
def test_a_lookup_of_rows_that_are_not_held_is_refused(places: list[int]) -> None:
    with pytest.raises(ValueError, match="outside of the 100"):
        held().look_up(0, [frame(torch.tensor(places))], before=False)


@pytest.mark.parametrize("table", [-1, 1, 2**62])
def test_a_lookup_in_no_table_is_refused(table: int) -> None:
    with pytest.raises(ValueError, match="there is no table"):
        held().look_up(table, [frame(torch.tensor([1]))], before=False)


@pytest.mark.parametrize("frames", [[], [b"1234567"], [bytes(8), bytes(8)]])
def test_a_lookup_with_other_frames_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        held().look_up(0, [memoryview(one) for one in frames], before=False)


@pytest.mark.parametrize(
    ("places", "num_rows"),
    [([4, 3], 2), ([4, 4], 2), ([4], 2), ([4, 5], 1), ([ROWS], 1), ([-1], 1)],
)
def test_a_push_of_rows_that_cannot_be_is_refused(places: list[int], num_rows: int) -> None:
    with pytest.raises((ValueError, BadFrame)):
        held().rows_of(7, [frame(torch.tensor(places)), frame(torch.zeros(num_rows, WIDTH))])


def test_a_push_without_its_rows_is_refused() -> None:
    with pytest.raises(ValueError):
        held().rows_of(7, [frame(torch.tensor([4]))])


def welcome(segments: list[SharedSegment | None], committed: int = 0) -> ServerWelcome:
    places = [None if segment is None else segment.place for segment in segments]
    return ServerWelcome(
        request=1,
        is_shared=bool(segments),
        values=[],
        committed=committed,
        next_batch=0,
        tables=places,
    )


class Answers:
    """A line to one server that answers from its tables at once."""

    def __init__(self, tables: ServerTables):
        self.tables, self.asked, self.num_received = tables, 0, 0

    def __len__(self) -> int:
        return 1

    def ask(self, server: int, kind: Any, payload: list[Tensor], *, table: int, **_: Any) -> Tensor:
        self.asked += 1
        return self.tables.look_up(table, [frame(payload[0])], before=False)

    def answer(self, found: Tensor) -> tuple[Any, list[memoryview]]:
        return SimpleNamespace(), [frame(found)]


@pytest.fixture
def table() -> Iterator[tuple[nn.Embedding, Answers]]:
    made, line = model(), Answers(held())
    empty_tables(made)
    lookups = WorkerLookups(made, line, 0, range(1), [welcome([])])  # type: ignore[arg-type]
    yield made, line
    lookups.close()
    assert "forward" not in vars(made)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0,), (3, 0)])
def test_a_lookup_gives_what_the_embedding_would(
    table: tuple[nn.Embedding, Answers], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    made, line = table
    ids = torch.randint(ROWS, shape).to(dtype)
    assert torch.equal(made(ids), model()(ids))
    assert line.asked == (ids.numel() > 0)
    assert made.weight.numel() == 0, "a worker holds no rows"


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        (torch.tensor([3, ROWS]), "was asked for row 100, and its rows are 0 to 99"),
        (torch.tensor([3, -1]), "was asked for row -1"),
        (torch.tensor([0.5]), "numbers of type torch.float32"),
        (torch.tensor([True]), "numbers of type torch.bool"),
    ],
)
def test_rows_that_are_not_there_are_refused_by_name(
    table: tuple[nn.Embedding, Answers], ids: Tensor, told: str
) -> None:
    with pytest.raises(RecipeError, match=told):
        table[0](ids)


# ---- in memory that a host shares


def test_a_worker_whose_model_is_nothing_but_tables_is_of_its_servers_host() -> None:
    optimizer = torch.optim.SGD(model().parameters())
    layout = layout_of(model(), optimizer, 1)
    memory = WorkerMemory(layout, 1, model())
    hello = WorkerHello(
        generation=0, request=1, secret="", layout="", seat=0, num_rows=1, rows=memory.place
    )
    assert open_session(hello, layout, 1, 1, True).rows is not None


@pytest.mark.parametrize("padding", [None, 3])
def test_rows_that_are_shown_are_read_without_a_question(padding: int | None) -> None:
    made, plain = model(), model()
    made.padding_idx = plain.padding_idx = padding
    empty_tables(made)
    tables = held()
    line, segments = Answers(tables), share_tables(tables.slabs)
    lookups = WorkerLookups(made, line, 0, range(1), [welcome(segments)])  # type: ignore[arg-type]
    ids = torch.tensor([[3, 9], [3, 5]])
    for place, by in ((3, 1.0), (9, 2.0)):
        found = made(ids)
        expected = plain(ids)
        assert torch.equal(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        lookups.end_piece()
        (((gradient,),),) = [lookups._sum.rows]
        assert plain.weight.grad is not None and gradient is not None
        assert torch.equal(gradient.to_dense(), plain.weight.grad.to_dense())
        step(tables, [place], by)
        plain.weight.data[place] += by
        plain.weight.grad = None
        lookups.begin()
    assert line.asked == 0 and made.weight.numel() == 0
    lookups.close()


def test_a_server_that_has_made_the_step_already_is_asked_for_the_rows_before_it() -> None:
    made, tables = model(), held()
    empty_tables(made)
    line, segments = Answers(tables), share_tables(tables.slabs)
    lookups = WorkerLookups(made, line, 0, range(1), [welcome(segments, 5)])  # type: ignore[arg-type]
    for batch, asked in ((4, 1), (5, 1), (6, 1)):
        lookups.batch = batch
        made(torch.tensor([3]))
        assert line.asked == asked
    lookups.close()


def test_what_is_lent_is_read_until_the_next_begin() -> None:
    lender, borrowed = FrameWriter(), FrameReader()
    for length in (10, 3, 5_000, 40):
        parts = [torch.arange(length), torch.randn(length, WIDTH), torch.empty(0)]
        first, second = lender.write(parts), lender.write([parts[0] + 1])
        assert first is not None and second is not None
        frames = borrowed.frames(first, 1 << 20)
        assert [bytes(frame) for frame in frames] == [bytes(bytes_of(part)) for part in parts]
        (other,) = borrowed.frames(second, 1 << 20)
        assert bytes(other) == bytes(bytes_of(parts[0] + 1)), "one takes no place of another"
        lender.begin()


def test_what_was_lent_first_is_there_when_more_room_was_needed() -> None:
    """A server may open it only then."""
    lender = FrameWriter()
    first, second = lender.write([torch.ones(3)]), lender.write([torch.zeros(10_000)])
    assert first is not None and second is not None and first.place.name != second.place.name
    (frame_,) = FrameReader().frames(first, 1 << 20)
    assert bytes(frame_) == bytes(bytes_of(torch.ones(3)))


def test_only_what_is_read_is_bounded() -> None:
    """One memory holds what is lent to all servers, and more."""
    lender = FrameWriter()
    lent = [lender.write([torch.full((10_000,), float(server))]) for server in range(8)][-1]
    assert lent is not None and lent.place.num_bytes > 4 * 40_000
    (frame_,) = FrameReader().frames(lent, 40_000)
    assert bytes(frame_) == bytes(bytes_of(torch.full((10_000,), 7.0)))
    with pytest.raises(ValueError, match="can be meant"):
        FrameReader().frames(lent, 39_999)


def test_memory_that_fits_one_step_fits_the_next() -> None:
    lender, names = FrameWriter(), []
    for _ in range(6):
        lent = [lender.write([torch.zeros(length)]) for length in (10_000, 12_000, 9_000)]
        names.append({one.place.name for one in lent if one is not None})
        lender.begin()
    assert len(names[-1]) == 1 and names[-1] == names[-2] == names[-3]


@pytest.mark.parametrize("span", [(0, 1 << 30), (-8, 8), (16, 8), (4096, 4097)])
def test_what_does_not_stand_in_the_memory_is_refused(span: tuple[int, int]) -> None:
    segment = SharedSegment.create(4096)
    with pytest.raises(ValueError, match="do not stand"):
        FrameReader().frames(SharedFrames(segment.place, [span]), 1 << 40)


def test_memory_that_is_gone_is_refused() -> None:
    segment = SharedSegment.create(4096)
    lent = SharedFrames(segment.place, [(0, 8)])
    segment.close()
    with pytest.raises(ValueError, match="cannot be read"):
        FrameReader().frames(lent, 4096)


def test_rows_stay_where_they_are_if_there_is_no_memory_to_share(monkeypatch) -> None:
    def refuse(num_bytes: int) -> SharedSegment:
        raise NotShared("none")

    tables, before = held(), model().weight
    monkeypatch.setattr(SharedSegment, "create", refuse)
    assert share_tables(tables.slabs) == [None] and torch.equal(tables.slabs[0], before)
    assert FrameWriter().write([torch.zeros(3)]) is None
