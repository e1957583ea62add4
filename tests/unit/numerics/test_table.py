"""A lazy table: first rows are pure, learnt ones take memory as they are touched."""

import builtins
import copy
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import RecipeError, UsageError
from shoal.numerics import reserved
from shoal.numerics.reserved import ReservedParameter, clear_rows, reserved_zeros, touched_rows

HUGE = 1 << 34  # bytes


def test_first_rows_are_pure_and_normal() -> None:
    table = shoal.Table(1 << 40, 6, std=0.5, seed=1)
    ids = torch.randint(1 << 40, (4000,))
    rows = table(ids).detach()
    for some in (ids[:1], ids[17:30].view(13, 1), ids[5:7]):
        at = [int((ids == i).nonzero()[0]) for i in some.flatten()]
        assert torch.equal(table(some).view(-1, 6), rows[at]), "they depend on their company"
    assert abs(float(rows.mean())) < 0.02 and abs(float(rows.std()) - 0.5) < 0.02
    among = torch.corrcoef(rows.T) - torch.eye(6)
    assert float(among.abs().max()) < 0.1
    assert torch.equal(shoal.Table(1 << 40, 6, std=0.5, seed=1)(ids), rows)
    assert not torch.equal(shoal.Table(1 << 40, 6, std=0.5, seed=2)(ids), rows)


def test_the_key_is_drawn_as_first_weights_are() -> None:
    torch.manual_seed(3)
    one, other = shoal.Table(9, 4), shoal.Table(9, 4)
    torch.manual_seed(3)
    ids = torch.arange(9)
    assert torch.equal(shoal.Table(9, 4)(ids), one(ids))
    assert not torch.equal(one(ids), other(ids))


def test_padding_is_zeros_and_learns_nothing() -> None:
    table = shoal.Table(9, 4, padding_idx=2)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert not table(torch.tensor(2)).any()
    assert touched_rows([table.learnt.weight]).tolist() == [1]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rowwise": lambda p: shoal.RowwiseAdagrad(p, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_touched_rows_take_memory(name: str) -> None:
    before = _resident_bytes()
    table = shoal.Table(HUGE // 256, 64)
    optimizer = OPTIMIZERS[name](list(table.parameters()))
    ids = torch.randint(table.num_rows, (300,))
    for _ in range(2):
        optimizer.zero_grad()
        table(ids).square().sum().backward()
        optimizer.step()
    state = table.state_dict()
    assert torch.equal(state["learnt.rows"], ids.unique())
    twin = copy.deepcopy(table)
    other = shoal.Table(HUGE // 256, 64)
    other(ids[:1] + 0).sum().backward()
    with torch.no_grad():
        other.learnt.weight[5] = 1.0
    other.load_state_dict(state)
    for same in (twin, other):
        assert torch.equal(same(ids), table(ids)) and isinstance(
            same.learnt.weight, ReservedParameter
        )
        assert torch.equal(touched_rows([same.learnt.weight]), ids.unique())
    assert _resident_bytes() - before < 128 << 20


def _resident_bytes() -> int:
    with open("/proc/self/status") as file:
        words = file.read().split()
    return int(words[words.index("RssAnon:") + 1]) * 1024


@pytest.mark.parametrize("told", ["runs", "pages", "nothing"])
@pytest.mark.parametrize("shape", [(5000, 3), (700, 1), (40, 4000), (3, 1)])
def test_touched_rows_are_found(
    shape: tuple[int, int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the row, also within a tensor, and where the system does not tell of pages."""
    monkeypatch.setattr(reserved, "_RUNS", 3)
    monkeypatch.setattr(reserved, "_LOOK", 7)
    if told != "runs":
        monkeypatch.setattr(reserved, "_SCAN", 0)  # as on an older system
    if told == "nothing":

        def closed(path: Any, *more: Any, **how: Any) -> Any:
            if path == "/proc/self/pagemap":
                raise PermissionError(path)
            return opened(path, *more, **how)

        opened = open
        monkeypatch.setattr(builtins, "open", closed)
    zeros = reserved_zeros(shape, torch.float32)
    some = torch.randperm(shape[0])[: max(1, shape[0] // 50)].sort().values
    zeros[some, -1] = -0.0
    assert touched_rows([zeros]).tolist() == some.tolist()
    within = [int(row) - 1 for row in some if row >= 1]
    assert touched_rows([zeros[1:]]).tolist() == within
    clear_rows(zeros)
    assert not len(touched_rows([zeros]))


def test_rows_are_found_without_a_look_at_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of terabytes that would be a billion entries, at every save."""
    pages = reserved_zeros((4, 1024), torch.float32)
    try:
        list(reserved._scanned(pages.data_ptr() // 4096, pages.data_ptr() // 4096 + 1))
    except OSError:
        pytest.skip("Linux tells of runs of pages since 6.7")
    zeros = reserved_zeros((1 << 36, 16), torch.float32)
    some = torch.randint(1 << 36, (300,)).unique()
    zeros[some] = 1.0
    monkeypatch.setattr(reserved, "_looked_at", None)
    assert torch.equal(touched_rows([zeros]), some)


@pytest.mark.parametrize(
    "wrong",
    [(0, 4, {}), (4, 0, {}), (1 << 50, 4, {}), (4, 4, {"std": -1.0}), (4, 4, {"padding_idx": 4})],
)
def test_a_table_that_cannot_be_is_refused(wrong: tuple[int, int, dict[str, Any]]) -> None:
    num_rows, dim, more = wrong
    with pytest.raises(UsageError):
        shoal.Table(num_rows, dim, **more)


@pytest.mark.parametrize(("ids", "told"), [([3, 9], "row 9, and its"), ([-1, 3], "row -1, and")])
def test_rows_that_are_not_there_are_refused(ids: list[int], told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        shoal.Table(9, 4)(torch.tensor(ids))


def test_a_state_that_would_fill_all_rows_is_refused() -> None:
    with pytest.raises(RecipeError, match="initial_accumulator_value"):
        torch.optim.Adagrad(shoal.Table(9, 4).parameters(), initial_accumulator_value=0.1)
