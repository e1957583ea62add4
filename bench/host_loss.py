"""From the death of one of three hosts to the next step of those that are left, against torchrun.

Hosts are network namespaces on a switch (`tests/support/hosts.py`), with a rank each; all processes
of the third are killed at once. Shoal goes on with two replicas, in the processes that are left,
from the step they are at; torchrun's elastic agents (`--nnodes=2:3`) start the script anew, which
saves and loads nothing, so that its figure leaves out the steps that it lost. Both notice a silent
host after two seconds, and torchrun's rendezvous waits as short as its options allow.

Seen from outside: the killer notes the time, ranks note their steps (`bench/job.py`), and the first
step after a pause is the next one. The ceiling is the limit for silence, before which no host is
given up. Needs root, for the namespaces.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from bench import commands, harness
from bench.commands import JOB, Step, Watched
from bench.harness import Row
from tests.support.hosts import Host, NoNamespaces, several_hosts, write_ssh

NUM_HOSTS = 3
STEPS_BEFORE = 100  # of every rank, before the kill
SILENT_S = 2.0
PAUSE_S = 0.5  # without a step: a group that has lost a host
PORT = 29400
FLOOR = 2.0


def shoal_on(hosts: Sequence[Host], folder: Path) -> list[str]:
    ssh = write_ssh(folder / "ssh", {"b": hosts[1], "c": hosts[2]})
    words = commands.shoal_train(NUM_HOSTS, folder / "run", 1_000_000)
    words += ["--on", "hosts:localhost,b,c", "--listen", hosts[0].address, "--trust-network"]
    words += ["--slots", "1", "--heartbeat-timeout", str(SILENT_S)]
    return ["ip", "netns", "exec", hosts[0].namespace, "env", f"SHOAL_SSH={ssh}", *words]


def torchrun_on(hosts: Sequence[Host], folder: Path) -> list[str]:
    """An agent on each host, all of which this shell waits for."""
    keeps = f"last_call_timeout=1,keep_alive_interval={SILENT_S / 2:g},keep_alive_max_attempt=2"
    lines = [
        f"ip netns exec {host.namespace} env GLOO_SOCKET_IFNAME={host.interface} {sys.executable} "
        f"-m torch.distributed.run --nnodes=2:{NUM_HOSTS} --nproc-per-node=1 --max-restarts=3 "
        f"--rdzv-backend=c10d --rdzv-endpoint={hosts[0].address}:{PORT} --rdzv-id=bench "
        f"--rdzv-conf={keeps},is_host={int(host is hosts[0])} "
        f"--local-addr={host.address} --monitor-interval=0.01 {JOB} &"
        for host in hosts
    ]
    return ["sh", "-c", "\n".join([*lines, "wait"])]


def recover(watched: Watched, hosts: Sequence[Host]) -> float:
    """Kill the last host; seconds to the next step of the others."""

    def settled(steps: list[Step]) -> float | None:
        return 0.0 if len(steps) >= NUM_HOSTS * STEPS_BEFORE else None

    def resumed(steps: list[Step]) -> float | None:
        times = [killed, *sorted(step.time for step in steps if step.time > killed)]
        return next((b for a, b in pairwise(times) if b - a > PAUSE_S), None)

    watched.wait_for("training was under way", settled)
    killed = time.monotonic()
    hosts[-1].signal(signal.SIGKILL)
    return watched.wait_for("the others had made a step", resumed) - killed


class HostKills:
    """One arm: fresh hosts and a fresh job each time."""

    def __init__(self, command: Callable[[Sequence[Host], Path], list[str]]):
        self.command = command
        self.num_again: list[int] = []  # steps, each time, where events tell of them

    def __call__(self) -> float:
        with (
            several_hosts(NUM_HOSTS) as hosts,
            commands.running(lambda folder: self.command(hosts, folder)) as watched,
        ):
            seconds = recover(watched, hosts)
            record = watched.folder / "run" / "events.jsonl"
            if record.exists():
                self.num_again.append(steps_again(record.read_bytes()))
        return seconds


def steps_again(record: bytes) -> int:
    """How many steps that were made before the loss are made once more."""
    told = [msgspec.json.decode(line) for line in record.splitlines() if line.endswith(b"}")]
    at = {event["event"]: event["step"] for event in told if "step" in event}
    return max(0, at["host-lost"] - at["recovered"])


def measure(quick: bool) -> Iterator[Row]:
    try:
        with several_hosts(1):
            pass
    except NoNamespaces as why:
        yield Row(name="host-loss", floor=FLOOR, note=f"needs network namespaces: {why}")
        return
    arms = {
        "torchrun": HostKills(torchrun_on),
        "shoal": HostKills(shoal_on),
        "again": HostKills(torchrun_on),
    }
    seconds = harness.interleave(arms, 2 if quick else 5, num_warm_up=0)
    against = harness.spread(harness.ratios(seconds["torchrun"], seconds["shoal"]))
    own, peer = (harness.spread(seconds[arm]) for arm in ("shoal", "torchrun"))
    lost = max(arms["shoal"].num_again)
    yield Row(
        name="host-loss",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOOR,
        peer=f"torchrun {peer.median:.2f} s",
        ceiling=f"silence {SILENT_S:g} s",
        control=harness.spread(harness.ratios(seconds["again"], seconds["torchrun"])).median,
        note=f"Shoal {own.median:.2f} s [{own.low:.2f} .. {own.high:.2f}], steps lost {lost}",
    )


if __name__ == "__main__":
    harness.main(measure)
