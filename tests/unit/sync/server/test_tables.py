"""What is wrong with a lookup or a push of rows is said, and changes nothing."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.wire import BadFrame, bytes_of
from shoal.errors import RecipeError
from shoal.sync.server.lookups import Lookups, empty_tables
from shoal.sync.server.tables import Tables

ROWS, WIDTH = 100, 4


def model() -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(ROWS, WIDTH, sparse=True)


def frame(tensor: Tensor) -> memoryview:
    return memoryview(bytearray(bytes_of(tensor.contiguous())))


def held(number: int = 0, num_servers: int = 1) -> Tables:
    tables = Tables(model(), number, num_servers)
    tables.number_from(7)
    return tables


def step(tables: Tables, places: list[int], by: float) -> None:
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


class Answers:
    """A line to one server that answers from its tables at once."""

    def __init__(self, tables: Tables):
        self.tables, self.asked = tables, 0

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
    lookups = Lookups(made, line, 0, range(1))  # type: ignore[arg-type]
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
