"""Bytes for each parameter on each of four ranks, under each level of ZeRO, against the arithmetic.

With fp32 and Adam a parameter takes 4 bytes of weight, 4 of gradient and 8 of moments. N ranks
share out the moments at level 1, the gradients too at level 2, the weights too at level 3: 16,
8 + 8/N, 4 + 12/N and 16/N bytes. Level 3 must hold whole what it computes with, so two of the
largest block are granted on top. The peers are what one would write by hand (`bench/peers.py`).

The figure is the most that a rank held in a step, less what stood before the model existed, less
what the forward pass keeps for the backward pass. Each arm has fresh processes, which first train a
small model in the same way, so that code, groups and threads stand before. PSS (smaps_rollup)
shares out pages that several ranks hold. It is read after the steps, and what the kernel counted
as the highest resident size in them (VmHWM, set back by clear_refs) is above the size now is added:
no sampling, so no peak is missed. A threshold for malloc makes freed memory go back at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from bench import harness, loops, peers, ranks
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from shoal.data.sources import tensors
from shoal.training.run import Run
from shoal.world import World

NUM_RANKS = 4
WIDTH, NUM_BLOCKS = 1024, 14  # 60 M parameters; a block has 4.2 M
SMALL = 64  # the width of what is trained before, to have everything else in place
STEPS = 2  # before the watch, and under it
RATE = 1e-4
FLOOR = 1.10
BYTES_OF_LEVEL = {
    0: 16.0,
    1: 8 + 8 / NUM_RANKS,
    2: 4 + 12 / NUM_RANKS,
    3: 16 / NUM_RANKS,
}


def make_model(width: int) -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        for _ in range(NUM_BLOCKS)
    ]
    return nn.Sequential(*blocks, nn.Linear(width, width))


def make_run(width: int) -> Run:
    torch.manual_seed(1)
    samples = torch.randn(64, width)
    return Run(
        model=lambda: make_model(width),
        loss=mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=RATE),
        data=tensors(samples, samples.tanh()),
        batch_size=NUM_RANKS,
        steps=1 << 30,
    )


def kept_bytes() -> int:
    """What a rank's forward pass keeps beside the parameters; counted without any memory."""
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not isinstance(owner, nn.Parameter):
            kept[id(owner)] = owner
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
        make_model(WIDTH)(torch.empty(1, WIDTH)).square().mean()
    return sum(tensor.numel() * tensor.element_size() for tensor in kept.values())


def num_parameters() -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make_model(WIDTH).parameters())


def largest_block() -> int:
    """Bytes of the largest block's parameters."""
    with torch.device("meta"):
        blocks = list(make_model(WIDTH).children())
    return max(sum(4 * p.numel() for p in block.parameters()) for block in blocks)


# ---- in a rank


def _kb(file: str, name: str) -> int:
    for line in Path("/proc/self", file).read_text("utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/{file} has no {name}; this bench needs Linux.")


def held_bytes() -> int:
    return 1024 * _kb("smaps_rollup", "Pss")


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that this process held while it worked."""
    Path("/proc/self/clear_refs").write_text("5", "utf-8")  # VmHWM starts again from here
    work()
    return held_bytes() + 1024 * (_kb("status", "VmHWM") - _kb("status", "VmRSS"))


def make_loop(
    arm: str, level: int, width: int, world: World, stack: ExitStack
) -> PlainLoop | ShoalLoop:
    run = make_run(width)
    if arm == "shoal":
        apart = " memory=apart" if level in (1, 2) else ""
        zero = f" zero={level}{apart}" if level else ""
        return ShoalLoop(run, f"data={NUM_RANKS}{zero}", world, stack, STEPS)

    def blocks(model: nn.Module) -> Sequence[nn.Module]:
        return list(model.children())

    model, optimizer = peers.peer(level, run.make_model(), blocks, RATE)
    return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), STEPS)


def measure_arm(world: World, arm: str, level: str) -> float:
    """Bytes of the rank that held most. Every rank must call it."""
    with ExitStack() as stack:
        make_loop(arm, int(level), SMALL, world, stack).chunk()
    with harness.quiet():  # after a collection
        before = held_bytes()
        with ExitStack() as stack:
            loop = make_loop(arm, int(level), WIDTH, world, stack)
            loop.chunk()
            most = torch.tensor([float(peak_bytes(loop.chunk) - before)])
            dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


# ---- in the bench


def measure(quick: bool) -> Iterator[Row]:
    beside, num = kept_bytes(), num_parameters()
    refused = {level: loops.refusal(f"data={NUM_RANKS} zero={level}") for level in (1, 2, 3)}

    def arm(name: str, level: int) -> Callable[[], float]:
        def bytes_each() -> float:
            # Else freed memory stays with the process, as much as chance will have it.
            keep = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            found = ranks.start("zero_memory", NUM_RANKS, float, name, str(level), **keep)
            return (found - beside) / num

        return bytes_each

    arms = {f"peer/{level}": arm("peer", level) for level in BYTES_OF_LEVEL}
    arms |= {f"again/{level}": arm("peer", level) for level in (1, 3)}
    arms |= {f"shoal/{level}": arm("shoal", level) for level in BYTES_OF_LEVEL}
    arms = {name: call for name, call in arms.items() if not _is_refused(name, refused)}
    found = harness.interleave(arms, 1 if quick else 3, num_warm_up=0)
    for level in BYTES_OF_LEVEL:
        if refused.get(level):
            peer = harness.spread(found[f"peer/{level}"]).median
            note = f"{refused[level]} {peers.NAMES[level]} took {peer:.2f} bytes"
            yield Row(name=f"zero-memory/{level}", floor=FLOOR, at_most=True, note=note)
        else:
            yield from _rows(level, found, 2 * largest_block() / num)


def _is_refused(name: str, refused: dict[int, str]) -> bool:
    kind, _, level = name.partition("/")
    return kind == "shoal" and bool(refused.get(int(level)))


def _rows(level: int, found: dict[str, list[float]], blocks: float) -> Iterator[Row]:
    own, peer = found[f"shoal/{level}"], found[f"peer/{level}"]
    # How far two runs of the same differ.
    control = [r for k in (1, 3) for r in harness.ratios(found[f"again/{k}"], found[f"peer/{k}"])]
    formula, granted = BYTES_OF_LEVEL[level], blocks if level == 3 else 0.0
    took, theirs = harness.spread(own).median, harness.spread(peer).median
    note = f"Shoal {took:.2f} bytes a parameter and rank"
    if granted:
        note += f", {granted:.2f} of them granted for two blocks"
    for name, figures, floor, noise in (
        (f"zero-memory/{level}", [(value - granted) / formula for value in own], FLOOR, 0.0),
        (
            f"zero-memory/{level}/peer",
            harness.ratios(own, peer),
            1.0,
            harness.noise_of(control),
        ),
    ):
        seen = harness.spread(figures)
        yield Row(
            name=name,
            value=seen.median,
            low=seen.low,
            high=seen.high,
            num_pairs=seen.num_pairs,
            floor=floor,
            at_most=True,
            noise=noise,
            peer=f"{peers.NAMES[level]} {theirs:.2f} bytes",
            ceiling=f"the arithmetic {formula:.2f} bytes",
            control=harness.spread(control).median,
            note=note,
        )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_arm)
    else:
        harness.main(measure)
