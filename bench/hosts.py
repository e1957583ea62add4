"""`hosts-dp`, `hosts-bytes`: two hosts with two ranks each, against DDP under torchrun.

Hosts are network namespaces on a switch; what leaves one is held to 1 Gbit/s by `tc tbf`. torchrun
starts two ranks on each, and all arms take turns in these processes, on the MLP of 12.6 M
parameters that `dp` has: DDP with its gradients in its buckets, and Shoal's whole trainer, both in
clear. Seconds are those of a step; bytes are those that the hosts' interfaces count, all that is
sent beside the gradients included. Shoal adds up inside a host first, so that a gradient leaves it
once: two thirds of what DDP's ring over four ranks sends.

Beside them stands what is encrypted: the same model by `shoal train` with servers, whose messages
are. Four ranks share two cores here, so hosts are emulated devices. Needs root, for the namespaces.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench import commands, dp, harness, loops, ranks
from bench.harness import Row
from bench.loops import PlainLoop, Share, ShoalLoop
from bench.slow_link import throttle
from shoal.training.run import Run
from shoal.world import World
from tests.support.hosts import Host, NoNamespaces, several_hosts, write_ssh

NUM_HOSTS, RANKS_OF_HOST = 2, 2
NUM_RANKS = NUM_HOSTS * RANKS_OF_HOST
MEGABITS = 1000
CHUNK = 2  # steps measured at a time
BYTES_FLOOR = 0.68
ENCRYPTED = f"data={NUM_RANKS} sync=server servers=2 hosts={NUM_HOSTS}"
ENCRYPTED_STEPS = 12


def recipe() -> Run:
    return replace(dp.mlp(), batch_size=NUM_RANKS * dp.BATCH_OF_RANK, steps=ENCRYPTED_STEPS)


class Found(msgspec.Struct):
    """By arm and round: seconds of a step, and bytes that left all hosts in one."""

    seconds: dict[str, list[float]]
    num_bytes: dict[str, list[float]]


class Counted:
    """A loop, with the bytes that leave the hosts."""

    def __init__(self, loop: PlainLoop | ShoalLoop, world: World):
        self._loop, self._world = loop, world
        self.num_bytes: list[float] = []

    def chunk(self) -> float:
        before = self._sent()
        seconds = self._loop.chunk()
        self.num_bytes.append((self._sent() - before) / CHUNK)
        return seconds

    def _sent(self) -> float:
        """By all hosts so far; each asks its own interface."""
        own = psutil.net_io_counters(pernic=True)[os.environ["GLOO_SOCKET_IFNAME"]]
        counted = own.bytes_sent if self._world.rank_of_node == 0 else 0
        total = torch.tensor([float(counted)], dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()


def measure_arms(world: World, length: str) -> Found:
    """Every rank must call it."""
    run, quick = replace(recipe(), steps=1 << 30), length == "quick"
    with ExitStack() as stack:
        stack.enter_context(harness.quiet())

        def ddp() -> PlainLoop:
            model = DistributedDataParallel(run.make_model(), gradient_as_bucket_view=True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=dp.RATE, fused=True)
            return PlainLoop(run, model, optimizer, Share(world.rank, NUM_RANKS), CHUNK)

        def shoal(words: str) -> ShoalLoop:
            return ShoalLoop(run, f"data={NUM_RANKS} {words}", world, stack, CHUNK)

        made: dict[str, PlainLoop | ShoalLoop] = {
            "ddp": ddp(),
            "exact": shoal("sums=exact"),
            "ring": shoal("sums=ring"),
            "zero=2": shoal("zero=2"),
            "again": ddp(),
        }
        arms = {name: Counted(loop, world) for name, loop in made.items()}
        chunks = {name: arm.chunk for name, arm in arms.items()}
        seconds = harness.interleave(chunks, 5 if quick else 15, num_warm_up=2)
        loops.check_alike({name: loop.mean_loss() for name, loop in made.items()})
        return Found(seconds, {name: arm.num_bytes[2:] for name, arm in arms.items()})


def encrypted_s(hosts: Sequence[Host]) -> float:
    """Seconds of a step, of a run whose messages between hosts are encrypted."""

    def command(folder: Path) -> list[str]:
        ssh = write_ssh(folder / "ssh", {"b": hosts[1]})
        words = commands.shoal("train", f"{__file__}:recipe", "--plan", ENCRYPTED)
        words += ["--on", "hosts:localhost,b", "--listen", hosts[0].address]
        words += ["--slots", str(RANKS_OF_HOST), "--run-dir", str(folder / "run")]
        return ["ip", "netns", "exec", hosts[0].namespace, "env", f"SHOAL_SSH={ssh}", *words]

    with commands.running(command) as watched:
        with suppress(subprocess.TimeoutExpired):
            watched.process.wait(commands.PATIENCE_S * 2)
        record = watched.folder / "run" / "metrics.jsonl"
        lines = record.read_bytes().splitlines() if record.exists() else []
        ends = [float(line["time"]) for line in map(msgspec.json.decode, lines)]
        if len(ends) < ENCRYPTED_STEPS:
            raise harness.ArmFailed(f"The encrypted arm ended early:\n{watched.said()}")
    return harness.spread([b - a for a, b in pairwise(ends[2:])]).median


def measure(quick: bool) -> Iterator[Row]:
    try:
        with several_hosts(NUM_HOSTS) as hosts:
            throttle(hosts, MEGABITS)
            words = "quick" if quick else "full"
            found = ranks.start_by_torchrun(hosts, RANKS_OF_HOST, "hosts", Found, words)
            encrypted = encrypted_s(hosts)
    except NoNamespaces as why:
        yield Row(name="hosts-dp", floor=1.0, note=f"needs network namespaces: {why}")
        return
    for sums in ("exact", "ring"):
        yield _dp_row(found, sums, encrypted)
    for arm in ("exact", "ring", "zero=2"):
        yield _bytes_row(found, arm)


def _dp_row(found: Found, sums: str, encrypted: float) -> Row:
    against = harness.spread(harness.ratios(found.seconds["ddp"], found.seconds[sums]))
    control = harness.ratios(found.seconds["again"], found.seconds["ddp"])
    own, ddp = (harness.spread(found.seconds[arm]).median for arm in (sums, "ddp"))
    return Row(
        name=f"hosts-dp/{sums}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=1.0,
        noise=harness.noise_of(control),
        peer=f"DDP {ddp * 1e3:,.0f} ms",
        ceiling=f"the link {_link_s(found) * 1e3:,.0f} ms",
        control=harness.spread(control).median,
        note=f"Shoal {own * 1e3:,.0f} ms; encrypted, by servers, {encrypted * 1e3:,.0f} ms",
    )


def _link_s(found: Found) -> float:
    """What the link alone takes for what Shoal sends."""
    sent = harness.spread(found.num_bytes["exact"]).median / NUM_HOSTS
    return sent * 8 / (MEGABITS * 1e6)


def _bytes_row(found: Found, arm: str) -> Row:
    against = harness.spread(harness.ratios(found.num_bytes[arm], found.num_bytes["ddp"]))
    own, ddp = (harness.spread(found.num_bytes[one]).median for one in (arm, "ddp"))
    return Row(
        name=f"hosts-bytes/{arm}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=BYTES_FLOOR,
        at_most=True,
        peer=f"DDP {ddp / 1e6:.1f} MB",
        ceiling="2/3 by arithmetic",
        note=f"Shoal {own / 1e6:.1f} MB a step, of all hosts",
    )


if __name__ == "__main__":
    if ranks.is_rank():
        ranks.serve(measure_arms)
    else:
        harness.main(measure)
