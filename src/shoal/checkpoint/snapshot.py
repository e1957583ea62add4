"""The state of one moment, read later.

The state of a job does not change between two updates. As long as it does not, chunks are read
where they lie, without a copy. When an update is about to come, what was not read yet is copied,
and read from there. So a save that fits between two updates costs no memory and no copy, and
another one copies only the rest. Until somebody reads, the update makes the copy itself: it never
waits for a store.
"""

import threading
from collections.abc import Iterator, Sequence

import torch
import xxhash
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
        self._is_wanted = threading.Event()  # that the state may change
        self._may_change = threading.Event()
        self._starting = threading.Lock()  # of the reader, against a release before it
        self._is_read = False
        self._spoilt: RuntimeError | None = None  # found by a release, and the reader's to raise
        self._copy([i for i, now in enumerate(at_once) if now])

    def release(self) -> None:
        """Until the state may change."""
        with self._starting:
            if not self._is_read:
                try:
                    self._copy(range(len(self._sources)))
                except RuntimeError as spoilt:
                    self._spoilt = spoilt
                self._may_change.set()
        self._is_wanted.set()
        self._may_change.wait()

    def parts(self, hashes: list[str]) -> Iterator[memoryview]:
        """The bytes of all chunks in turn, a little at a time, and each chunk's hash into `hashes`.

        A part may change once the next is asked for.
        """
        with self._starting:
            self._is_read = True
        if self._spoilt is not None:
            raise self._spoilt
        for i, source in enumerate(self._sources):
            if not (self._is_copied[i] or _lies_in_order(source)):
                self._copy([i])
            hashed = xxhash.xxh3_128()
            length = self._placed[i].stop - self._placed[i].start
            for start in range(0, length, PART_BYTES):
                if self._is_wanted.is_set() and not self._may_change.is_set():
                    self._copy(range(i, len(self._sources)))
                    self._may_change.set()
                part = self._content(i)[start : start + PART_BYTES]
                # What is hashed is what is written, whoever changes the tensor meanwhile.
                self._part[: len(part)] = part
                hashed.update(self._part[: len(part)])
                yield self._part[: len(part)]
            hashes.append(hashed.hexdigest())
            if not self._is_copied[i]:
                self._check(i)

    def close(self) -> None:
        """Nothing more will be read."""
        with self._starting:
            self._sources = []  # let go of what the run may want to free
            self._may_change.set()

    def _content(self, i: int) -> memoryview:
        return bytes_of(self._place(i) if self._is_copied[i] else self._sources[i])

    def _place(self, i: int) -> Tensor:
        return self._space.place_of(self._placed[i], self._num_bytes)

    @torch.no_grad()
    def _copy(self, which: Sequence[int]) -> None:
        """In one call, which leaves the interpreter to the thread that computes."""
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
