"""Touched rows of a lazy table, stripe by stripe, are the table; whoever held which stripes."""

import pytest
import torch

import shoal
from shoal.errors import BadCheckpoint
from shoal.formats.weights import ModelWeights
from shoal.numerics.reserved import ReservedParameter, reserved_zeros
from shoal.parallel.layout import Slice
from shoal.parallel.striping import Stripes, Striping
from shoal.sync.lazy_tables import ExpandedSource, join_stripes, rows_name
from shoal.sync.state import MemorySource, ParameterRun, ShardedState, TrainState
from shoal.sync.state_chunks import outline_state, read_outline

ROWS, WIDTH, NAME = 300, 3, "table.learnt.weight"


def trained() -> tuple[shoal.Table, torch.optim.Optimizer]:
    table = shoal.Table(ROWS, WIDTH, seed=1)
    optimizer = shoal.RowwiseAdagrad(table.parameters(), lr=0.1)
    table(torch.tensor([0, 4, 5, 17, 250, 299])).square().sum().backward()
    optimizer.step()
    return table, optimizer


def state_of(table: shoal.Table, optimizer: torch.optim.Optimizer) -> ShardedState:
    runs = {table.learnt.weight: ParameterRun(NAME, table.learnt.weight.shape)}
    return TrainState({NAME: table.learnt.weight}, optimizer, runs).state_dict()


def test_a_state_has_the_touched_rows_alone() -> None:
    state = state_of(*trained())
    assert f"model.{NAME}" not in state.tensors
    rows = [state.tensors[rows_name(stripe, NAME)][0].tensor.tolist() for stripe in range(60)]
    assert rows[0] == [0, 4] and rows[1] == [5] and rows[3] == [17] and rows[59] == [299]
    assert sum(map(len, rows)) == 6
    table = trained()[0]
    bare = {
        n.replace("model.", ""): p[0].tensor for n, p in state.tensors.items() if "opt" not in n
    }
    found = join_stripes(bare)
    assert torch.equal(found["table.learnt.rows"], table.learnt.state_dict()["rows"])
    assert torch.equal(found["table.learnt.values"], table.learnt.state_dict()["values"])


def test_servers_take_their_stripes_and_together_have_the_state() -> None:
    whole, together = state_of(*trained()), {}
    for server in range(3):
        stripes = Striping(ROWS, 3).stripes_of(server)
        own = Stripes(NAME, ROWS, stripes)
        shape = (sum(map(len, stripes)), WIDTH)
        part = read_outline(MemorySource(whole), outline_state(MemorySource(whole), [(own, shape)]))
        slab = ReservedParameter(reserved_zeros(shape, torch.float32))
        with torch.no_grad():
            slab[1] = 7.0  # of a state before
        optimizer = shoal.RowwiseAdagrad([slab], lr=0.1)
        held = TrainState({}, optimizer, {slab: own})
        ExpandedSource(MemorySource(part), [NAME]).fill(
            f"model.{NAME}", own.parts(slab, held.holding)
        )
        held.load_state_dict(MemorySource(part))
        together |= held.state_dict(with_runs=True).tensors
    assert together.keys() == whole.tensors.keys()
    for name, (one,) in whole.tensors.items():
        assert torch.equal(one.tensor, together[name][0].tensor), name


def test_rows_of_another_stripe_are_refused() -> None:
    table, optimizer = trained()
    state = state_of(table, optimizer)
    state.tensors[rows_name(0, NAME)] = [Slice(torch.tensor([0, 400]), (2,), (0,))]
    runs = {table.learnt.weight: ParameterRun(NAME, table.learnt.weight.shape)}
    with pytest.raises(ValueError, match="rows of another stripe"):
        TrainState({NAME: table.learnt.weight}, optimizer, runs).load_state_dict(
            MemorySource(state)
        )


class Rows(dict[str, torch.Tensor]):
    """As a checkpoint lists its tensors."""

    plain: dict[str, str] = {}


def test_other_programs_are_sent_elsewhere() -> None:
    source = Rows({rows_name(0, NAME): torch.arange(2), "model.head": torch.zeros(2)})
    with pytest.raises(BadCheckpoint, match="resume that run with --resume"):
        ModelWeights(source)  # type: ignore[arg-type]
