"""`slow-link`: seconds and bytes to a loss over slow links, against DDP dense, fp16 and PowerSGD.

Four hosts are network namespaces on a switch, with a rank each; what leaves a host is held to 100
or 10 Mbit/s by `tc tbf`. Two models: an MLP of 10 M parameters on labels of a random teacher, and a
character GPT on Shakespeare. All arms train the same batches with AdamW at the same rate until a
held-out loss, on each of the seeds; the clock stands still while they evaluate. Bytes are those
that the hosts' interfaces count.

At 100 Mbit/s every arm runs to the loss. At 10 Mbit/s the dense arm would take hours: five of its
steps are timed there, times the steps to the loss that it takes without a throttle, and the row
says that it is extrapolated. `--quick` does so at both rates, with two steps, for the MLP, one
seed and one arm of each kind. Hosts share no memory, and an arm whose bytes do not leave them
fails. With more ranks than cores, hosts are emulated devices. Needs root, for the namespaces.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
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
TIMED_STEPS, QUICK_STEPS = 5, 2  # of an arm that is extrapolated
LEAST_BYTES = 10_000  # that leave the hosts in a step of any arm
EVERY = 10  # steps between two looks at the held-out loss
SEEDS = (1, 2, 3)
RATES = {"mlp": 3e-4, "gpt": 2e-3}
TARGETS = {"mlp": 1.0, "gpt": 2.3}
# Ratios of seconds to the loss, dense DDP over Shoal's best arm.
FLOORS = {("mlp", 100): 20.0, ("gpt", 100): 1.0, ("mlp", 10): 100.0, ("gpt", 10): 1.0}
PEERS = ("ddp", "ddp fp16", "ddp powersgd:1", "ddp powersgd:4")
OWN = {
    100: (
        "data=4 local_steps=8 outer=nesterov:1.0:0.5 codec=topk:0.05+int8",
        "data=4 codec=powersgd:1",
        "data=4 codec=topk:0.01+int8",
        "data=4 codec=auto",
    ),
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
    if found.num_bytes < LEAST_BYTES * found.steps:
        raise harness.ArmFailed(f"{arm}: {found.num_bytes} bytes left the hosts, so they share.")
    return found


@cache
def unthrottled(model: str, seed: int) -> Found:
    return run_arm("ddp", model, seed, None, MOST_STEPS)


def dense(model: str, seed: int, megabits: int, timed_steps: int | None) -> Found:
    """The dense arm; of an extrapolated one, so many steps under the throttle."""
    if timed_steps is None:
        return run_arm("ddp", model, seed, megabits, MOST_STEPS)
    whole = unthrottled(model, seed)
    timed = run_arm("ddp", model, seed, megabits, timed_steps)
    return msgspec.structs.replace(whole, seconds=timed.seconds / timed.steps * whole.steps)


def measure(quick: bool) -> Iterator[Row]:
    for megabits in (100, 10):
        for model in ("mlp",) if quick else MODELS:
            try:
                yield from rows(model, megabits, quick)
            except NoNamespaces as why:
                yield Row(name=f"slow-link/{model}/{megabits}", floor=1.0, note=str(why))


def rows(model: str, megabits: int, quick: bool) -> Iterator[Row]:
    """Dense DDP over Shoal's best arm; and the best of DDP's hooks over it."""
    seeds, own_arms = SEEDS[: 1 if quick else 3], OWN[megabits][: 1 if quick else None]
    peers = (PEERS[2:3] if quick else PEERS[1:]) if megabits == 100 else ()
    timed_steps = QUICK_STEPS if quick else None if megabits == 100 else TIMED_STEPS
    base = [dense(model, seed, megabits, timed_steps) for seed in seeds]
    trained = {arm: train_all(arm, model, seeds, megabits) for arm in (*peers, *own_arms)}
    found = {
        arm: runs
        for arm, runs in trained.items()
        if all(one.loss <= TARGETS[model] for one in runs)
    }
    name, floor = f"slow-link/{model}/{megabits}", FLOORS[model, megabits]

    def best(arms: Sequence[str]) -> str:
        return min((arm for arm in arms if arm in found), key=lambda a: seconds(a), default="")

    def seconds(arm: str) -> float:
        return harness.spread([one.seconds for one in found[arm]]).median

    if not (own := best(own_arms)):
        yield Row(name=name, floor=floor, note=f"no loss of {TARGETS[model]}")
        return
    told = ", ".join(
        f"{arm} {seconds(arm):.1f} s, {one.steps} steps, {one.num_bytes / 1e6:.1f} MB"
        for arm, (one, *_) in found.items()
    )
    (first, *_) = base
    peer = f"ddp {first.seconds:.1f} s, {first.steps} steps, {first.num_bytes / 1e6:.1f} MB"
    extrapolated = " (extrapolated)" * (timed_steps is not None)
    yield _row(name, floor, base, found[own], peer + extrapolated, f"{own}; {told}")
    if hook := best(peers):
        yield _row(f"{name}/hook", 1.0, found[hook], found[own], hook, own)


def train_all(arm: str, model: str, seeds: Sequence[int], megabits: int) -> list[Found]:
    return [run_arm(arm, model, seed, megabits, MOST_STEPS) for seed in seeds]


def _row(
    name: str, floor: float, base: Sequence[Found], own: Sequence[Found], peer: str, note: str
) -> Row:
    pairs = zip(base, own, strict=True)
    ratio = harness.spread([one.seconds / other.seconds for one, other in pairs])
    return Row(
        name=name,
        value=ratio.median,
        low=ratio.low,
        high=ratio.high,
        num_pairs=ratio.num_pairs,
        floor=floor,
        peer=peer,
        ceiling="nothing sent",
        note=note,
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(train)
    else:
        harness.main(measure)
