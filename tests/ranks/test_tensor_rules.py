"""Single functions on parts give what they give on the whole: values, gradients, random state.

Each case is a function of one whole tensor, of 2 x 4 x 6 x 8 elements, that is cut along some dim.
A case that has no rule, or whose rule refuses, is computed on whole values, and must be right too.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from shoal.comm.mesh import Mesh
from shoal.errors import RecipeError
from shoal.parallel.layout import Cut, part_of
from shoal.parallel.tensor.cutting import TensorForward
from shoal.parallel.tensor.part import share_of
from shoal.testing.ranks import Pool

SHAPE = (2, 4, 6, 8)
CUTS = (Cut(0), Cut(1), Cut(2), Cut(3), Cut(1, 2))
Case = Callable[[Tensor], Any]


def draw(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(*shape: int) -> Tensor:
    """A mask with True in every row."""
    mask = draw(*shape, seed=6) > 0.3
    mask[..., 0] = True
    return mask


def attend(x: Tensor, mask: Tensor | None = None, p: float = 0.4, **rest: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x.tanh(), x.sin(), mask, p, **rest)


def bias(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


def imul(into: Tensor, x: Tensor) -> Tensor:
    into *= x
    return into


NOTHING = some(2, 1, 6, 6).index_fill(2, torch.tensor([3]), False)  # a row that sees nothing

# Masks that are bool or float, indices that are masks or numbers, sums of bools.
TWO_MEANINGS: dict[str, Case] = {
    "attention, bool mask": lambda x: attend(x, some(2, 1, 6, 6), 0.0),
    "attention, dropout": lambda x: attend(x),
    "attention, causal, dropout": lambda x: attend(x, is_causal=True),
    "attention, bool mask, dropout": lambda x: attend(x, some(2, 1, 6, 6)),
    "attention, bool mask of keys, dropout": lambda x: attend(x, some(2, 1, 1, 6)),
    "attention, bool mask of heads, dropout": lambda x: attend(x, some(4, 6, 6), scale=0.2),
    "attention, bool mask of all, dropout": lambda x: attend(x, some(6, 6)),
    "attention, bool mask, empty row": lambda x: attend(x, NOTHING),
    "attention, float mask, dropout": lambda x: attend(x, bias(some(2, 1, 6, 6))),
    "attention, float mask of heads, dropout": lambda x: attend(x, bias(some(2, 4, 6, 6))),
    "attention, all dropped": lambda x: attend(x, some(2, 1, 6, 6), 1.0),
    "attention, mask of parts": lambda x: attend(x, (x @ x.mT).sigmoid() > 0.4),
    "attention, only the mask of parts": lambda x: attend(draw(*SHAPE), x @ x.mT),
    "attention of three dims, bool mask": lambda x: attend(x.flatten(0, 1), some(8, 6, 6)),
    "index by bool": lambda x: x[some(2)],
    "index by bool of two dims": lambda x: x[some(2, 4)],
    "index by bytes": lambda x: x[some(2).byte()],
    "index by bytes of two dims": lambda x: x[some(2, 4).byte()],
    "index by numbers": lambda x: x[torch.tensor([1, 0, 1])],
    "index by a table of numbers": lambda x: x[torch.tensor([[1, 0], [0, 1]])],
    "index by True": lambda x: x[True],
    "index by True and a number": lambda x: x[1, True],
    "index by bool behind": lambda x: x[:, some(4)],
    "index by a bool part": lambda x: x[x > 0.1],
    "where": lambda x: torch.where(x > 0, x, 0.5),
    "where of one": lambda x: torch.where(x > 0),
    "masked_fill": lambda x: x.masked_fill(some(6, 8), -3.0),
    "masked_fill by parts": lambda x: x.masked_fill(x > 0.5, -3.0),
    "sum of bools": lambda x: (x > 0).sum(2),
    "bools added": lambda x: (x > 0) + (x > 1),
    "bool times float": lambda x: (x > 0) * x,
    "cross_entropy, classes": lambda x: F.cross_entropy(x, torch.zeros(2, 6, 8).long()),
    "cross_entropy, probabilities": lambda x: F.cross_entropy(x, x.softmax(1)),
    "max of two": lambda x: torch.max(x, x.flip(0)),
    "max along": lambda x: x.max(1).values,
    "var, biased": lambda x: x.var(2, False),
    "var of all, biased": lambda x: x.var(False),
    "sort, descending": lambda x: x.sort(2, True).values,
    "added in place to the whole": lambda x: torch.zeros(SHAPE).add_(x),
    "multiplied in place into the whole": lambda x: imul(draw(*SHAPE), x),
    "type, asked": lambda x: x * (x.type() == "torch.FloatTensor"),
}


class Halved(torch.autograd.Function):
    """An autograd function with a gradient of its own, and two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, times: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y * times, x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, y = ctx.saved_tensors
        return grads[0] * y / 2 + grads[1], grads[0] * x * 3, None


