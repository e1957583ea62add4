"""What becomes of the last step if it cannot be saved where the run keeps its checkpoints.

A disk that is full, turned read-only or is gone must not cost what was learnt: the checkpoint is
made somewhere else on this machine, among temporary files, and the run says where.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.find import checkpoint_name
from shoal.checkpoint.save import Saver, SaveResult
from shoal.storage.store import DirectoryStore
from shoal.sync.choose import state_types
from shoal.sync.state import broadcast_bytes

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

MEMORY = "/dev/shm"


def rescue(trainer: "Trainer", save: Callable[["Trainer", Saver], str]) -> str:
    """Save the state as it is now in the first place that takes it; where, empty if nowhere does.

    Every rank must call it. Hosts that do not share their temporary files cannot help each other.
    """
    world, held = trainer.mesh.world, state_types(trainer.strategy).tensors
    num_bytes = sum(part.tensor.nbytes for parts in held.values() for part in parts)
    places = _places(num_bytes) if world.rank == 0 else iter(())
    while True:
        path = broadcast_bytes(world, 0, next(places, "").encode()).decode()
        if not path:
            return ""
        ended: list[SaveResult] = []
        saver = Saver(DirectoryStore(Path(path)), ended.append)
        save(trainer, saver)
        saver.finish(world)
        is_there = any(saved.is_committed for saved in ended)
        if world.all_gather_numbers([is_there])[0][0]:
            return f"{path}/{checkpoint_name(trainer.step)}"
        if world.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def _places(num_bytes: int) -> Iterator[str]:
    """New directories, each on a file system with room for so much; a disk before memory."""
    candidates = [MEMORY]
    with suppress(OSError):  # there is none that can be written
        candidates.insert(0, tempfile.gettempdir())
    seen = set()
    for place in candidates:
        with suppress(OSError):
            device = os.stat(place).st_dev
            if device in seen or shutil.disk_usage(place).free < num_bytes:
                continue
            seen.add(device)
            yield tempfile.mkdtemp(prefix="shoal-rescued-", dir=place)
