"""Data parallel on two ranks against DDP, and both against two twins that never talk.

All arms live in the same two processes, on one Gloo group, and take turns a few steps at a time:
DDP with its gradients in its buckets and the better of two bucket sizes; Shoal's whole trainer,
metrics on, with `sums=ring` and with `sums=exact`; and the twins, a plain loop on each rank's
share, which no way of agreeing can beat. All use a fused AdamW and the same batches in the same
order, and all but the twins must end with the same loss.

Two models: a GPT of 3.2 M parameters, where computing hides most of the traffic, and an MLP of
12.6 M on a batch of 8 a rank, where it cannot.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from bench import harness
from bench.harness import Row
from shoal.data.sources import tensors
from shoal.mesh import LauncherSeat
from shoal.metrics.meters import Totals
from shoal.metrics.scribe import Scribe
from shoal.run import Run, make_batches, resolve
from shoal.training import Trainer
from shoal.world import World

NUM_RANKS = 2
BATCH_OF_RANK = 8
NUM_SAMPLES = 512
CHUNK = 4  # steps measured at a time
BUCKETS_MB = (25, 4)
FLOORS = {"ring": 1.00, "exact": 0.93}
RATE = 1e-4


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.before_mix, self.before_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_mix(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = x + self.feed(self.before_feed(x))
        return fed


class GPT(nn.Module):
    """3.2 M parameters."""

    def __init__(self, width: int = 256, num_layers: int = 4, num_tokens: int = 65):
        super().__init__()
        self.tokens, self.places = nn.Embedding(num_tokens, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, num_heads=4) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def gpt() -> Run:
    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), target.flatten())

    torch.manual_seed(1)
    text = torch.randint(0, 65, (NUM_SAMPLES, 65))
    return _run(GPT, loss, text[:, :-1].contiguous(), text[:, 1:].contiguous())


def mlp() -> Run:
    """12.6 M parameters."""

    def model() -> nn.Module:
        layers = [layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
        return nn.Sequential(*layers)

    torch.manual_seed(1)
    return _run(model, mse_loss, torch.randn(NUM_SAMPLES, 2048), torch.randn(NUM_SAMPLES, 2048))


def _run(model: Callable[[], nn.Module], loss: Any, inputs: Tensor, target: Tensor) -> Run:
    return Run(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=RATE),
        data=tensors(inputs, target),
        batch_size=NUM_RANKS * BATCH_OF_RANK,
        steps=1 << 30,
    )


MODELS = {"gpt": gpt, "mlp": mlp}


class PlainLoop:
    """A hand-written loop over this rank's share, with or without DDP around the model."""

    def __init__(self, run: Run, rank: int, bucket_mb: int | None):
        self.batches, self.rank = make_batches(run, NUM_RANKS), rank
        self.model = run.make_model()
        if bucket_mb is not None:
            self.model = DistributedDataParallel(
                self.model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.loss_of, self.step, self.loss = run.loss, 0, 0.0

    def chunk(self) -> float:
        pieces = [self.batches.at(self.step + k).piece(self.rank) for k in range(CHUNK)]
        dist.barrier()
        started = perf_counter()
        for piece in pieces:
            self.optimizer.zero_grad()
            loss = self.loss_of(self.model(piece.inputs), piece.target)
            loss.backward()
            self.optimizer.step()
        dist.barrier()
        seconds = perf_counter() - started
        self.step, self.loss = self.step + CHUNK, loss.item()
        return seconds / CHUNK


class ShoalLoop:
    """Shoal's trainer on the group that stands, with the hooks a rank of `shoal train` has."""

    def __init__(self, run: Run, sums: str, world: World, stack: ExitStack):
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plan = resolve(run, f"data={NUM_RANKS} sums={sums}", NUM_RANKS)
        self.trainer = Trainer(run, plan, LauncherSeat(world))
        scribe = Scribe(folder / "metrics.jsonl", lambda: self.trainer.is_scribe)
        self.trainer.hooks += [Totals().add, scribe]
        stack.callback(scribe.close)
        stack.enter_context(self.trainer)
        self.steps, self.loss = iter(self.trainer), 0.0

    def chunk(self) -> float:
        dist.barrier()
        started = perf_counter()
        for info in islice(self.steps, CHUNK):
            self.loss = info.loss
        dist.barrier()
        return (perf_counter() - started) / CHUNK


class Times(msgspec.Struct):
    """What the ranks of one model found: seconds a step, by arm and round."""

    seconds: dict[str, list[float]]
    bucket_mb: int


def measure_model(name: str, world: World, quick: bool) -> Times:
    """Every rank must call it."""
    run = MODELS[name]()
    with ExitStack() as stack:
        loops = {mb: PlainLoop(run, world.rank, mb) for mb in BUCKETS_MB}
        stack.enter_context(harness.quiet())
        best = _best_bucket(loops, 4 if quick else 10)
        del loops
        arms: dict[str, PlainLoop | ShoalLoop] = {
            "ddp": PlainLoop(run, world.rank, best),
            "ring": ShoalLoop(run, "ring", world, stack),
            "exact": ShoalLoop(run, "exact", world, stack),
            "twins": PlainLoop(run, world.rank, None),
            "again": PlainLoop(run, world.rank, best),
        }
        chunks = {arm: loop.chunk for arm, loop in arms.items()}
        seconds = harness.interleave(chunks, 8 if quick else 30, num_warm_up=2)
        _check_alike({arm: arms[arm].loss for arm in ("ddp", "ring", "exact")})
    return Times(seconds, best)


def _best_bucket(loops: dict[int, PlainLoop], num_rounds: int) -> int:
    """DDP's better bucket size here. Rank 0 decides for all."""
    chunks = {str(mb): loop.chunk for mb, loop in loops.items()}
    found = harness.interleave(chunks, num_rounds, num_warm_up=1)
    best = min(loops, key=lambda mb: harness.spread(found[str(mb)]).median)
    told = torch.tensor([best])
    dist.broadcast(told, 0)
    return int(told.item())


def _check_alike(losses: dict[str, float]) -> None:
    """Arms that train something else are no peers."""
    summed = torch.tensor([losses["ddp"]])
    dist.all_reduce(summed)  # DDP knows its own share's loss only
    losses["ddp"] = summed.item() / NUM_RANKS
    if max(losses.values()) - min(losses.values()) > 1e-3 * losses["ddp"]:
        raise RuntimeError(
            f"The arms ended with the losses {losses}. All must train the same; look at what "
            "changed in the trainer."
        )


def rank_main(name: str, quick: bool, out: Path) -> None:
    """One of the two processes."""
    world = World.from_environment()
    torch.set_num_threads(1)
    harness.pin(world.rank)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    try:
        times = measure_model(name, world, quick)
        if world.rank == 0:
            out.write_bytes(msgspec.json.encode(times))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(name: str, quick: bool, out: Path) -> Times:
    """Start both ranks, wait, and read what rank 0 wrote; nothing is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.dp", name, "quick" if quick else "full", str(out)]
    environment = harness.child_environment() | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
    }
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(NUM_RANKS)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(codes):
        raise RuntimeError(f"dp/{name}: the ranks ended with the codes {codes}; see above.")
    return msgspec.json.decode(out.read_bytes(), type=Times)


def measure(quick: bool) -> Iterator[Row]:
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            times = run_ranks(name, quick, Path(folder) / "times.json")
        for sums in FLOORS:
            yield _row(name, sums, times)


def _row(name: str, sums: str, times: Times) -> Row:
    seconds = times.seconds
    # Throughput against throughput: the peer's seconds over Shoal's.
    against = harness.spread(harness.ratios(seconds["ddp"], seconds[sums]))
    control = harness.ratios(seconds["again"], seconds["ddp"])
    own, of_ddp = (
        harness.spread(harness.ratios(seconds["twins"], seconds[arm])).median
        for arm in (sums, "ddp")
    )
    ddp_ms, twins_ms = (harness.spread(seconds[arm]).median * 1e3 for arm in ("ddp", "twins"))
    # The exact sums' floor has its allowance in it already.
    noise = harness.noise_of(control) if FLOORS[sums] == 1.0 else 0.0
    return Row(
        name=f"dp/{name}/{sums}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOORS[sums],
        noise=noise,
        peer=f"DDP {ddp_ms:.1f} ms with {times.bucket_mb} MB buckets",
        ceiling=f"twins {twins_ms:.1f} ms",
        control=harness.spread(control).median,
        note=f"of the twins: Shoal {own:.2f}, DDP {of_ddp:.2f}",
    )


if __name__ == "__main__":
    if "RANK" in os.environ:
        rank_main(sys.argv[1], sys.argv[2] == "quick", Path(sys.argv[3]))
    else:
        harness.main(measure)
