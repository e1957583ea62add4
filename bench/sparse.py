"""`sparse`: a table of 1,000,000 rows of 64 on a parameter server, against DDP.

Two ranks look up 4,000 rows a step, drawn evenly, and train them with plain SGD under a linear
layer. The peers are DDP over Gloo with dense gradients, which exchanges all 256 MB, and DDP with
sparse ones, which gathers the touched rows of all ranks; `served` is Shoal's whole trainer with
`sync=server`, whose ranks hold no table. All arms train the same batches in the same processes, in
turns, and must end with the same loss. The ceiling is the same loop without anyone to agree with,
on sparse gradients.

`sparse/bytes` is what went through the loopback interface in a step with nothing shared and all
encrypted, as between hosts, by the interface's own count: over the bytes of the rows that the ranks
touched, pulled once and pushed once. Row numbers, the layer, the losses and the protocols come on
top; so does whatever else talks on this machine. All arms use torch's plain SGD. The server
remembers the rows before a step, as in any run, but keeps no journal, since nothing that DDP does
compares.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from bench import harness, loops, ranks, serving
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.comm.shared_memory import NotShared, SharedSegment
from shoal.comm.wire import Keys, load_keys, make_keys
from shoal.data.sources import tensors
from shoal.sync.server.tables import ServerTables
from shoal.training.run import Run
from shoal.world import World

NUM_RANKS = 2
NUM_ROWS, WIDTH = 1_000_000, 64
BATCH, IDS = 400, 10  # 4,000 lookups a step
NUM_SAMPLES = 40_000
CHUNK = 20  # steps measured at a time: a run makes one after another
RATE = 0.1
PLAN = f"data={NUM_RANKS} sync=server"
FLOORS = {"dense": 20.0, "sparse": 3.0}
MOST_BYTES = 1.1


class Scored(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.table = nn.Embedding(NUM_ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.table(ids).mean(1))
        return scores


def make_run(sparse: bool = True) -> Run:
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(NUM_ROWS, (NUM_SAMPLES, IDS), generator=draws)
    return Run(
        model=lambda: Scored(sparse),
        loss=mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=RATE),
        data=tensors(ids, ids.float().sin().mean(1, keepdim=True)),
        batch_size=BATCH,
        steps=1 << 30,
    )


def serve() -> None:
    """Be the server."""
    run = make_run()
    model = run.make_model()
    tables = ServerTables(model, 0, 1)
    optimizer = run.make_optimizer(model)
    serving.serve(model, optimizer, num_pieces=NUM_RANKS, bound=0, tables=tables)


# ---- in the ranks


class Found(msgspec.Struct):
    """Seconds a step, by arm and round; and bytes of steps over those of their rows."""

    seconds: dict[str, list[float]]
    moved: float


def plain(world: World, sparse: bool, alone: bool = False) -> PlainLoop:
    run = make_run(sparse)
    model = run.make_model()
    if not alone:
        model = DistributedDataParallel(model, gradient_as_bucket_view=not sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=not sparse)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), CHUNK)


def measure_arms(world: World, address: str, other: str, keys: str, length: str) -> Found:
    """Every rank must call it."""
    with ExitStack() as stack:
        served = through_server(world, address, stack)
        stack.enter_context(harness.quiet())
        arms: dict[str, PlainLoop | ShoalLoop] = {
            "served": served,
            "dense": plain(world, sparse=False),
            "sparse": plain(world, sparse=True),
            "alone": plain(world, sparse=True, alone=True),
            "again": plain(world, sparse=True),
        }
        chunks = {arm: loop.chunk for arm, loop in arms.items()}
        seconds = harness.interleave(chunks, 4 if length == "quick" else 12, num_warm_up=1)
        loops.check_alike({arm: arms[arm].mean_loss() for arm in ("served", "dense", "sparse")})
    with ExitStack() as stack:
        refused = NotShared("The bench counts frames.")
        with mock.patch.object(SharedSegment, "create", side_effect=refused):
            sent = through_server(world, other, stack, load_keys(Path(keys)))
            return Found(seconds, bytes_moved(sent))


def through_server(
    world: World, address: str, stack: ExitStack, keys: Keys | None = None
) -> ShoalLoop:
    seat = serving.ServedSeat(world, address, keys=keys)
    return ShoalLoop(make_run(), PLAN, world, stack, CHUNK, seat)


def bytes_moved(sent: ShoalLoop) -> float:
    """Of some steps of all ranks: what the interface carried, over what was touched."""
    trainer = sent.trainer
    sent.chunk()
    batches = [trainer.batches.at(trainer.step + k) for k in range(CHUNK)]
    pieces = [batch.piece(rank).inputs for batch in batches for rank in range(NUM_RANKS)]
    touched = sum(len(ids.unique()) for ids in pieces) * WIDTH * 4
    before = carried_bytes()
    sent.chunk()
    return (carried_bytes() - before) / (2 * touched)


def carried_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    with ExitStack() as stack:
        keys = Path(stack.enter_context(TemporaryDirectory())) / "keys.json"
        make_keys(keys)
        address = stack.enter_context(serving.started("bench.sparse"))
        other = stack.enter_context(serving.started("bench.sparse", keys=keys))
        length = "quick" if quick else "full"
        found = ranks.start("sparse", NUM_RANKS, Found, address, other, str(keys), length)
    for peer, floor in FLOORS.items():
        yield _row(peer, floor, found.seconds)
    if found.moved < 1.0:  # the rows themselves must be there
        raise harness.ArmFailed(f"sparse/bytes counted {found.moved:.3f} of the rows that moved.")
    yield Row(
        name="sparse/bytes",
        value=found.moved,
        low=found.moved,
        high=found.moved,
        num_pairs=1,
        floor=MOST_BYTES,
        at_most=True,
        peer="the touched rows, pulled and pushed",
        ceiling="1.000x",
    )


def _row(peer: str, floor: float, seconds: dict[str, list[float]]) -> Row:
    took = {arm: 1e3 * harness.spread(figures).median for arm, figures in seconds.items()}
    against = harness.spread(harness.ratios(seconds[peer], seconds["served"]))
    control = harness.spread(harness.ratios(seconds["again"], seconds["sparse"])).median
    return Row(
        name=f"sparse/{peer}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=floor,
        peer=f"DDP with {peer} gradients {took[peer]:.1f} ms",
        ceiling=f"alone {took['alone']:.1f} ms",
        control=control,
        note=f"Shoal {took['served']:.1f} ms a step",
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    elif ranks.is_rank():
        ranks.serve(measure_arms)
    else:
        harness.main(measure)
