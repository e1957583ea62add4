"""A state in stretches is the state, and takes no more memory than a stretch."""

import errno
import os

import pytest
import torch

from shoal.parallel.layout import Slice, whole_slice
from shoal.sync import state_chunks
from shoal.sync.state import MemorySource, ShardedState, pack_state, unpack_state
from shoal.sync.state_chunks import (
    CHUNK_BYTES,
    SpillFile,
    allocate_spillable,
    read_outline,
    split_state,
    without_values,
)

ROWS, WIDTH = 700, 5


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_chunks, "CHUNK_BYTES", 1024)


def state() -> ShardedState:
    """Two parts of a table, a scalar, something empty and something of another type."""
    table = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    halves = [Slice(table[at : at + 350], (ROWS, WIDTH), (at, 0)) for at in (0, 350)]
    tensors = {
        "table": halves,
        "step": [whole_slice(torch.tensor(3.0))],
        "none": [whole_slice(torch.zeros(0, 4))],
        "mask": [whole_slice(torch.arange(3000) % 3 == 0)],
    }
    return ShardedState(tensors, {"groups": [1, 2]})


def test_stretches_are_the_state() -> None:
    spill, sizes = SpillFile(), []
    for chunk in split_state(state()):
        sent = unpack_state([memoryview(_bytes(f)) for f in pack_state(chunk.state)])
        sizes.append(sum(p.tensor.nbytes for parts in sent.tensors.values() for p in parts))
        spill.add(sent)
    assert len(sizes) > 15 and max(sizes) <= 1024
    found = spill.state()
    assert found.plain == {"groups": [1, 2]}
    assert found.copied == found.tensors.keys() == state().tensors.keys()
    again = read_outline(MemorySource(found), state())  # whose parts are larger
    for name, parts in state().tensors.items():
        for one, other in zip(parts, again.tensors[name], strict=True):
            assert torch.equal(one.tensor, other.tensor) and one.offset == other.offset


def _bytes(frame: bytes | torch.Tensor) -> bytes:
    return frame if isinstance(frame, bytes) else frame.reshape(-1).view(torch.uint8).numpy().data


def test_a_part_that_did_not_come_is_missed() -> None:
    *most, last = split_state(ShardedState({"table": state().tensors["table"]}, {}))
    assert last.next == 0
    spill = SpillFile()
    for chunk in most:
        spill.add(chunk.state)
    with pytest.raises(KeyError, match="table"):
        read_outline(
            MemorySource(spill.state()), ShardedState({"table": state().tensors["table"]}, {})
        )


def test_kinds_have_names_and_types_and_no_values() -> None:
    kinds = without_values(state())
    assert kinds.tensors.keys() == state().tensors.keys()
    assert kinds.tensors["mask"][0].tensor.dtype == torch.bool
    assert all(not part.tensor.numel() for parts in kinds.tensors.values() for part in parts)


def test_a_disk_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        SpillFile().add(state())
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert allocate_spillable((ROWS, WIDTH), torch.float32).shape == (ROWS, WIDTH)  # in memory then


def test_room_that_is_large_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made = allocate_spillable((1000, 3), torch.float16)
    made.fill_(2.5)
    assert made.shape == (1000, 3) and bool((made == 2.5).all())
    assert CHUNK_BYTES == 8 << 20, "what both sides know"
