"""Loading with one, two and three ranks what four saved, against torch's distributed checkpoints.

The state is that of a transformer of 20 M parameters with AdamW in fp32, 240 MB. Each rank holds
rows of every tensor, as DTensors with Shard(0) have them; the savers' rows are not the loaders', so
most tensors are put together from several chunks. Shoal opens the checkpoint and fills the tensors
with every chunk verified first; `dcp.load` verifies nothing. Both fill the same tensors, which hold
NaN before, and what they hold afterwards is compared with the truth, outside the clock.

All arms live in the same processes and take turns, between two barriers, so a load takes as long
as the slowest rank's. The files are in the page cache for both. The ceiling is a copy of the same
bytes from memory. One call of Shoal's opens files and maps them anew, as a run that resumes does.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench import harness, ranks
from bench.harness import Row
from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import Origin, Progress
from shoal.checkpoint.save import Saver, SaveResult
from shoal.comm.collectives import Group
from shoal.parallel.layout import Slice
from shoal.storage.store import DirectoryStore
from shoal.world import World

NUM_SAVERS = 4
NUM_LOADERS = (1, 2, 3)
TOKENS, LAYERS, WIDTH, HEADS = 2048, 6, 512, 8  # 20 M parameters
SAVED = "step-00000001"
FLOOR = 5.0


def make_model() -> nn.Module:
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(TOKENS, WIDTH), *layers)


def shapes() -> dict[str, torch.Size]:
    """Every tensor of the state, as a checkpoint names them."""
    with torch.device("meta"):
        parameters = {name: p.shape for name, p in make_model().named_parameters()}
    moments = {
        f"optimizer.{name}.{key}": shape
        for name, shape in parameters.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {f"model.{name}": shape for name, shape in parameters.items()} | moments


# ---- in a rank


class State:
    """A rank's rows of every tensor: what they must be, and what it holds, by each side's names."""

    def __init__(self, world: World):
        mesh = init_device_mesh("cpu", (world.num_ranks,))
        self.truth: dict[str, Tensor] = {}
        self.slices: dict[str, list[Slice]] = {}
        self.sharded: dict[str, DTensor] = {}
        torch.manual_seed(1)  # all ranks draw the same whole tensors
        for name, shape in shapes().items():
            whole = torch.randn(shape)
            rows = whole.chunk(world.num_ranks)  # as Shard(0) cuts
            before = sum(len(part) for part in rows[: world.rank])
            held = rows[world.rank].clone()
            self.truth[name] = rows[world.rank].clone()  # not a view, which would keep the whole
            self.slices[name] = [Slice(held, tuple(shape), (before, *[0] * (len(shape) - 1)))]
            self.sharded[name] = DTensor.from_local(
                held, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride()
            )

    def forget(self) -> None:
        for [part] in self.slices.values():
            part.tensor.fill_(torch.nan)

    def check(self, arm: str) -> None:
        """A load that is wrong is not fast."""
        for name, [part] in self.slices.items():
            if not torch.equal(part.tensor, self.truth[name]):
                raise RuntimeError(f"{arm}: {name} was loaded, and is not what was saved.")


def save(world: World, folder: Path) -> int:
    """Save the state in both formats; returns the bytes of all tensors. Every rank must call it."""
    state, group, outcome = State(world), Group(dist.group.WORLD), list[SaveResult]()
    saver = Saver(DirectoryStore(folder), outcome.append)
    about = Progress(1, 1, 0, 1), Origin("bench", {}, f"data={world.num_ranks}", 1, 1, {})
    problem = saver.save(group, SAVED, state.slices, {}, about)
    saver.await_copy()
    saver.finish(group)
    if problem := problem or "".join(saved.problem for saved in outcome):
        raise RuntimeError(f"Shoal did not save: {problem}")
    dcp.save(state.sharded, storage_writer=dcp.FileSystemWriter(folder / "dcp"))
    return sum(4 * shape.numel() for shape in shapes().values())


def load(world: World, folder: Path, quick: bool) -> dict[str, list[float]]:
    """Seconds a load, by arm and round. Every rank must call it."""
    state = State(world)

    def shoal() -> None:
        opened = CheckpointReader(DirectoryStore(folder), SAVED)
        for name, places in state.slices.items():
            opened.fill(name, places)

    def peer() -> None:
        dcp.load(state.sharded, storage_reader=dcp.FileSystemReader(folder / "dcp"))

    def memcpy() -> None:
        for name, [part] in state.slices.items():
            part.tensor.copy_(state.truth[name])

    loads = {"dcp": peer, "shoal": shoal, "again": peer, "memcpy": memcpy}
    arms = {name: _timed(name, work, state) for name, work in loads.items()}
    with harness.quiet():
        return harness.interleave(arms, 6 if quick else 20, num_warm_up=2)


def _timed(arm: str, work: Callable[[], None], state: State) -> Callable[[], float]:
    def seconds() -> float:
        state.forget()
        dist.barrier()
        started = perf_counter()
        work()
        dist.barrier()
        took = perf_counter() - started
        state.check(arm)
        return took

    return seconds


def take_part(world: World, task: str, folder: str, length: str) -> int | dict[str, list[float]]:
    if task == "save":
        return save(world, Path(folder))
    return load(world, Path(folder), length == "quick")


# ---- in the bench


def save_with_ranks(folder: Path) -> int:
    """Four ranks save into a directory, where both checkpoints then are."""
    return ranks.start("checkpoint_load", NUM_SAVERS, int, "save", str(folder), "once")


def measure(quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        num_bytes = save_with_ranks(Path(folder))
        for num_ranks in NUM_LOADERS:
            words = "load", folder, "quick" if quick else "full"
            found = ranks.start("checkpoint_load", num_ranks, dict[str, list[float]], *words)
            yield _row(f"checkpoint-load/{num_ranks}", found, num_bytes)


def _row(name: str, seconds: dict[str, list[float]], num_bytes: int) -> Row:
    against = harness.spread(harness.ratios(seconds["dcp"], seconds["shoal"]))
    took = {arm: harness.spread(figures).median for arm, figures in seconds.items()}
    speed = num_bytes / took["shoal"] / 1e9
    return Row(
        name=name,
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"dcp.load {took['dcp'] * 1e3:.0f} ms",
        ceiling=f"memcpy {took['memcpy'] * 1e3:.0f} ms",
        control=harness.spread(harness.ratios(seconds["again"], seconds["dcp"])).median,
        note=f"Shoal {took['shoal'] * 1e3:.0f} ms, {speed:.1f} GB/s",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(take_part)
    else:
        harness.main(measure)
