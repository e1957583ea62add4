"""`slow-link`: seconds and bytes to a loss over slow links, against DDP dense, fp16 and PowerSGD.

Four hosts are network namespaces on a switch, with a rank each; what leaves a host is held to 100
or 10 Mbit/s by `tc tbf`. Two models: an MLP of 10 M parameters on labels of a random teacher, and a
character GPT on Shakespeare. All arms train the same batches with AdamW at the same rate until a
held-out loss, on each of the seeds; the clock stands still while they evaluate. Bytes are those
that the hosts' interfaces count.

At 100 Mbit/s every arm runs to the loss. At 10 Mbit/s the dense arm would take hours: five of its
steps are timed there, times the steps to the loss that it takes without a throttle, and the row
says that it is extrapolated. With more ranks than cores, hosts are emulated devices. Needs root,
for the namespaces.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from time import perf_counter

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import shoal
from bench import harness, ranks
from bench.harness import Row
from shoal.comm.mesh import LauncherSeat
from shoal.training.recipe import find_recipe
from shoal.training.run import Run, make_batches, resolve
from shoal.training.trainer import Trainer
from shoal.world import World
from tests.support.hosts import NoNamespaces, several_hosts, throttle

NUM_HOSTS, BATCH, LENGTH = 4, 64, 64
MOST_STEPS = 4000
TIMED_STEPS = 5  # of an arm that is extrapolated
EVERY = 10  # steps between two looks at the held-out loss
SEEDS = (1, 2, 3)
RATES = {"mlp": 3e-4, "gpt": 2e-3}
TARGETS = {"mlp": 1.0, "gpt": 2.3}
# Ratios of seconds to the loss, dense DDP over Shoal's best arm.
FLOORS = {("mlp", 100): 20.0, ("gpt", 100): 1.0, ("mlp", 10): 100.0, ("gpt", 10): 1.0}
PEERS = ("ddp", "ddp fp16", "ddp powersgd:1", "ddp powersgd:4")
OWN = {
    100: ("data=4 codec=topk:0.01+int8", "data=4 codec=powersgd:1", "data=4 codec=int8"),
    10: ("data=4 local_steps=32 outer=nesterov:1.0:0.5 codec=topk:0.05+int8",),
}


class Found(msgspec.Struct):
    """Of one arm: the seconds and steps to the loss."""

    steps: int
    seconds: float
    loss: float
    num_bytes: int = 0


def mlp(seed: int) -> tuple[Run, shoal.data.Source]:
    draws = torch.Generator().manual_seed(7)
    inputs = torch.randn(20_480, 784, generator=draws)
    labels = (inputs @ torch.randn(784, 10, generator=draws)).argmax(1)
    widths = [784, 2048, 2048, 2048]

    def model() -> nn.Module:
        torch.manual_seed(seed)
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(2048, 10))

    held_out = shoal.data.tensors(inputs[-1024:], labels[-1024:])
    return _run(
        "mlp", model, F.cross_entropy, shoal.data.tensors(inputs[:-1024], labels[:-1024]), seed
    ), held_out


def gpt(seed: int) -> tuple[Run, shoal.data.Source]:
    text = shoal.data.catalog.text("shakespeare")
    make = find_recipe(f"{harness.ROOT / 'recipes' / 'charlm.py'}:GPT")

    def model() -> nn.Module:
        torch.manual_seed(seed)
        return make(len(text.alphabet), LENGTH, layers=4, width=128, heads=4, dropout=0.0)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    cut = len(text.tokens) * 95 // 100
    held_out = shoal.data.windows(text.tokens[-(256 * LENGTH + 1) :], LENGTH)
    return _run("gpt", model, loss, shoal.data.windows(text.tokens[:cut], LENGTH), seed), held_out


def _run(name: str, model: Callable[[], nn.Module], loss: object, data: object, seed: int) -> Run:
    return Run(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=RATES[name]),
        data=data,
        batch_size=BATCH,
        steps=MOST_STEPS,
        seed=seed,
    )


MODELS = {"mlp": mlp, "gpt": gpt}


# ---- in a rank


def train(world: World, arm: str, model: str, seed: str, most: str) -> Found:
    """Train to the loss, or `most` steps. Every rank must call it."""
    run, held_out = MODELS[model](int(seed))
    body = with_ddp if arm.startswith("ddp") else with_shoal
    return body(world, run, held_out, arm, TARGETS[model], int(most))


def with_shoal(
    world: World, run: Run, held_out: shoal.data.Source, arm: str, target: float, most: int
) -> Found:
    found, began = Found(0, 0.0, float("inf")), perf_counter()
    with Trainer(run, resolve(run, arm, world.num_ranks), LauncherSeat(world)) as trainer:
        window = max(EVERY, trainer.plan.local_steps)
        for info in trainer:
            found.steps = info.step
            if info.step % window == 0 or info.step == most:
                found.seconds += perf_counter() - began
                found.loss = trainer.evaluate(held_out)["loss"] if most > TIMED_STEPS else 0.0
                began = perf_counter()
            if found.loss <= target or info.step == most:
                break
    return found


def with_ddp(
    world: World, run: Run, held_out: shoal.data.Source, arm: str, target: float, most: int
) -> Found:
    _, _, hook = arm.partition(" ")
    sizes: dict[str, int] = {}
    if hook.startswith("powersgd"):
        # All in one bucket: the hook starts its messages as they come, and with several buckets
        # ranks may start them in unlike orders, of which Gloo dies.
        dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 30
        sizes["bucket_cap_mb"] = 1024
    made = DistributedDataParallel(run.make_model(), gradient_as_bucket_view=True, **sizes)
    if hook == "fp16":
        made.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        state = powerSGD_hook.PowerSGDState(
            None, int(hook.partition(":")[2]), start_powerSGD_iter=2
        )
        made.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = run.make_optimizer(made.module)
    batches, found = make_batches(run, world.num_ranks), Found(0, 0.0, float("inf"))
    began = perf_counter()
    while found.loss > target and found.steps < most:
        piece = batches.at(found.steps).piece(world.rank)
        optimizer.zero_grad()
        run.loss(made(piece.inputs), piece.target).backward()
        optimizer.step()
        found.steps += 1
        if found.steps % EVERY == 0 or found.steps == most:
            found.seconds += perf_counter() - began
            found.loss = _evaluate(made.module, run, held_out) if most > TIMED_STEPS else 0.0
            began = perf_counter()
    return found


@torch.no_grad()
def _evaluate(model: nn.Module, run: Run, held_out: shoal.data.Source) -> float:
    """On every rank alike."""
    pairs = [held_out[i] for i in range(len(held_out))]
    inputs, target = (torch.stack([torch.as_tensor(p[k]) for p in pairs]) for k in range(2))
    total = [float(run.loss(model(a), b)) for a, b in zip(inputs.split(128), target.split(128))]
    dist.barrier()
    return sum(total) / len(total)


# ---- in the bench


def run_arm(arm: str, model: str, seed: int, megabits: int | None, most: int) -> Found:
    with several_hosts(NUM_HOSTS) as hosts:
        if megabits is not None:
            throttle(hosts, megabits)
        words = (arm, model, str(seed), str(most))
        found = ranks.start_on(hosts, "slow_link", Found, *words)
        found.num_bytes = sum(host.num_bytes() for host in hosts)
        return found


def dense(model: str, seed: int, megabits: int, extrapolates: bool) -> Found:
    """The dense arm; of an extrapolated one, five steps under the throttle."""
    if not extrapolates:
        return run_arm("ddp", model, seed, megabits, MOST_STEPS)
    whole = run_arm("ddp", model, seed, None, MOST_STEPS)
    timed = run_arm("ddp", model, seed, megabits, TIMED_STEPS)
    whole.seconds = timed.seconds / timed.steps * whole.steps
    return whole


def measure(quick: bool) -> Iterator[Row]:
    for megabits in (100, 10):
        for model in MODELS:
            try:
                yield row(model, megabits, SEEDS[: 1 if quick else 3], quick or megabits == 10)
            except NoNamespaces as why:
                yield Row(name=f"slow-link {model} {megabits}", floor=1.0, note=str(why))


def row(model: str, megabits: int, seeds: Sequence[int], extrapolates: bool) -> Row:
    """Dense DDP over Shoal's best arm; the peers with hooks stand beside it."""
    base = [dense(model, seed, megabits, extrapolates) for seed in seeds]
    arms = (*PEERS[1:], *OWN[megabits]) if megabits == 100 else OWN[megabits]
    found = {
        arm: [run_arm(arm, model, seed, megabits, MOST_STEPS) for seed in seeds] for arm in arms
    }
    late = [arm for arm, runs in found.items() if any(r.loss > TARGETS[model] for r in runs)]
    times = {
        arm: harness.spread([one.seconds for one in runs]).median
        for arm, runs in found.items()
        if arm not in late
    }
    own = min((arm for arm in times if arm in OWN[megabits]), key=times.__getitem__, default="")
    name = f"slow-link {model} {megabits} Mbit/s"
    if not own:
        return Row(name=name, floor=FLOORS[model, megabits], note=f"no loss of {TARGETS[model]}")
    pairs = zip(base, found[own], strict=True)
    ratio = harness.spread([one.seconds / other.seconds for one, other in pairs])
    told = ", ".join(f"{arm} {seconds:.1f} s" for arm, seconds in times.items())
    moved = harness.spread([one.num_bytes / 1e6 for one in found[own]]).median
    return Row(
        name=name,
        value=ratio.median,
        low=ratio.low,
        high=ratio.high,
        num_pairs=ratio.num_pairs,
        floor=FLOORS[model, megabits],
        peer=f"ddp {base[0].seconds:.1f} s" + " (extrapolated)" * extrapolates,
        ceiling="nothing sent",
        note=f"{own}, {moved:.1f} MB in all; {told}",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(train)
    else:
        harness.main(measure)
