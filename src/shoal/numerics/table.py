"""A lazy table: an embedding whose rows come into being when they are first looked up.

A row is the sum of its initial value, a pure function of the table's key and the row's number, and
of its updates since, which lie in memory that is only reserved. The updates of a row that was never
looked up are zeros and take no memory: in one process, on a server, and in a checkpoint.

When to use it: more rows than memory, of which a run touches some. When not: rows that begin with
values of your own; then `nn.Embedding(sparse=True)`.
Cost: of each lookup the making of its first rows; of a touched row a page at the most.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RecipeError, UsageError
from shoal.numerics.reserved import ReservedParameter, clear_rows, reserved_zeros, touched_rows

_MOST_ROWS = 1 << 48
_PER_WORD = 4  # elements of 16 bits each


class Table(nn.Module):
    """`num_rows` rows of `dim` elements, at first normal with deviation `std`.

    The key of first rows is drawn as first weights are, from the run's seed, or made of `seed`; two
    tables with one `seed` begin alike. Row `padding_idx` is zeros and learns nothing.
    """

    key: Tensor

    def __init__(
        self,
        num_rows: int,
        dim: int,
        *,
        std: float = 1.0,
        seed: int | None = None,
        padding_idx: int | None = None,
    ):
        super().__init__()
        if not (0 < num_rows <= _MOST_ROWS and dim > 0 and std >= 0.0):
            raise UsageError(
                f"A Table of {num_rows} rows of {dim} elements and std={std} cannot be: there is a "
                "row and an element at least, 2^48 rows at most, and std is not negative."
            )
        if padding_idx is not None and not 0 <= padding_idx < num_rows:
            raise UsageError(f"padding_idx={padding_idx} is none of the {num_rows} rows.")
        self.num_rows, self.dim, self.std, self.padding_idx = num_rows, dim, std, padding_idx
        self.learnt = LazyRows(num_rows, dim, padding_idx)
        key = torch.randint(1 << 62, ()) if seed is None else torch.tensor(seed)
        self.register_buffer("key", key)  # a checkpoint holds it: rows mean nothing without

    def forward(self, ids: Tensor) -> Tensor:
        learnt: Tensor = self.learnt(ids)
        return learnt + self.first_rows(ids)

    @torch.no_grad()
    def first_rows(self, ids: Tensor) -> Tensor:
        """The initial values of rows. Each element is the same in every process."""
        num_words = -(-self.dim // _PER_WORD)
        counted = ids.long()[..., None] * num_words + torch.arange(num_words, device=ids.device)
        bits = _mixed(counted * _GOLDEN + _mixed(self.key)).view(torch.int16)
        rows = _quantiles().to(ids.device)[bits.long() & 0xFFFF][..., : self.dim] * self.std
        if self.padding_idx is not None:
            rows[ids == self.padding_idx] = 0.0
        return rows

    def extra_repr(self) -> str:
        return f"{self.num_rows}, {self.dim}, std={self.std}"


class LazyRows(nn.Embedding):
    """The updates of the rows since they were created; the weight is only reserved memory.

    Its `state_dict` has the touched rows alone: their numbers and their values.
    """

    weight: ReservedParameter

    def __init__(self, num_rows: int, dim: int, padding_idx: int | None):
        zeros = reserved_zeros((num_rows, dim), torch.get_default_dtype())
        super().__init__(num_rows, dim, padding_idx=padding_idx, sparse=True, _weight=zeros)
        self.weight = ReservedParameter(zeros)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            least, most = int(ids.min()), int(ids.max())
            raise RecipeError(
                f"A Table was asked for row {least if least < 0 else most}, and its rows are 0 to "
                f"{self.num_embeddings - 1}. Look at the samples, or make the table larger."
            )
        return super().forward(ids)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        rows = touched_rows([self.weight])
        destination[f"{prefix}rows"] = rows
        destination[f"{prefix}values"] = self.weight.detach().index_select(0, rows)

    @torch.no_grad()
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, _: Any, strict: bool, missing: Any, *__: Any
    ) -> None:
        found = [state_dict.get(f"{prefix}{name}") for name in ("rows", "values")]
        if any(tensor is None for tensor in found):
            missing.append(f"{prefix}rows")
            return
        clear_rows(self.weight)
        self.weight.index_copy_(0, *found)


# SplitMix64 (Steele et al. 2014), in whole numbers that have a sign.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def _mixed(words: Tensor) -> Tensor:
    for shift, factor in _FACTORS:
        words = (words ^ _shifted(words, shift)) * factor
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    return (words >> by) & ((1 << (64 - by)) - 1)


@cache
def _quantiles() -> Tensor:
    """Of the normal distribution, one for each word of 16 bits: so an element does not depend on
    where it stands among others, as it does with logarithms that are taken several at a time."""
    parts = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    found: Tensor = torch.special.ndtri(parts).float()
    return found
