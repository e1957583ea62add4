"""A consistent copy of the state of one step, made while training continues.

The state of a run does not change between two updates. In that time the saver thread copies it,
chunk by chunk, beside the forward and backward passes; an update that starts earlier copies the
rest itself. So an update waits for at most a part of one copy, and never for a store.

Cost: a copy of what the rank saves, in host memory, reused from save to save.
"""

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.checkpoint.chunks import PlacedChunk
from shoal.checkpoint.dtypes import dtype_from_name, tensor_bytes

PART_BYTES = 1 << 20  # how much of it an update may have to wait for


class SnapshotBuffer:
    """Memory for copies, reused from save to save; allocated at first use."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def place_of(self, chunk: PlacedChunk, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        flat = self._memory[chunk.start : chunk.stop].view(dtype_from_name(chunk.region.dtype))
        return flat.view(chunk.region.box.shape)


class Snapshot:
    """A copy of the chunks' tensors, `sources`: those in `at_once` are copied now; those that
    `never` change are not copied. One thread reads."""

    def __init__(
        self,
        placed: Sequence[PlacedChunk],
        sources: list[Tensor],
        at_once: Sequence[bool],
        space: SnapshotBuffer,
        never: Sequence[bool] | None = None,
    ):
        self._placed, self._sources, self._space = placed, sources, space
        self._num_bytes = placed[-1].stop if placed else 0
        self._never = never or [False] * len(sources)
        self._is_copied = [*self._never]
        self._versions = [source._version for source in sources]
        self._lock = threading.Lock()
        self._spoilt: RuntimeError | None = None  # raised by `chunks`, when a draft is there
        self._copy([i for i, now in enumerate(at_once) if now])

    def copy(self) -> None:
        """Copy the rest, chunk by chunk, while the state does not change."""
        for i in range(len(self._placed)):
            self._copy_or_spoil([i])

    def release(self) -> None:
        """Copy the rest at once; then the state may change."""
        self._copy_or_spoil(range(len(self._sources)))

    def chunks(self) -> Iterator[Iterator[memoryview]]:
        """The bytes of each chunk in turn, in small parts."""
        self.copy()
        if self._spoilt is not None:
            raise self._spoilt
        return (self._parts(i) for i in range(len(self._placed)))

    def close(self) -> None:
        """Release the tensors; nothing more will be read."""
        with self._lock:
            self._sources = []

    def _parts(self, i: int) -> Iterator[memoryview]:
        content = tensor_bytes(self._sources[i] if self._never[i] else self._place(i))
        return (content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES))

    def _place(self, i: int) -> Tensor:
        return self._space.place_of(self._placed[i], self._num_bytes)

    def _copy_or_spoil(self, which: Sequence[int]) -> None:
        with self._lock:
            try:
                self._copy([i for i in which if i < len(self._sources)])  # none when it is closed
            except RuntimeError as spoilt:
                self._spoilt = spoilt
                self._is_copied = [True] * len(self._sources)

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
                f"{self._placed[i].region.name} was changed while it was being saved; only an "
                "update may change it"
            )
