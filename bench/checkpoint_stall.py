"""Milliseconds of training lost for each checkpoint, later steps included.

One process trains 20 M parameters with AdamW. A stretch of steps in which one checkpoint is made is
compared with those without one just before and after it, since machines change their speed: what
the save costs at once, what its threads and its writing take from the steps after it, and what a
wait for the copy costs, all show. Peers save the same state of the same model in the same way:
torch.save, dcp.save and dcp.async_save; the last arm saves nothing.

The disk is the machine's own. All end before the next stretch begins, outside of the measured time.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bench import harness
from bench.harness import Row
from shoal.checkpoint.manifest import Origin
from shoal.comm.mesh import LauncherSeat
from shoal.data.sources import tensors
from shoal.storage.store import DirectoryStore
from shoal.training.checkpointing import Checkpointer, CheckpointSettings
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World

WIDTH, NUM_LAYERS, BATCH = 2048, 5, 32
STRETCH = 6  # steps: longer than any of the saves
FLOOR_MS = 30.0


def make_run() -> Run:
    torch.manual_seed(1)
    inputs, target = torch.randn(8 * BATCH, WIDTH), torch.randn(8 * BATCH, WIDTH)
    return Run(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
        data=tensors(inputs, target),
        batch_size=BATCH,
        steps=1 << 30,
    )


class Peers:
    """The same state, saved by others."""

    def __init__(self, trainer: Trainer, folder: Path):
        self.trainer, self.folder = trainer, folder
        self.pending: Any = None

    def state(self) -> dict[str, Any]:
        return {
            "model": self.trainer.model.state_dict(),
            "optimizer": self.trainer.optimizer.state_dict(),
        }

    def torch_save(self) -> None:
        torch.save(self.state(), self.folder / "state.pt")

    def dcp_save(self) -> None:
        dcp.save(self.state(), checkpoint_id=self.folder / "dcp", no_dist=True)

    def dcp_async_save(self) -> None:
        self.pending = dcp.async_save(self.state(), checkpoint_id=self.folder / "async")

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None


def lost_by(trainer: Trainer, save: Callable[[], object], finish: Callable[[], None]) -> Any:
    """Measures what a save after the first step of a stretch adds to it, in milliseconds."""
    steps = iter(trainer)

    def stretch(save: Callable[[], object]) -> float:
        started = perf_counter()
        next(steps)
        save()
        for _ in islice(steps, STRETCH - 1):
            pass
        return (perf_counter() - started) * 1000

    def measure() -> float:
        before = stretch(lambda: None)
        with_it = stretch(save)
        finish()
        return with_it - (before + stretch(lambda: None)) / 2

    return measure


def measure(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    run = make_run()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=harness.ROOT)))
        store = DirectoryStore(folder / "checkpoints")
        plan = resolve(run, "data=1", 1)
        origin = Origin("bench", {}, str(plan), 1, len(run.data), {})
        checkpointer = Checkpointer(CheckpointSettings(store, origin), lambda event, **what: None)
        trainer = Trainer(run, plan, LauncherSeat(World()), checkpointer=checkpointer)
        stack.enter_context(trainer)
        stack.enter_context(one_process_group())
        peers = Peers(trainer, folder)

        def save() -> None:
            problem = checkpointer.save(trainer)
            if problem:
                raise RuntimeError(f"The checkpoint was not made: {problem}.")

        def finish() -> None:
            checkpointer.finish(trainer)
            for name in store.names():
                store.remove(name)

        def swept() -> None:
            peers.finish()
            for path in folder.iterdir():
                if path.name != "checkpoints":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

        arms = {
            "shoal": lost_by(trainer, save, finish),
            "torch.save": lost_by(trainer, peers.torch_save, swept),
            "dcp.save": lost_by(trainer, peers.dcp_save, swept),
            "dcp.async_save": lost_by(trainer, peers.dcp_async_save, swept),
            "nothing": lost_by(trainer, lambda: None, lambda: None),
        }
        stack.enter_context(harness.quiet())
        figures = harness.interleave(arms, 12 if quick else 40, num_warm_up=2)
    yield _row(figures)


def _row(figures: dict[str, list[float]]) -> Row:
    lost = {name: harness.spread(found) for name, found in figures.items()}
    shoal = lost["shoal"]
    peers = {name: lost[name].median for name in ("torch.save", "dcp.save", "dcp.async_save")}
    told = ", ".join(f"{name} {ms:+.0f}" for name, ms in peers.items())
    return Row(
        name="checkpoint-stall",
        value=shoal.median,
        low=shoal.low,
        high=shoal.high,
        num_pairs=shoal.num_pairs,
        unit="ms",
        floor=FLOOR_MS,
        at_most=True,
        peer=f"the best of three {min(peers.values()):+.1f} ms",
        ceiling="0, a stretch without a save",
        note=f"{told} ms; nothing {lost['nothing'].median:+.1f} ms",
    )


def one_process_group() -> Any:
    """dcp.async_save wants a process group, be it of one."""
    from contextlib import contextmanager

    import torch.distributed as dist

    @contextmanager
    def group() -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()

    return group()


if __name__ == "__main__":
    harness.main(measure)
