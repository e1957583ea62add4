"""Gradients that came and are not applied yet, and their sums.

A push brings a row for each block of a worker's pieces, of one key of a batch. A row that comes
again takes the place of the one before, and one of an attempt that was given up is dropped. Sums
over all pieces follow the tree (`comm/tree.py`); rows are never changed, since they may stand in a
worker's memory, which pushes them again if this server dies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from shoal.comm.buffer_pool import BufferPool
from shoal.comm.tree import Block, fold
from shoal.sync.server.combining import combine


@dataclass
class _BatchRows:
    attempts: dict[Block, int] = field(default_factory=dict)
    rows: dict[int, dict[Block, Tensor]] = field(default_factory=dict)  # by key
    touched: dict[int, dict[Block, Sequence[bool]]] = field(default_factory=dict)  # by key
    totals: dict[int, Tensor] = field(default_factory=dict)  # by key, of all pieces
    lent: dict[int, list[Tensor]] = field(default_factory=dict)  # by key, memory of sums


class GradientRows:
    """`eager` sums a key as soon as the rows of all pieces are here, while workers compute.

    `rule` says what becomes of the rows of all pieces (`combining.py`), which are those of
    replicas with these `shares`.
    """

    def __init__(
        self,
        keys: Sequence[int],
        num_pieces: int,
        eager: bool,
        rule: str = "mean",
        shares: Sequence[range] = (),
    ):
        self.keys, self._num_pieces, self._eager = keys, num_pieces, eager
        self._rule, self._shares = rule, shares
        self._batches: dict[int, _BatchRows] = {}
        self._spares = BufferPool()

    def keep(
        self,
        batch: int,
        attempt: int,
        key: int,
        rows: Mapping[Block, Tensor],
        touched: Sequence[bool],
    ) -> bool:
        """Put rows of one key away; `touched` says which of its parameters they are of.

        True if they are summed now: they were the last, and sums are made eagerly.
        """
        kept = self._batches.setdefault(batch, _BatchRows())
        for block in rows:
            known = kept.attempts.get(block, attempt)
            if known > attempt:
                return False  # a late message of an attempt that was given up
            if known < attempt:
                self._drop(kept, block)
            kept.attempts[block] = attempt
        kept.rows.setdefault(key, {}).update(rows)
        kept.touched.setdefault(key, {}).update(dict.fromkeys(rows, touched))
        self._drop_sums(kept, key)
        everything = range(self._num_pieces)
        if not self._eager or not _covers(kept, key, everything, attempt):
            return False
        kept.totals[key] = self._total(kept, key, everything)
        return True

    def missing(self, batch: int, pieces: range, attempt: int) -> list[int]:
        """The keys of which not all of these pieces are here."""
        kept = self._batches.get(batch, _BatchRows())
        return [key for key in self.keys if not _covers(kept, key, pieces, attempt)]

    def are_whole(self, batch: int, pieces: range, attempt: int) -> bool:
        """Whether nothing is missing; found out at once where sums are made eagerly."""
        kept = self._batches.get(batch, _BatchRows())
        if self._eager and len(kept.totals) < len(self.keys):
            return False
        return not self.missing(batch, pieces, attempt)

    def sums(self, batch: int, pieces: range) -> dict[int, Tensor]:
        """Over some pieces, none of which is missing; by key."""
        kept = self._batches.get(batch, _BatchRows())
        known = kept.totals if len(pieces) == self._num_pieces else {}
        return {
            key: known[key] if key in known else self._total(kept, key, pieces) for key in self.keys
        }

    def touched(self, batch: int, pieces: range) -> dict[int, list[bool]]:
        """By key, which of its parameters some of these pieces touched; none is missing."""
        return {key: self.touched_in(batch, key, pieces) for key in self.keys}

    def touched_in(self, batch: int, key: int, pieces: range) -> list[bool]:
        told = self._batches[batch].touched[key].items()
        return list(map(any, zip(*(own for block, own in told if block.first in pieces))))

    def total(self, batch: int, key: int) -> Tensor | None:
        """Over all pieces, if they are here."""
        kept = self._batches.get(batch)
        return None if kept is None else kept.totals.get(key)

    def forget(self, batch: int, pieces: range, committed: int) -> None:
        """Let go of what was applied, and of all batches before `committed`."""
        kept = self._batches.get(batch, _BatchRows())
        for block in [block for block in kept.attempts if block.first in pieces]:
            self._drop(kept, block)
        for key in self.keys:
            self._drop_sums(kept, key)
        for number in [number for number in self._batches if number < committed]:
            del self._batches[number]

    def _drop(self, kept: _BatchRows, block: Block) -> None:
        for rows in kept.rows.values():
            rows.pop(block, None)
        for touched in kept.touched.values():
            touched.pop(block, None)

    def _drop_sums(self, kept: _BatchRows, key: int) -> None:
        """They are not needed: their rows were applied, or came again."""
        kept.totals.pop(key, None)
        for tensor in kept.lent.pop(key, ()):
            self._spares.give(tensor)

    def clear(self) -> None:
        self._batches = {}

    def _total(self, kept: _BatchRows, key: int, pieces: range) -> Tensor:
        own = {block: row for block, row in kept.rows[key].items() if block.first in pieces}
        made: list[Tensor] = []

        def add(left: Tensor, right: Tensor) -> Tensor:
            if left.is_sparse:
                return left + right
            if any(left is one for one in made):
                return left.add_(right)
            made.append(self._spares.take(left.numel(), left))
            return torch.add(left, right, out=made[-1])

        if len(pieces) < self._num_pieces:  # a worker's, who counts them from zero
            counted = {Block(b.first - pieces.start, b.num_pieces): row for b, row in own.items()}
            total = fold(counted, len(pieces), add)
        elif self._rule == "mean":
            total = fold(own, self._num_pieces, add)
        else:
            shares = [share for share in self._shares if share]
            sums = [
                reduce(add, (own[block] for block in sorted(own) if block.first in share))
                for share in shares
            ]
            total = combine(self._rule, sums, [len(share) for share in shares])
            total.mul_(self._num_pieces)  # to stand for all of them, as a sum does
        kept.lent.setdefault(key, []).extend(made)
        # Of its own: a sum of one row stands where its worker lays the next.
        return total.clone() if total.is_sparse and len(own) == 1 else total


def _covers(kept: _BatchRows, key: int, pieces: range, attempt: int) -> bool:
    """Whether the rows of an attempt are those of all pieces."""
    blocks: Iterable[Block] = kept.rows.get(key, {})
    found = sorted(b for b in blocks if b.first in pieces and kept.attempts[b] == attempt)
    ends = [pieces.start, *(block.first + block.num_pieces for block in found)]
    return ends[-1] == pieces.stop and all(b.first == end for b, end in zip(found, ends))
