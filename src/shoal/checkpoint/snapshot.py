"""The state of one moment, read later.

The state of a job does not change between two updates. As long as it does not, chunks are read
where they lie, without a copy. An update that is about to come copies what was not read yet, and
the rest is read from there. So a save that fits between two updates costs no memory and no copy,
and another one copies only the rest. An update never waits for a store: the reader has the lock
while it copies a part, and not while that part is written.
"""

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.checkpoint.chunks import Placed
from shoal.checkpoint.types import bytes_of, type_of_name

PART_BYTES = 1 << 20  # how much of it an update may have to wait for


class Space:
    """Memory for copies, kept from one save to the next; what is not used is not taken."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def place_of(self, chunk: Placed, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        flat = self._memory[chunk.start : chunk.stop].view(type_of_name(chunk.held.dtype))
        return flat.view(chunk.held.box.shape)


class Snapshot:
    """`sources` are the chunks' tensors; those in `at_once` are copied now. One thread reads."""

    def __init__(
        self, placed: Sequence[Placed], sources: list[Tensor], at_once: Sequence[bool], space: Space
    ):
        self._placed, self._sources, self._space = placed, sources, space
        self._num_bytes = placed[-1].stop if placed else 0
        self._is_copied = [False] * len(sources)
        self._versions = [source._version for source in sources]
        self._part = memoryview(bytearray(PART_BYTES))
        self._lock = threading.Lock()
        self._num_read = 0  # chunks that nobody needs any more
        self._spoilt: RuntimeError | None = None  # found by a release, and the reader's to raise
        self._copy([i for i, now in enumerate(at_once) if now])

    def release(self) -> None:
        """Let the state change: what was not read yet is copied first."""
        with self._lock:
            try:
                self._copy(range(self._num_read, len(self._sources)))
            except RuntimeError as spoilt:
                self._spoilt = spoilt

    def chunks(self) -> Iterator[Iterator[memoryview]]:
        """The bytes of each chunk in turn, a little at a time.

        A part may change once the next is asked for.
        """
        return (self._parts(i) for i in range(len(self._placed)))

    def close(self) -> None:
        """Nothing more will be read."""
        with self._lock:
            self._sources = []  # let go of what the run may want to free

    def _parts(self, i: int) -> Iterator[memoryview]:
        length = self._placed[i].stop - self._placed[i].start
        for start in range(0, length, PART_BYTES):
            stop = min(start + PART_BYTES, length)
            with self._lock:
                if self._spoilt is not None:
                    raise self._spoilt
                if not (self._is_copied[i] or _lies_in_order(self._sources[i])):
                    self._copy([i])
                # What is hashed is what is written, whoever changes the tensor meanwhile.
                self._part[: stop - start] = self._content(i)[start:stop]
                if not self._is_copied[i]:
                    self._check(i)
                self._num_read = i + (stop == length)
            yield self._part[: stop - start]

    def _content(self, i: int) -> memoryview:
        return bytes_of(self._place(i) if self._is_copied[i] else self._sources[i])

    def _place(self, i: int) -> Tensor:
        return self._space.place_of(self._placed[i], self._num_bytes)

    @torch.no_grad()
    def _copy(self, which: Sequence[int]) -> None:
        """In one call, during which other threads may run."""
        which = [i for i in which if not self._is_copied[i]]
        for i in which:
            self._check(i)
            self._is_copied[i] = True
        if which:
            torch._foreach_copy_([self._place(i) for i in which], [self._sources[i] for i in which])

    def _check(self, i: int) -> None:
        if self._sources[i]._version != self._versions[i]:
            raise RuntimeError(
                f"{self._placed[i].held.name} was changed while it was being saved; only an "
                "update may change it"
            )


def _lies_in_order(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()
