"""What ranks of one host tell each other through shared memory: rounds, and letters between two.

Each rank has a ring of slots, and writes only there. In a round every rank may put something into
its next slot. A count beside the ring says how many it has put in, another how many rounds it is
done with, so a slot is written again only when all have read it. Every collective is a sequence of
rounds: an all-reduce of two ranks is one copy and one addition for each slot's worth. Sums are
taken in the order of a tree over the ranks (`tree.py`), so that all get the same bits, and those of
exact sums where each rank brings one block. A `Mailbox` is the like for two ranks, with slots as
large as the messages.

Operations are generators that yield where they would have to wait, and nothing here waits: see
`shared_group.py`, which drives them. Only for CPUs that keep the order of stores (x86): who sees a
count must see what it counts. Cost: RING slots of SLOT_BYTES for each rank, and up to MAIL_BYTES
for each two that send to one another.
"""

import mmap
import os
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.comm.shared_memory import SegmentHandle, SharedSegment

SLOT_BYTES = 512 << 10
RING = 4  # slots of each rank
LEAST_PART = 256 << 10  # of what is put into one slot, if that leaves none of them empty
MOST_CONTENT = SLOT_BYTES - 8  # bytes of a rank in `gather_bytes`
MOST_LETTERS = 12  # that one rank may have on their way to another
MAIL_BYTES = 32 << 20  # that these may take together, unless two take more
SMALL_BYTES = 64 << 10  # that every rank adds up by itself, rather than a share of it
_WORD = 8  # bytes
_ROW_WORDS = 16  # of one rank: no two ranks write into one line of a cache, nor a pair of them
_HANDLE_BYTES = 256
_PUT, _READ, _PID = 0, 1, 2  # columns of a rank's row
LEFT = -1  # in the place of a process
_VERSION, _LETTER_BYTES = 2, 3  # and, beside the first two, of a mailbox's

# An operation: it yields None where it would have to wait, or the lane that it goes on in.
Steps = Generator[int | None, None, None]
Operator = tuple[Callable[..., Tensor], int]  # and what a mean is divided by, or 0
SUM: Operator = (torch.add, 0)
MAX: Operator = (torch.maximum, 0)


class _Columns(NamedTuple):
    """What one rank has for each rank in a round, side by side in its slot."""

    width: int  # in elements
    values: list[Tensor]


_Part = Tensor | _Columns | None  # of one rank in a round


def segment_bytes(num_ranks: int) -> int:
    """The memory that a group of so many ranks needs."""
    return _head_bytes(num_ranks) + num_ranks * RING * SLOT_BYTES


def mail_bytes(num_bytes: int) -> int:
    """The memory of a mailbox for messages of this size, once every slot was used."""
    return _num_slots(_slot_bytes(num_bytes)) * num_bytes


