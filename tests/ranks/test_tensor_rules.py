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
from torch.utils._pytree import tree_leaves

from shoal.mesh import Mesh
from shoal.parallel.layout import Cut, part_of
from shoal.parallel.tensor.cutting import TensorForward
from shoal.parallel.tensor.part import share_of
from shoal.testing.ranks import Pool

SHAPE = (2, 4, 6, 8)
CUTS = (Cut(0), Cut(1), Cut(2), Cut(3), Cut(1, 2), Cut(3, 2))
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


def differences(mesh: Mesh, table: str, name: str) -> list[str]:
    """Where a case on parts is unlike the same on the whole, for every cut."""
    case, found = TABLES[table][name], []
    for cut in CUTS:
        word = difference(mesh, case, cut)
        if word:
            found.append(f"{cut}: {word}")
    return found


def difference(mesh: Mesh, case: Case, cut: Cut) -> str:
    whole = draw(*SHAPE).requires_grad_()
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


TABLES = {"two meanings": TWO_MEANINGS}


@pytest.mark.parametrize("name", TWO_MEANINGS)
def test_what_means_two_things_means_the_same_on_parts(pool: Pool, name: str) -> None:
    """Masks that are bool or float, indices that are masks or numbers, sums of bools."""
    assert pool.run(differences, 2, "two meanings", name) == [[], []]
