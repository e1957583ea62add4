"""A real Ray cluster of several nodes on one machine, in a namespace of network and processes.

    with start_ray([2, 2]) as cluster:                 # two nodes that offer two CPUs each
        done = cluster.run("train", "recipe.py:make", "--on", "ray")
        cluster.remove(1)                              # as if the machine had died
        cluster.add(2)

In the namespace Ray finds 127.0.0.1 by itself, its ports are its own, and all that it starts ends
with the namespace's first process. Commands that are to see the cluster run inside, through
`nsenter`. Needs root, `unshare`, `nsenter` and ray; else the test is skipped with a reason. Cost:
about ten seconds for the first node and four for each other one, so share it among the tests of
a module.
"""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.leaks import descendants

START_S = 180.0  # on a busy machine
ATTEMPTS = 3  # a node of Ray that has not started after 30 s gives up
PORT, DASHBOARD, CLIENTS = 6390, 8266, 10001  # not from 10002 to 19999, which are Ray's workers'
STORE_BYTES = 80 << 20
ROOT = Path(__file__).parents[2]


class RayCluster:
    """A cluster under way, whose first node is number 0."""

    def __init__(self, process: "subprocess.Popen[str]", first: int, environment: dict[str, str]):
        self._process, self._first, self.environment = process, first, environment

    def remove(self, node: int) -> None:
        """Kill a node's processes, as if its machine had died."""
        self._order(f"remove {node}")

    def add(self, num_cpus: int) -> int:
        """The number of another node."""
        return int(self._order(f"add {num_cpus}"))

    def processes(self) -> frozenset[int]:
        """All of the namespace, by their numbers outside."""
        return frozenset({self._process.pid, *descendants(self._process.pid)})

    def enter(self, directory: Path) -> list[str]:
        """What a command begins with that runs inside, with `environment`."""
        target = ["nsenter", "--target", str(self._first), "--net", "--pid", "--mount"]
        return [*target, f"--wd={directory}"]

    def start(
        self,
        *words: str,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        output: Path | None = None,
    ) -> "subprocess.Popen[str]":
        """A command of Shoal inside; `output` gets what it prints, else it can be read here."""
        stream = subprocess.PIPE if output is None else output.open("w")
        try:
            return subprocess.Popen(
                [*self.enter(directory), sys.executable, "-m", "shoal", *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.PIPE if output is None else subprocess.STDOUT,
                text=True,
                env=self.environment | dict(environment or {}),
            )
        finally:
            if output is not None and not isinstance(stream, int):
                stream.close()

    def run(
        self,
        *words: str,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 150.0,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of Shoal inside to its end."""
        command = self.start(*words, directory=directory, environment=environment)
        try:
            out, errors = command.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            end_command(command)
            out, errors = command.communicate()
            raise AssertionError(f"{words} took {timeout_s:g} s:\n{out}\n{errors}") from None
        return subprocess.CompletedProcess(words, command.returncode, out, errors)

    def _order(self, words: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("done "):
                return line.removeprefix("done ").strip()
        raise RuntimeError("Ray's cluster has ended")


@contextmanager
def start_ray(
    num_cpus: Sequence[int], environment: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """A cluster with a node for each number of CPUs; `environment` is added to that of all."""
    _require()
    for attempt in range(ATTEMPTS):
        home = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))  # paths of sockets are short
        process, variables = _start_process(num_cpus, home, environment or {})
        try:
            cluster = RayCluster(process, 0, variables)
            try:
                cluster._answer()
            except RuntimeError:
                if attempt < ATTEMPTS - 1:
                    continue
                said = (home / "log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"Ray did not start:\n{said}") from None
            yield RayCluster(process, _children(process.pid)[0], variables)
            return
        finally:
            process.kill()  # and with it the namespace
            process.communicate()
            shutil.rmtree(home, ignore_errors=True)


def _start_process(
    num_cpus: Sequence[int], home: Path, environment: Mapping[str, str]
) -> "tuple[subprocess.Popen[str], dict[str, str]]":
    variables = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        "HOME": str(home),
        "RAY_AUTH_MODE": "disabled",
        "RAY_ADDRESS": f"127.0.0.1:{PORT}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(home / "r"),
        "TMPDIR": str(home),
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    (home / "r").mkdir()
    unshare = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            [*unshare, sys.executable, "-m", "tests.support.ray_cluster", *map(str, num_cpus)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env=variables,
        )
    return process, variables


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _require() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed (`make test-full` does it, or the extra shoal-ml[ray])")
    if os.getuid() != 0 or shutil.which("unshare") is None or shutil.which("nsenter") is None:
        pytest.skip("a namespace of its own needs root, unshare and nsenter (util-linux)")


def _main(num_cpus: list[int]) -> None:
    """The nodes are children of this process, which takes orders from standard input."""
    orders, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to standard output
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    del os.environ["RAY_ADDRESS"]
    from ray.cluster_utils import Cluster

    common = {"object_store_memory": STORE_BYTES}
    head = {"num_cpus": num_cpus[0], "include_dashboard": True, "dashboard_port": DASHBOARD}
    head |= {"gcs_server_port": PORT, "dashboard_host": "127.0.0.1", **common}
    head |= {"ray_client_server_port": CLIENTS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.head_node]
    nodes += [cluster.add_node(wait=False, num_cpus=count, **common) for count in num_cpus[1:]]
    cluster.wait_for_nodes(timeout=START_S)
    print("done 0", file=answers, flush=True)
    for line in orders:
        verb, number = line.split()
        if verb == "add":
            nodes.append(cluster.add_node(num_cpus=int(number), **common))
            print(f"done {len(nodes) - 1}", file=answers, flush=True)
        else:
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
            print(f"done {number}", file=answers, flush=True)


def end_command(command: "subprocess.Popen[str]") -> None:
    """Kill what was started inside, and `nsenter`, which waits for it."""
    for pid in _children(command.pid) if command.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.kill()
    command.wait()


def _reap_others() -> None:
    """Go on in a child. The first process of a namespace gets the orphans, and must reap them."""
    if child := os.fork():
        while (ended := os.wait()[0]) != child:
            pass
        sys.exit(ended != child)


if __name__ == "__main__":
    _reap_others()
    _main([int(word) for word in sys.argv[1:]])
