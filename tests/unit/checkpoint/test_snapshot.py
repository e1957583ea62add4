"""A snapshot is the state of the moment it was made, whenever it is read."""

import threading

import pytest
import torch
import xxhash
from torch import Tensor

from shoal.checkpoint.chunks import place
from shoal.checkpoint.dealing import Held
from shoal.checkpoint.snapshot import PART_BYTES, Snapshot, Space
from shoal.checkpoint.types import name_of_type
from shoal.parallel.boxes import whole_box

ROWS = PART_BYTES // 256  # of a tensor of four parts


def made(tensors: dict[str, Tensor], at_once: tuple[str, ...] = (), space: Space | None = None):
    held = [
        Held(name, name_of_type(t.dtype), tuple(t.shape), whole_box(t.shape))
        for name, t in tensors.items()
    ]
    placed = place(held)
    sources = [tensors[chunk.held.name] for chunk in placed]
    now = [chunk.held.name in at_once for chunk in placed]
    return Snapshot(placed, sources, now, space or Space())


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
    order = place(
        [
            Held(n, name_of_type(t.dtype), tuple(t.shape), whole_box(t.shape))
            for n, t in states.items()
        ]
    )
    flat = (states[c.held.name].contiguous().reshape(-1) for c in order)
    return b"".join(t.view(torch.uint8).numpy().tobytes() if t.numel() else b"" for t in flat)


@pytest.mark.parametrize("wanted_at", [0, 1, 2, 5, 9, 1000])
def test_the_state_may_change_as_soon_as_it_is_released(wanted_at: int) -> None:
    """The update comes while a part is being written, at any of them."""
    state = tensors()
    expected = content(state)
    snapshot = made(state, at_once=("buffer",))
    state["buffer"].zero_()  # at once
    read, hashes = [], []
    for number, part in enumerate(snapshot.parts(hashes)):
        read.append(bytes(part))
        if number == wanted_at:
            update = threading.Thread(target=lambda: (snapshot.release(), _change(state)))
            update.start()
        if number == wanted_at + 1:
            update.join(10)
            assert not update.is_alive(), "the update waits for what is not there any more"
    snapshot.close()
    assert b"".join(read) == expected
    assert len(hashes) == len(state)
    assert hashes[0] == xxhash.xxh3_128_hexdigest(tensors_bytes(expected, 8 * 1000))


def tensors_bytes(everything: bytes, length: int) -> bytes:
    """The largest elements come first: the buffer's."""
    return everything[:length]


def _change(state: dict[str, Tensor]) -> None:
    for tensor in state.values():
        tensor.zero_()


def test_what_fits_between_two_updates_is_not_copied() -> None:
    space = Space()
    snapshot = made({"a": torch.randn(ROWS, 256)}, space=space)
    assert sum(len(part) for part in snapshot.parts([])) == ROWS * 1024
    snapshot.close()
    snapshot.release()
    assert not space._memory.numel()


def test_a_change_that_is_no_update_is_found() -> None:
    state = tensors()
    snapshot = made(state)
    parts = snapshot.parts([])
    next(parts)
    state["a"].add_(1)
    with pytest.raises(RuntimeError, match="was changed while it was being saved"):
        list(parts)
    snapshot.close()
    snapshot.release()


def test_nothing_waits_for_a_save_that_failed() -> None:
    snapshot = made(tensors())
    snapshot.close()
    snapshot.release()


def test_the_hash_is_of_the_bytes_that_were_written() -> None:
    """Also of a tensor that is changed behind torch's back meanwhile."""
    state = {"a": torch.randn(ROWS, 256)}
    snapshot, hashes, read = made(state), [], b""
    for part in snapshot.parts(hashes):
        read += bytes(part)
        state["a"].data.mul_(2)
    assert hashes == [xxhash.xxh3_128_hexdigest(read)]
