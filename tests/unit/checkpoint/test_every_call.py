"""kill -9 before every system call of a save, a replacement and a removal: what is found there
afterwards is whole, and it is never less than before."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import Origin, Progress
from shoal.checkpoint.save import Saver
from shoal.comm.collectives import Group
from shoal.parallel.layout import whole_slice
from shoal.storage.store import DirectoryStore

CALLS = (
    *("open", "write", "fsync", "close", "rename", "unlink", "mkdir", "rmdir"),
    *("listdir", "scandir", "stat", "lstat"),
)
MOST_CALLS = 200


def save(store: DirectoryStore, step: int) -> None:
    tensors = {f"model.{i}": [whole_slice(torch.full((50, 3), float(step + i)))] for i in range(3)}
    about = (Progress(step, 0, 0, 0), Origin("r.py:f", {}, "data=1", 1, 120, {}))
    saver = Saver(store, lambda saved: None)
    assert not saver.save(Group(), f"step-{step:08d}", tensors, {}, about)
    saver.finish(Group())


def killed_at(number: int, act: Callable[[], None]) -> bool:
    """Run `act` in a child that is killed before its system call `number`; False if it got by."""
    child = os.fork()
    if child == 0:
        try:
            left = [number]
            for name in CALLS:
                setattr(os, name, _counted(getattr(os, name), left))
            act()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def _counted(call: Callable[..., object], left: list[int]) -> Callable[..., object]:
    def counted(*arguments: object, **named: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return counted


def good(store: DirectoryStore) -> list[str]:
    """What is there, every byte of which is right."""
    for name in store.names():
        opened = CheckpointReader(store, name)
        opened.verify()
        step = float(opened.manifest.progress.step)
        assert torch.equal(opened.whole("model.1"), torch.full((50, 3), step + 1))
    return store.names()


FIRST, SECOND = "step-00000010", "step-00000020"


@pytest.mark.parametrize(
    ("what", "every"),
    [
        *(pytest.param(w, 1, marks=pytest.mark.full) for w in ("save", "save again", "remove")),
        *(("save", 5), ("remove", 3)),
    ],
)
def test_killed_before_every_call(tmp_path: Path, what: str, every: int) -> None:
    """In the quick suite before some of them, spread over all."""
    acts = {
        "save": (lambda store: save(store, 20), [[FIRST], [FIRST, SECOND]]),
        "save again": (lambda store: save(store, 10), [[FIRST]]),
        "remove": (lambda store: store.remove(SECOND), [[FIRST, SECOND], [FIRST]]),
    }
    act, allowed = acts[what]
    for number in range(0, MOST_CALLS, every):
        store = DirectoryStore(tmp_path / str(number))
        save(store, 10)
        if what == "remove":
            save(store, 20)
        killed = killed_at(number, lambda store=store: act(store))
        assert good(store) in allowed, f"killed before call {number}"
        save(store, 30)  # the next one cleans up after it
        assert good(store)[-1] == "step-00000030"
        assert set(os.listdir(store.path)) == set(store.names())
        if not killed:
            assert number > (20 if what != "remove" else 5), "it was not counted"
            return
    pytest.fail(f"it makes more than {MOST_CALLS} calls")
