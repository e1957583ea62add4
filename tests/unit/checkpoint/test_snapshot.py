"""A snapshot is the state of the moment it was made, whenever it is read."""

import threading
from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.chunks import TensorRegion, lay_out_file
from shoal.checkpoint.dtypes import dtype_name
from shoal.checkpoint.snapshot import PART_BYTES, Snapshot, SnapshotBuffer
from shoal.parallel.boxes import whole_box

ROWS = PART_BYTES // 256  # of a tensor of four parts


def made(
    tensors: dict[str, Tensor], at_once: tuple[str, ...] = (), space: SnapshotBuffer | None = None
):
    held = [
        TensorRegion(name, dtype_name(t.dtype), tuple(t.shape), whole_box(t.shape))
        for name, t in tensors.items()
    ]
    placed = lay_out_file(held)
    sources = [tensors[chunk.region.name] for chunk in placed]
    now = [chunk.region.name in at_once for chunk in placed]
    return Snapshot(placed, sources, now, space or SnapshotBuffer())


def tensors() -> dict[str, Tensor]:
    return {
        "a": torch.randn(ROWS, 256),
        "columns": torch.randn(64, 64)[:, ::2],
        "buffer": torch.arange(1000, dtype=torch.int64),
        "b": torch.randn(ROWS, 256),
        "half": torch.randn(33).bfloat16(),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
    }


def content(states: dict[str, Tensor]) -> bytes:
    order = lay_out_file(
        [
            TensorRegion(n, dtype_name(t.dtype), tuple(t.shape), whole_box(t.shape))
            for n, t in states.items()
        ]
    )
    flat = (states[c.region.name].contiguous().reshape(-1) for c in order)
    return b"".join(t.view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat)


@pytest.mark.parametrize("wanted_at", [0, 1, 2, 5, 9, 1000])
def test_the_state_may_change_as_soon_as_it_is_released(wanted_at: int) -> None:
    """The update comes while a part is being written, at any of them, and waits for nobody."""
    state = tensors()
    expected = content(state)
    snapshot = made(state, at_once=("buffer",))
    state["buffer"].zero_()  # at once
    read = []
    for number, part in enumerate(parts_of(snapshot)):
        read.append(bytes(part))
        if number == wanted_at:
            snapshot.release()
            _change(state)
    snapshot.close()
    assert b"".join(read) == expected


def test_an_update_does_not_wait_for_a_store() -> None:
    """What is copied is read from the copy, for as long as that may take."""
    state = tensors()
    expected = content(state)
    snapshot = made(state)
    parts = parts_of(snapshot)
    first = bytes(next(parts))
    update = threading.Thread(target=snapshot.release, daemon=True)
    update.start()
    update.join(10)
    assert not update.is_alive()
    _change(state)
    assert first + b"".join(map(bytes, parts)) == expected
    snapshot.close()


def test_an_update_takes_over_what_is_not_copied_yet() -> None:
    state = tensors()
    expected = content(state)
    snapshot = made(state)
    snapshot.release()
    _change(state)
    snapshot.copy()  # finds nothing to do
    assert b"".join(map(bytes, parts_of(snapshot))) == expected


def parts_of(snapshot: Snapshot) -> Iterator[memoryview]:
    return chain.from_iterable(snapshot.chunks())


def _change(state: dict[str, Tensor]) -> None:
    for tensor in state.values():
        tensor.zero_()


def test_a_change_that_is_no_update_is_found() -> None:
    state = tensors()
    snapshot = made(state)
    state["a"].add_(1)
    snapshot.copy()  # where there may be no draft to discard yet
    with pytest.raises(RuntimeError, match="was changed while it was being saved"):
        snapshot.chunks()
    snapshot.close()
    snapshot.release()
    snapshot.copy()


def test_a_change_that_an_update_finds_is_the_readers_to_tell() -> None:
    state = tensors()
    snapshot = made(state)
    state["a"].add_(1)
    snapshot.release()
    with pytest.raises(RuntimeError, match="was changed while it was being saved"):
        snapshot.chunks()


def test_nothing_waits_for_a_save_that_failed() -> None:
    snapshot = made(tensors())
    snapshot.close()
    snapshot.release()


def test_a_part_stays_as_it_was_while_it_is_written() -> None:
    """Also of a tensor that is changed behind torch's back meanwhile: it is hashed and written."""
    state = {"a": torch.randn(ROWS, 256)}
    for part in parts_of(made(state)):
        before = bytes(part)
        state["a"].data.mul_(2)
        assert bytes(part) == before