class SharedRounds:
    """One rank's view of the memory. All ranks make the same operations, in the same order."""

    def __init__(self, memory: Tensor, rank: int, num_ranks: int):
        """`memory` is the same for all, as large as `segment_bytes` says, and zero at first."""
        self.rank, self.num_ranks = rank, num_ranks
        self._memory = memory.numpy().data.cast("B")
        self._words = self._memory[: _words_bytes(num_ranks)].cast("q")
        slots = memory[_head_bytes(num_ranks) :][: num_ranks * RING * SLOT_BYTES]
        self._slots = slots.view(num_ranks, RING, SLOT_BYTES)
        self._round = self._num_put = 0  # rounds that are over, and that this rank has put into
        self._words[rank * _ROW_WORDS + _PID] = os.getpid()

    def leave(self) -> None:
        """Let the others know that nothing more comes from here, whatever its process does."""
        self._words[self.rank * _ROW_WORDS + _PID] = LEFT

    def pids(self) -> dict[int, int]:
        """The processes of the ranks that have come so far, by rank; LEFT of those that left."""
        found = {r: self._words[r * _ROW_WORDS + _PID] for r in range(self.num_ranks)}
        return {rank: pid for rank, pid in found.items() if pid}

    @property
    def adds_by_tree(self) -> bool:
        """Whether sums are those of a tree over all ranks."""
        return True

    def late(self, lane: int = 0) -> list[int]:
        """The ranks that have put nothing into the round under way."""
        put = [self._words[r * _ROW_WORDS + _PUT] for r in range(self.num_ranks)]
        return [rank for rank, count in enumerate(put) if count <= self._round]

    def mailbox(self, source: int, to: int) -> "Mailbox":
        number = source * self.num_ranks + to
        row = (self.num_ranks + number) * _ROW_WORDS
        handle = _words_bytes(self.num_ranks) + number * _HANDLE_BYTES
        return Mailbox(
            self._words[row : row + _ROW_WORDS], self._memory[handle : handle + _HANDLE_BYTES]
        )

    # ---- operations

    def all_reduce(self, tensor: Tensor, operator: Operator) -> Steps:
        """In place. What is large each of several ranks adds up a share of."""
        flat, is_copy = flat_of(tensor)
        if self.num_ranks > 2 and flat.nbytes > SMALL_BYTES:
            shares = shares_of(flat, self.num_ranks)
            yield from self.reduce_scatter(shares[self.rank], shares, operator)
            yield from self.all_gather(shares, shares[self.rank])
        else:
            parts = _parts(flat)

            def add(number: int) -> None:
                own = parts[number]  # is there still, and in the cache
                rows = [self._slot(r, own) for r in range(self.num_ranks)]
                rows[self.rank] = own
                reduce_rows(own, rows, operator)

            yield from self._rounds(parts, add)
        put_back(tensor, flat, is_copy)

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], operator: Operator) -> Steps:
        """`rows` are by rank, flat, maybe of unlike lengths: a slot has a column for each."""
        flat, is_copy = flat_of(output)
        longest, size = max(map(len, rows)), flat.element_size()
        width = _part_bytes(longest * self.num_ranks * size) // self.num_ranks // size
        num_rounds = max(1, -(-longest // width))
        cuts = [slice(k * width, (k + 1) * width) for k in range(num_rounds)]
        own, sent = rows[self.rank], list(rows)
        sent[self.rank] = own[:0]  # which nobody else reads

        def add(number: int) -> None:
            values = own[cuts[number]]
            terms = [self._column(r, self.rank, width, values) for r in range(self.num_ranks)]
            terms[self.rank] = values
            reduce_rows(flat[cuts[number]], terms, operator)

        parts = [_Columns(width, [row[cut] for row in sent]) for cut in cuts]
        yield from self._rounds(parts, add)
        put_back(output, flat, is_copy)

    def broadcast(self, tensor: Tensor, source: int) -> Steps:
        flat, is_copy = flat_of(tensor)
        parts = _parts(flat)

        def take(number: int) -> None:
            if self.rank != source:
                parts[number].copy_(self._slot(source, parts[number]))

        yield from self._rounds(parts if self.rank == source else [None] * len(parts), take)
        put_back(tensor, flat, is_copy and self.rank != source)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> Steps:
        """Tensors of ranks may be of unlike lengths."""
        flats = [flat_of(tensor) for tensor in outputs]
        parts = [_parts(flat) for flat, _ in flats]
        num_rounds = max(map(len, parts))
        in_place = outputs[self.rank].data_ptr() == own.data_ptr()

        def take(number: int) -> None:
            for rank, of_rank in enumerate(parts):
                if number < len(of_rank) and not (in_place and rank == self.rank):
                    of_rank[number].copy_(self._slot(rank, of_rank[number]))

        mine = _parts(flat_of(own)[0])
        yield from self._rounds([*mine, *[None] * (num_rounds - len(mine))], take)
        for output, (flat, is_copy) in zip(outputs, flats, strict=True):
            put_back(output, flat, is_copy)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """A slot has a column for each rank. Who has most to send or get says how many rounds."""
        flats = [flat_of(tensor) for tensor in outputs]
        sent = [flat_of(tensor)[0] for tensor in inputs]
        longest = torch.tensor([max(map(len, [*(flat for flat, _ in flats), *sent]))])
        yield from self.all_reduce(longest, MAX)
        size = sent[0].element_size()
        width = _part_bytes(int(longest) * self.num_ranks * size) // self.num_ranks // size
        starts = range(0, int(longest), width)

        def take(number: int) -> None:
            for rank, (flat, _) in enumerate(flats):
                part = flat[starts[number] : starts[number] + width]
                part.copy_(self._column(rank, self.rank, width, part))

        parts = [_Columns(width, [row[k : k + width] for row in sent]) for k in starts]
        yield from self._rounds(parts, take)
        for output, (flat, is_copy) in zip(outputs, flats, strict=True):
            put_back(output, flat, is_copy)

    def barrier(self) -> Steps:
        yield from self.gather_bytes(b"", [])

    def gather_bytes(self, content: bytes, found: list[bytes]) -> Steps:
        """Of all ranks, each shorter than a slot; without tensors, so in some microseconds."""
        while not self._may_put():
            yield None
        start = self._slot_start(self.rank, self._num_put)
        self._memory[start + _WORD : start + _WORD + len(content)] = content
        self._memory[start : start + _WORD] = len(content).to_bytes(_WORD, "little")
        self._end_put()
        while not self._is_complete():
            yield None
        for rank in range(self.num_ranks):
            start = self._slot_start(rank, self._round)
            length = int.from_bytes(self._memory[start : start + _WORD], "little")
            found.append(bytes(self._memory[start + _WORD : start + _WORD + length]))
        self._end_round()

    # ---- rounds

    def _rounds(self, parts: Sequence[_Part], take: Callable[[int], None]) -> Steps:
        """A round for each part; `take` is called in each when all have put in theirs. As many are
        put in ahead as there are slots."""
        num_put = 0
        for number in range(len(parts)):
            while num_put < len(parts) and (self._may_put() or num_put == number):
                while not self._may_put():
                    yield None
                self._put(parts[num_put])
                num_put += 1
            while not self._is_complete():
                yield None
            take(number)
            self._end_round()

    def _may_put(self) -> bool:
        """Whether all have read what was in this rank's next slot."""
        oldest, words = self._num_put - RING, self._words
        return all(words[r * _ROW_WORDS + _READ] > oldest for r in range(self.num_ranks))

    def _put(self, part: _Part) -> None:
        slot = self._slots[self.rank, self._num_put % RING]
        if isinstance(part, Tensor):
            slot[: part.nbytes].view(part.dtype).copy_(part)
        elif part is not None:
            for column, values in enumerate(part.values):
                start = column * part.width * values.element_size()
                slot[start : start + values.nbytes].view(values.dtype).copy_(values)
        self._end_put()

    def _end_put(self) -> None:
        self._num_put += 1
        self._words[self.rank * _ROW_WORDS + _PUT] = self._num_put

    def _is_complete(self) -> bool:
        """Whether all have put something into the round."""
        this, words = self._round, self._words
        return all(words[r * _ROW_WORDS + _PUT] > this for r in range(self.num_ranks))

    def _slot(self, rank: int, like: Tensor) -> Tensor:
        """What a rank has put into this round: as many elements as `like` has."""
        return self._slots[rank, self._round % RING, : like.nbytes].view(like.dtype)

    def _column(self, rank: int, column: int, width: int, like: Tensor) -> Tensor:
        """What a rank has put into a column of this round."""
        start = column * width * like.element_size()
        slot = self._slots[rank, self._round % RING, start : start + like.nbytes]
        return slot.view(like.dtype)

    def _slot_start(self, rank: int, number: int) -> int:
        return _head_bytes(self.num_ranks) + (rank * RING + number % RING) * SLOT_BYTES

    def _end_round(self) -> None:
        self._round += 1
        self._words[self.rank * _ROW_WORDS + _READ] = self._round


class _Unopened(NamedTuple):
    """A segment that its receiver may still have to open, though the sender has left the group."""

    segment: SharedSegment
    words: memoryview
    first: int  # of the messages in it

    def is_opened(self) -> bool:
        return bool(self.words[_READ] > self.first)


_UNOPENED: list[_Unopened] = []


class Mailbox:
    """What one rank sends to another, in order, through slots of a segment that the sender makes.

    A message that is larger than a slot waits until all before it are taken; then a segment with
    larger slots takes the place of the first.
    """

    def __init__(self, words: memoryview, handle: memoryview):
        self._words, self._handle = words, handle
        self._segment: SharedSegment | None = None
        self._version = self._slot_bytes = self._num_slots = 0

    def send(self, tensor: Tensor) -> Steps:
        flat = flat_of(tensor)[0]
        while not self._has_room(flat.nbytes):
            yield None
        if not self._fits(flat.nbytes):
            self._make(_slot_bytes(flat.nbytes))
        if flat.numel():
            self._slot(self._words[_PUT], flat).copy_(flat)
        self._words[_PUT] += 1

    def receive(self, tensor: Tensor) -> Steps:
        flat, is_copy = flat_of(tensor)
        while self._words[_PUT] <= self._words[_READ]:
            yield None
        if self._words[_VERSION] != self._version:
            self._open()
        if flat.numel():
            flat.copy_(self._slot(self._words[_READ], flat))
        self._words[_READ] += 1
        put_back(tensor, flat, is_copy)

    def _has_room(self, num_bytes: int) -> bool:
        on_its_way = self._words[_PUT] - self._words[_READ]
        return bool(on_its_way < self._num_slots) if self._fits(num_bytes) else not on_its_way

    def _fits(self, num_bytes: int) -> bool:
        """Into the slots that there are."""
        return self._segment is not None and num_bytes <= self._slot_bytes

    def _slot(self, number: int, like: Tensor) -> Tensor:
        assert self._segment is not None
        start = number % self._num_slots * self._slot_bytes
        return self._segment.bytes[start : start + like.nbytes].view(like.dtype)

    def _make(self, slot_bytes: int) -> None:
        self._set_slots(slot_bytes)
        self._segment = SharedSegment.create(self._num_slots * slot_bytes)
        _UNOPENED[:] = [one for one in _UNOPENED if not one.is_opened()]
        _UNOPENED.append(_Unopened(self._segment, self._words, self._words[_PUT]))
        place = msgspec.json.encode(self._segment.place)
        self._handle[:] = place.ljust(_HANDLE_BYTES, b"\0")
        self._version += 1
        self._words[_LETTER_BYTES], self._words[_VERSION] = slot_bytes, self._version

    def _open(self) -> None:
        self._set_slots(self._words[_LETTER_BYTES])
        place = msgspec.json.decode(bytes(self._handle).rstrip(b"\0"), type=SegmentHandle)
        self._segment = SharedSegment.open(place, place.num_bytes)
        self._version = self._words[_VERSION]

    def _set_slots(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._num_slots = _num_slots(slot_bytes)


def _slot_bytes(num_bytes: int) -> int:
    """Of a mailbox with messages of this size."""
    return 1 << max(16, (num_bytes - 1).bit_length())


def _num_slots(slot_bytes: int) -> int:
    return min(MOST_LETTERS, max(2, MAIL_BYTES // slot_bytes))


def reduce_rows(out: Tensor, rows: Sequence[Tensor], operator: Operator) -> None:
    """In the order of the tree: neighbours first, one that has none as it is."""
    function, divisor = operator
    while len(rows) > 2:
        pairs = zip(rows[::2], rows[1::2], strict=False)
        rows = [*(function(a, b) for a, b in pairs), *rows[len(rows) & ~1 :]]
    function(rows[0], rows[1], out=out)
    if divisor:
        out.div_(divisor)


def flat_of(tensor: Tensor) -> tuple[Tensor, bool]:
    """All elements in a row, and whether that is a copy."""
    return tensor.detach().reshape(-1), not tensor.is_contiguous()


def put_back(tensor: Tensor, flat: Tensor, is_copy: bool) -> None:
    if is_copy:
        tensor.detach().copy_(flat.view(tensor.shape))


def _parts(flat: Tensor) -> list[Tensor]:
    """What goes into a slot each; one at least."""
    return list(flat.split(_part_bytes(flat.nbytes) // flat.element_size()))


def _part_bytes(num_bytes: int) -> int:
    """How much of a message is put into one slot: less than it holds, if the message is so short
    that else a rank could not read while another writes. Pure."""
    size = SLOT_BYTES
    while size > LEAST_PART and size * RING > num_bytes:
        size //= 2
    return size


def shares_of(part: Tensor, num_ranks: int) -> list[Tensor]:
    cuts = [len(part) * rank // num_ranks for rank in range(num_ranks + 1)]
    return [part[start:stop] for start, stop in pairwise(cuts)]


def _words_bytes(num_ranks: int) -> int:
    """Rows of the ranks, and then of the mailboxes between any two."""
    return (num_ranks + num_ranks * num_ranks) * _ROW_WORDS * _WORD


def _head_bytes(num_ranks: int) -> int:
    num_bytes = _words_bytes(num_ranks) + num_ranks * num_ranks * _HANDLE_BYTES
    return num_bytes + -num_bytes % mmap.PAGESIZE
