"""Data parallel on two ranks against DDP, and both against two twins that never talk.

All arms live in the same two processes, on one Gloo group, and take turns a few steps at a time:
DDP with its gradients in its buckets and the better of two bucket sizes; Shoal's whole trainer,
metrics on, with `sums=ring` and with `sums=exact`; and the twins, a plain loop on each rank's
share, which no way of agreeing can beat. All use a fused AdamW and the same batches in the same
order, and all but the twins must end with the same loss. Shoal's ranks hold parameters and state
together, one of the two arms with `sums=exact` excepted, whose ranks hold them apart and exchange.

Two models: a GPT of 3.2 M parameters, where computing hides most of the traffic, and an MLP of
12.6 M on a batch of 8 a rank, where it cannot.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from bench import harness, loops, ranks
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.data.sources import tensors
from shoal.training.run import Run
from shoal.world import World

NUM_RANKS = 2
BATCH_OF_RANK = 8
NUM_SAMPLES = 512
CHUNK = 4  # steps measured at a time
BUCKETS_MB = (25, 4)
PLANS = {"ring": "sums=ring", "exact": "sums=exact", "apart": "sums=exact memory=apart"}
FLOORS = {"ring": 1.00, "exact": 1.00, "apart": 0.93}
OF_TWINS = {"gpt": 0.97, "mlp": 1.05}  # of their throughput
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


def plain(run: Run, world: World, bucket_mb: int | None) -> PlainLoop:
    """A hand-written loop over this rank's share, with or without DDP around the model."""
    model = run.make_model()
    if bucket_mb is not None:
        model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), CHUNK)


class Times(msgspec.Struct):
    """What the ranks of one model found: seconds a step, by arm and round."""

    seconds: dict[str, list[float]]
    bucket_mb: int


def measure_model(world: World, name: str, length: str) -> Times:
    """Every rank must call it."""
    run, quick = MODELS[name](), length == "quick"
    with ExitStack() as stack:
        sizes = {str(mb): plain(run, world, mb) for mb in BUCKETS_MB}
        stack.enter_context(harness.quiet())
        best = int(loops.best_of(sizes, 4 if quick else 10))
        del sizes

        def shoal(arm: str) -> ShoalLoop:
            return ShoalLoop(run, f"data={NUM_RANKS} {PLANS[arm]}", world, stack, CHUNK)

        arms: dict[str, PlainLoop | ShoalLoop] = {
            "ddp": plain(run, world, best),
            "ring": shoal("ring"),
            "exact": shoal("exact"),
            "apart": shoal("apart"),
            "twins": plain(run, world, None),
            "again": plain(run, world, best),
        }
        chunks = {arm: loop.chunk for arm, loop in arms.items()}
        seconds = harness.interleave(chunks, 8 if quick else 30, num_warm_up=2)
        loops.check_alike({arm: arms[arm].mean_loss() for arm in ("ddp", *PLANS)})
    return Times(seconds, best)


def measure(quick: bool) -> Iterator[Row]:
    for name in MODELS:
        times = ranks.start("dp", NUM_RANKS, Times, name, "quick" if quick else "full")
        yield _row_of_twins(name, times)
        for arm in FLOORS:
            yield _row(name, arm, times)


def _row_of_twins(name: str, times: Times) -> Row:
    """Against ranks that never talk, each of which updates all parameters."""
    seconds = times.seconds
    of = {arm: harness.spread(harness.ratios(seconds["twins"], seconds[arm])) for arm in seconds}
    twins_ms = harness.spread(seconds["twins"]).median * 1e3
    return Row(
        name=f"dp/{name}",
        value=of["exact"].median,
        low=of["exact"].low,
        high=of["exact"].high,
        num_pairs=of["exact"].num_pairs,
        floor=OF_TWINS[name],
        peer=f"twins {twins_ms:.1f} ms",
        ceiling="the same",
        control=harness.spread(harness.ratios(seconds["again"], seconds["ddp"])).median,
        note=f"of the twins: apart {of['apart'].median:.2f}, DDP {of['ddp'].median:.2f}",
    )


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
    # The floor of ranks that exchange in order has its allowance in it already.
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
    if ranks.is_rank():
        ranks.serve(measure_model)
    else:
        harness.main(measure)