def changed(x: Tensor, change: Callable[[Tensor], object]) -> Tensor:
    """What a value is after it was changed in place."""
    x = x * 1
    change(x)
    return x


def written(index: Any, value: Any) -> Case:
    def write(x: Tensor) -> None:
        x[index] = value(x) if callable(value) else value

    return lambda x: changed(x, write)


def through_view(x: Tensor) -> Tensor:
    x = x * 1
    x[:, :][..., 1:3] = 7.0
    x.transpose(1, 2).add_(1)
    return x


def cached(x: Tensor) -> Tensor:
    """As caches of keys begin: with a tensor of one dim and no element."""
    kept = torch.cat([torch.tensor([]), x], dim=-2)
    return torch.cat([kept, x.tanh()], dim=-2)


LENGTHS = torch.tensor([4, 2])


def packed(x: Tensor) -> Tensor:
    rows = pack_padded_sequence(x.flatten(2), LENGTHS, batch_first=True)
    rows = rows._replace(data=rows.data.tanh())
    return pad_packed_sequence(rows, batch_first=True)[0]


NUMBERS = torch.arange(2 * 4 * 6 * 8).reshape(SHAPE) % 2

# Functions with a rule, and such as are computed on whole values and cut again.
OTHERS: dict[str, Case] = {
    "cat onto nothing": cached,
    "cat onto nothing along heads": lambda x: torch.cat([torch.tensor([]), x, x], 1),
    "cat of whole and part": lambda x: torch.cat([draw(*SHAPE), x], 2),
    "gather": lambda x: x.gather(3, NUMBERS),
    "gather along heads": lambda x: torch.gather(x, dim=1, index=NUMBERS[:, :3]),
    "gather from the whole": lambda x: draw(*SHAPE).gather(2, (x > 0).long()) * x,
    "take_along_dim": lambda x: torch.take_along_dim(x, NUMBERS[:1], 2),
    "scatter": lambda x: x.scatter(2, NUMBERS, 0.5),
    "scatter_add of a part": lambda x: torch.zeros(SHAPE).scatter_add(3, NUMBERS, x),
    "index_add": lambda x: x.index_add(1, torch.tensor([0, 2]), draw(2, 2, 6, 8)),
    "repeat": lambda x: x.repeat(1, 2, 1, 3) * 2,
    "repeat, more dims": lambda x: x.repeat(3, 1, 2, 1, 1),
    "tile": lambda x: x.tile(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 1),
    "repeat_interleave, unevenly": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 1]), 1),
    "as_strided": lambda x: x.as_strided((2, 3, 5), (192, 7, 1)),
    "as_strided, chunks": lambda x: x.as_strided((2, 4, 3, 4, 8), (192, 48, 8, 8, 1)),
    "as_strided of turned": lambda x: x.transpose(1, 2).as_strided((2, 6, 4), (192, 8, 48)),
    "stride": lambda x: x.transpose(1, 3).as_strided((2, 3), x.transpose(1, 3).stride()[:2]),
    "setitem, number": written((slice(None), slice(1, 3)), 0.5),
    "setitem, last": written((..., 2), 0.5),
    "setitem, part": written((slice(None), 1), lambda x: x[:, 0].tanh()),
    "setitem, own part": written(slice(0, 1), lambda x: x[1:].tanh()),
    "setitem, whole": written((0, slice(None), 2), lambda x: draw(4, 8)),
    "setitem, row": written((0, slice(None), 2), lambda x: draw(8)),
    "setitem by bool": written(some(2, 4), -1.0),
    "setitem by bool part": lambda x: changed(x, lambda y: y.__setitem__(y > 0.3, 0.0)),
    "setitem by numbers": written(torch.tensor([1, 0]), lambda x: draw(6, 8)),
    "setitem by two tensors": written((torch.tensor([0, 1]), torch.tensor([3, 2])), 2.0),
    "setitem into the whole": lambda x: changed(draw(*SHAPE), lambda y: y.__setitem__(0, x[1])),
    "through a view": through_view,
    "a piece, then a write": lambda x: changed(x, lambda y: y.add_(x[:, :2].sum() + y[0, 0, 0, 0])),
    "unsqueeze_": lambda x: changed(x, lambda y: y.unsqueeze_(1)) * 2,
    "squeeze_": lambda x: changed(x, lambda y: y.unsqueeze_(0).squeeze_()) * 2,
    "transpose_": lambda x: changed(x, lambda y: y.transpose_(1, 3)).sum(0),
    "len after unsqueeze_": lambda x: x * len(changed(x, lambda y: y.unsqueeze_(0))),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "expand_as a part": lambda x: draw(4, 1, 8).expand_as(x) * x,
    "expand_as a part, broadcast": lambda x: draw(1, 1).expand_as(x) * x,
    "view_as a part": lambda x: draw(8, 48).view_as(x) * x,
    "reshape_as": lambda x: x.reshape_as(torch.empty(2, 4, 48)),
    "packed sequences": packed,
    "an autograd function": lambda x: Halved.apply(x, x.tanh(), 0.3)[0],
    "an autograd function, both results": lambda x: Halved.apply(x, draw(*SHAPE), 0.3),
    "an autograd function of wholes": lambda x: Halved.apply(draw(*SHAPE), draw(8), 0.3)[0] * x,
    "flip": lambda x: x.flip(0, 2),
    "flip, by list": lambda x: torch.flip(x, [1, 3]).tanh(),
    "roll": lambda x: x.roll(1, 2) + torch.roll(x, (1, 2), dims=(1, 3)),
    "roll of all": lambda x: x.roll(3),
    "unfold": lambda x: x.unfold(2, 3, 1),
    "unfold of images": lambda x: F.unfold(x, (2, 2)),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "complex": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(3, (4, 2))) * torch.complex(draw(6, 4), draw(6, 4))
    ).flatten(3),
    "split unevenly": lambda x: [p.tanh() for p in x.split([2, 4, 2], 3)],
    "split unevenly, heads": lambda x: x.split([1, 3], 1),
    "pieces of unlike size": lambda x: (x[..., :4], x[:, :, 4:, 4:], x[:, 1:] * 2, x[..., ::2]),
    "diagonal": lambda x: x.diagonal(dim1=2, dim2=3).tanh(),
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=2),
    "cummax": lambda x: x.cummax(2).values,
    "var_mean": lambda x: torch.var_mean(x, 2),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=2),
    "fft": lambda x: torch.fft.rfft(x, dim=2).abs(),
    "prelu": lambda x: F.prelu(x, draw(4).abs()),
    "einsum of a tuple": lambda x: torch.einsum("bhqd,bhkd->bhqk", (x, x.tanh())),
    "einsum": lambda x: torch.einsum("bhqd,bhkd->bqk", x, x.tanh()),
    "cdist": lambda x: torch.cdist(x, x.tanh()),
    "two of them in a row": lambda x: torch.fft.ifft(torch.fft.fft(x, dim=2), dim=2).real,
    "random numbers": lambda x: x * torch.rand_like(x) + F.alpha_dropout(x, 0.3, True),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "out": lambda x: changed(x.detach(), lambda y: torch.add(y, 1, out=y)),
    "a lstm": lambda x: LSTM(x.flatten(2))[0],
    "index_put_": lambda x: changed(
        x, lambda y: y.index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor(3.0))
    ),
    "masked_scatter_": lambda x: changed(x, lambda y: y.masked_scatter_(y > 0.5, draw(384))),
    "scatter_": lambda x: changed(x, lambda y: y.scatter_(3, NUMBERS, 0.5)),
    "fill_diagonal_": lambda x: changed(x[0, 0], lambda y: y.fill_diagonal_(3.0)),
}


