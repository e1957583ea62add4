"""The GPT of `recipes/charlm.py` cut over two ranks, against a plan of PyTorch's written by hand.

Shoal cuts the model as it finds it. By hand, each block's matrices are named: the first of each
pair by columns, the second by rows (ColwiseParallel, RowwiseParallel), which takes one all-reduce
for each pair and direction. Query, key and value are one matrix there, so its rows are put in an
order in which each rank's heads of all three lie together, and a block is told how many heads it
has left; the small embedding, which is the head too, stays whole. Without dropout both must end
with the same loss. All arms live in the same two processes and take turns.

The ceiling is the same cut with nothing summed: each rank computes its half and never talks.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from bench import harness, loops, ranks
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.data.sources import tensors
from shoal.training.recipe import find_recipe
from shoal.training.run import Run
from shoal.world import World

NUM_RANKS = 2
TOKENS, LENGTH, LAYERS, WIDTH, HEADS, BATCH = 84, 128, 4, 256, 4, 8
CHUNK = 2  # steps measured at a time
RATE = 1e-4
FLOOR = 1.0
PLAN = f"data=1 tensor={NUM_RANKS}"
CHARLM = harness.ROOT / "recipes" / "charlm.py"
# The linear layers of a block: whether the outputs are shared out, or the inputs.
LAYERS_OF_BLOCK: dict[str, ParallelStyle] = {
    "query_key_value": ColwiseParallel(),
    "project": RowwiseParallel(),
    "widen": ColwiseParallel(),
    "narrow": RowwiseParallel(),
}


def make_run() -> Run:
    gpt: Any = find_recipe(f"{CHARLM}:GPT")
    torch.manual_seed(1)
    text = torch.randint(0, TOKENS, (512, LENGTH + 1))
    return Run(
        model=lambda: gpt(TOKENS, LENGTH, LAYERS, WIDTH, HEADS, dropout=0.0),
        loss=find_recipe(f"{CHARLM}:cross_entropy"),
        optimizer=lambda named: torch.optim.AdamW(named, lr=RATE),
        data=tensors(text[:, :-1].contiguous(), text[:, 1:].contiguous()),
        batch_size=BATCH,
        steps=1 << 30,
    )


def by_hand(model: nn.Module) -> list[dict[str, Any]]:
    """Cut the model; returns the optimizer's groups. Every rank must call it."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        for parameter in block.query_key_value.parameters():
            parameter.data = _heads_together(parameter.data)
        block.heads //= NUM_RANKS
        parallelize_module(block, mesh, LAYERS_OF_BLOCK)
    # A fused optimizer takes DTensors and plain tensors, but not in one group.
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if isinstance(p.data, DTensor) == cut]}
        for cut in (True, False)
    ]


def _heads_together(packed: Tensor) -> Tensor:
    """Rows [3, ranks, heads of a rank, ...] as [ranks, 3, heads of a rank, ...]."""
    parts = packed.unflatten(0, (3, NUM_RANKS, -1))
    together: Tensor = parts.transpose(0, 1).flatten(0, 2).contiguous()
    return together


def halves(model: nn.Module) -> list[dict[str, Any]]:
    """Each layer's half as a plain layer; returns the optimizer's groups."""
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        block.heads //= NUM_RANKS
        for name, style in LAYERS_OF_BLOCK.items():
            layer = getattr(block, name)
            by_columns = isinstance(style, ColwiseParallel)
            before = layer.in_features // (1 if by_columns else NUM_RANKS)
            after = layer.out_features // (NUM_RANKS if by_columns else 1)
            setattr(block, name, nn.Linear(before, after))
    return [{"params": list(model.parameters())}]


def plain(run: Run, cut: Any) -> PlainLoop:
    """Every rank trains on the whole batch."""
    model = run.make_model()
    optimizer = torch.optim.AdamW(cut(model), lr=RATE, fused=True)
    return PlainLoop(run, model, optimizer, Share(0, 1), CHUNK)


def measure_arms(world: World, length: str) -> dict[str, list[float]]:
    """Seconds a step, by arm and round. Every rank must call it."""
    run = make_run()
    with ExitStack() as stack:
        alike: dict[str, PlainLoop | ShoalLoop] = {"hand": plain(run, by_hand)}
        if not loops.refusal(PLAN):
            alike["shoal"] = ShoalLoop(run, PLAN, world, stack, CHUNK)
        alike["again"] = plain(run, by_hand)
        stack.enter_context(harness.quiet())
        chunks = {arm: loop.chunk for arm, loop in alike.items()}
        chunks["halves"] = plain(run, halves).chunk
        seconds = harness.interleave(chunks, 6 if length == "quick" else 30, num_warm_up=2)
        losses = {arm: loop.mean_loss() for arm, loop in alike.items()}
        losses["uncut"] = _loss_alone(run, alike["hand"])
        loops.check_alike(losses)
    return seconds


def _loss_alone(run: Run, like: PlainLoop | ShoalLoop) -> float:
    """What one process that cuts nothing ends with after as many steps: is the peer right?"""
    assert isinstance(like, PlainLoop)
    model = run.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    alone = PlainLoop(run, model, optimizer, Share(0, 1), CHUNK)
    while alone.step < like.step:
        alone.chunk()
    return alone.loss


def measure(quick: bool) -> Iterator[Row]:
    words = ["quick" if quick else "full"]
    seconds = ranks.start("tensor", NUM_RANKS, dict[str, list[float]], *words)
    hand = seconds["hand"]
    control = harness.ratios(seconds["again"], hand)
    peer = f"parallelize_module {harness.spread(hand).median * 1e3:.1f} ms"
    of_hand = harness.spread(harness.ratios(seconds["halves"], hand)).median
    if (own := seconds.get("shoal")) is None:
        note = f"{loops.refusal(PLAN)} {peer}, {of_hand:.2f} of halves that never talk"
        yield Row(name="tensor", floor=FLOOR, note=note)
        return
    # Throughput against throughput: the peer's seconds over Shoal's.
    against = harness.spread(harness.ratios(hand, own))
    of_own = harness.spread(harness.ratios(seconds["halves"], own)).median
    yield Row(
        name="tensor",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        noise=harness.noise_of(control),
        peer=peer,
        ceiling=f"halves {harness.spread(seconds['halves']).median * 1e3:.1f} ms",
        control=harness.spread(control).median,
        note=f"of the halves: Shoal {of_own:.2f}, by hand {of_hand:.2f}",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_arms)
    else:
        harness.main(measure)