LSTM = torch.nn.LSTM(48, 8, batch_first=True).requires_grad_(False)


def differences(mesh: Mesh, table: str) -> list[str]:
    """Where a case on parts is unlike the same on the whole, for every cut."""
    found = []
    for name, case in TABLES[table].items():
        for cut in CUTS:
            try:
                word = difference(mesh, case, cut)
            except RuntimeError as error:  # a sentence, where ranks fail alike
                word = str(error)
            if word:
                found.append(f"{name}, {cut}: {word}")
    return found


def difference(mesh: Mesh, case: Case, cut: Cut) -> str:
    whole = draw(*SHAPE).requires_grad_()
    torch.nn.init.constant_(LSTM.weight_hh_l0, 0.1)
    torch.nn.init.constant_(LSTM.weight_ih_l0, 0.1)
    torch.manual_seed(3)
    expected = case(whole.clone())
    after = torch.get_rng_state()
    mode = TensorForward(mesh.data)
    local = share_of(whole.detach(), cut, mesh.rank, mesh.num_ranks).contiguous().requires_grad_()
    torch.manual_seed(3)
    with mode:
        result = mode.whole(case(mode.region.part(local.clone(), cut)))
    if not torch.equal(torch.get_rng_state(), after):
        return "other numbers were drawn"
    pairs = list(zip(tree_leaves(result), tree_leaves(expected), strict=True))
    for mine, theirs in pairs:
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return f"{mine.dtype} {tuple(mine.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        if not torch.allclose(mine, theirs, 1e-5, 1e-5, equal_nan=True):
            return f"values differ by {(mine - theirs).abs().max():.2g}"
    if not any(theirs.requires_grad for _, theirs in pairs):
        return ""
    for leaves in zip(*pairs, strict=True):
        sum((t * draw(*t.shape)).sum() for t in leaves if t.requires_grad).backward()
    assert whole.grad is not None and local.grad is not None
    expected_grad = part_of(whole.grad, cut, mesh.rank, mesh.num_ranks)
    if not torch.allclose(local.grad, expected_grad, 1e-4, 1e-4, equal_nan=True):
        return f"gradients differ by {(local.grad - expected_grad).abs().max():.2g}"
    return ""


TABLES = {"two meanings": TWO_MEANINGS, "others": OTHERS}


@pytest.mark.parametrize("table", TABLES)
def test_functions_on_parts_give_what_they_give_on_the_whole(pool: Pool, table: str) -> None:
    assert pool.run(differences, 2, table) == [[], []]


def refusals(mesh: Mesh) -> list[str]:
    """What is said of writes that do not reach the value they are meant for."""
    writes = (by_diagonal, by_piece, under_piece)
    return [refusal(mesh, write, cut) for write in writes for cut in (1, 2)]


def by_diagonal(x: Tensor) -> Tensor:
    x.diagonal(dim1=2, dim2=3).add_(1)
    return x * 2


def by_piece(x: Tensor) -> Tensor:
    x[:, :2, :3].mul_(3)
    return x


def under_piece(x: Tensor) -> Tensor:
    piece = x[:, :2, :3]
    x.mul_(3)
    return piece * 2


def refusal(mesh: Mesh, write: Case, dim: int) -> str:
    mode, cut = TensorForward(mesh.data), Cut(dim)
    local = share_of(draw(*SHAPE), cut, mesh.rank, mesh.num_ranks)
    try:
        with mode:
            mode.whole(write(mode.region.part(local.clone(), cut)))
    except RecipeError as error:
        return str(error)
    return ""


def test_a_write_that_would_be_lost_is_refused(pool: Pool) -> None:
    for words in pool.run(refusals, 2)[0]:
        assert "writes in place through a view" in words
