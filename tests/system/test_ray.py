"""`--on ray` against a real Ray cluster, whose nodes are processes in a namespace of their own."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest

from shoal.cluster.ray_jobs import RayEngine
from shoal.testing.engines import EngineConformance
from shoal.testing.ranks import Pool
from tests.support.leaks import wait_until
from tests.support.ray_cluster import CLIENTS, DASHBOARD, RayCluster, end_command, start_ray

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
RECIPE = f"{Path(__file__).with_name('tiny.py')}:line"
LIMIT_S = 150.0
SLOW_CLIENT = "Starting Ray client server failed"  # Ray's own limit, on a busy machine
_NET = 0x40000000  # CLONE_NEWNET
_clusters: list[RayCluster] = []


@pytest.fixture(scope="session")
def kept_processes(pools: list[Pool]) -> Callable[[], frozenset[int]]:
    """Ray starts and ends workers as it likes."""

    def kept() -> frozenset[int]:
        own = frozenset(pid for pool in pools for pid in pool.pids())
        return own.union(*(cluster.processes() for cluster in _clusters))

    return kept


@contextmanager
def known(num_cpus: list[int], **environment: str) -> Iterator[RayCluster]:
    with start_ray(num_cpus, environment) as cluster:
        _clusters.append(cluster)
        try:
            yield cluster
        finally:
            _clusters.remove(cluster)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with known([2, 2, 2]) as found:
        yield found


@pytest.fixture(autouse=True)
def no_agents_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Nothing of Shoal runs in the cluster after a test."""
    yield
    left: list[str] = []

    def is_clean() -> bool:
        left[:] = [line for cluster in _clusters for line in shoals(cluster)]
        return not left

    assert wait_until(is_clean, 20.0, 0.2), left


def shoals(cluster: RayCluster) -> list[str]:
    """The command lines of Shoal's processes, among them forks, which keep that of their parent."""
    found = []
    for pid in cluster.processes():
        try:
            words = psutil.Process(pid).cmdline()
        except psutil.Error:
            continue
        if "shoal" in words or "shoal.cluster.ray_process" in words:
            found.append(" ".join(words))
    return found


def words(run_dir: Path, plan: str, *options: str, **settings: object) -> list[str]:
    chosen = {"batch_size": 12, "steps": 8} | settings
    sets = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
    return ["train", RECIPE, "--plan", plan, "--run-dir", str(run_dir), *options, *sets]


def bits(run_dir: Path) -> bytes:
    return (run_dir / "model.safetensors").read_bytes()


def num_steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def hosts_of(run_dir: Path) -> set[int]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    events = [msgspec.json.decode(line) for line in lines]
    return {e["host"] for e in events if e["event"] == "seat" and e.get("rank") is not None}


@pytest.mark.parametrize(
    ("plan", "on", "num_hosts"),
    [
        ("data=3", "ray:spread", 3),
        ("data=4", "ray", 2),
        ("data=2 tensor=2", f"ray://127.0.0.1:{CLIENTS},hosts=2", 2),
    ],
)
def test_the_bits_are_those_of_one_process(
    cluster: RayCluster, tmp_path: Path, plan: str, on: str, num_hosts: int
) -> None:
    given = words(tmp_path / "run", f"{plan} pieces=12", "--on", on)
    done = cluster.run(*given, directory=tmp_path)
    if SLOW_CLIENT in done.stderr:
        done = cluster.run(*given, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(hosts_of(tmp_path / "run")) == num_hosts
    assert "ray" not in done.stdout.replace(str(tmp_path), "").lower()
    if "tensor" not in plan:
        alone = cluster.run(*words(tmp_path / "one", "data=1 pieces=12"), directory=tmp_path)
        assert alone.returncode == 0, alone.stderr
        assert bits(tmp_path / "run") == bits(tmp_path / "one")


def test_a_node_is_lost_and_another_comes(cluster: RayCluster, tmp_path: Path) -> None:
    """The run shrinks and goes on, and grows on the node that Ray gives; the bits are the same."""
    node = cluster.add(1)
    run_dir, plan = tmp_path / "run", "data=4 pieces=12"
    settings = {"steps": 400, "pause": 0.02}
    # More than the other nodes have, so that one host is on the new node.
    options = ("--on", "ray:spread,hosts=4,cpus=1")
    command = cluster.start(
        *words(run_dir, plan, *options, **settings), directory=tmp_path, output=tmp_path / "out"
    )
    try:
        assert wait_until(lambda: num_steps(run_dir) > 10, LIMIT_S), (tmp_path / "out").read_text()
        cluster.remove(node)
        assert wait_until(lambda: "go on: data 4 -> 3" in (tmp_path / "out").read_text(), LIMIT_S)
        assert command.wait(LIMIT_S) == 0, (tmp_path / "out").read_text()
    finally:
        end_command(command)
    told = (tmp_path / "out").read_text()
    assert "came, after step" in told, told
    alone = cluster.run(
        *words(tmp_path / "one", "data=1 pieces=12", **settings), directory=tmp_path
    )
    assert alone.returncode == 0, alone.stderr
    assert bits(run_dir) == bits(tmp_path / "one")
    assert num_steps(run_dir) == 400


def test_too_few_resources_say_what_is_there(cluster: RayCluster, tmp_path: Path) -> None:
    options = ("--on", "ray:hosts=2,cpus=7", "--join-timeout", "12")
    done = cluster.run(*words(tmp_path / "run", "data=4", *options), directory=tmp_path)
    assert done.returncode == 1
    assert "2 hosts with 7 CPUs each wait for room. Free CPUs of 3 nodes: 127.0.0.1 2 of 2" in (
        done.stderr
    )
    assert "--join-timeout" in done.stderr
    assert not (tmp_path / "run").exists()


def test_no_cluster_there(cluster: RayCluster, tmp_path: Path) -> None:
    done = cluster.run(
        *words(tmp_path / "run", "data=2", "--on", "ray:127.0.0.1:777"), directory=tmp_path
    )
    assert done.returncode == 2
    assert "nothing answers at 127.0.0.1:777" in done.stderr and "ray start --head" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_command_that_is_killed_leaves_no_agents(cluster: RayCluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    given = words(run_dir, "data=2", "--on", "ray:hosts=2", steps=100000, pause=0.01)
    command = cluster.start(*given, directory=tmp_path, output=tmp_path / "out")
    assert wait_until(lambda: num_steps(run_dir) > 2, LIMIT_S), (tmp_path / "out").read_text()
    end_command(command)  # the fixture sees that nothing is left


def test_verbs(cluster: RayCluster, tmp_path: Path) -> None:
    """Submit, status, logs and stop; then the same directory again, which goes on."""
    (tmp_path / "tiny.py").write_bytes(Path(RECIPE.rpartition(":")[0]).read_bytes())
    run_dir, on = tmp_path / "run", f"ray:spread,hosts=2,http://127.0.0.1:{DASHBOARD}"

    def shoal(*given: str) -> "subprocess.CompletedProcess[str]":
        done = cluster.run(*given, directory=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def submit(steps: int) -> str:
        given = ["tiny.py:line", "--plan", "data=2", "--on", on, "--run-dir", str(run_dir)]
        sets = ["--set", f"steps={steps}", "--set", "pause=0.02"]
        told = msgspec.json.decode(shoal("submit", *given, *sets, "--json").stdout.splitlines()[-1])
        assert told["state"] in ("queued", "running") and told["run_dir"] == str(run_dir)
        return str(told["job"])

    def status() -> dict[str, object]:
        found: dict[str, object] = msgspec.json.decode(
            shoal("status", str(run_dir), "--json").stdout.splitlines()[-1]
        )
        return found

    job = submit(100000)
    assert wait_until(lambda: num_steps(run_dir) > 2, LIMIT_S)
    found = status()
    assert found["state"] == "running" and found["job"] == job
    assert "step" in shoal("logs", job).stdout
    twice = cluster.run(
        "submit", "tiny.py:line", "--on", on, "--run-dir", str(run_dir), directory=tmp_path
    )
    assert twice.returncode == 2 and "Two jobs cannot share" in twice.stderr
    assert job in shoal("queue", "--on", on).stdout
    stopped = msgspec.json.decode(shoal("stop", job, "--json").stdout.splitlines()[-1])
    assert stopped["state"] == "stopped" and stopped["checkpoint"]
    assert status()["exit_code"] == 75
    made = num_steps(run_dir)
    again = submit(made + 2)
    assert wait_until(lambda: status()["state"] in ("done", "failed"), LIMIT_S, 0.5)
    assert status()["state"] == "done", shoal("logs", again).stdout
    assert num_steps(run_dir) == made + 2
    assert len(hosts_of(run_dir)) == 2


def test_a_token_is_honoured(tmp_path: Path) -> None:
    token = "of-no-worth-" * 4
    with known([2], RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token) as guarded:
        given = words(tmp_path / "run", "data=2", "--on", "ray:hosts=1")
        done = guarded.run(*given, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        wrong = {"RAY_AUTH_TOKEN": "another-token-of-no-worth"}
        given = words(tmp_path / "two", "data=2", "--on", "ray:hosts=1")
        refused = guarded.run(*given, directory=tmp_path, environment=wrong)
        assert refused.returncode == 2, refused.stdout + refused.stderr
        assert "RAY_AUTH_TOKEN_PATH" in refused.stderr
        logs = "".join(path.read_text() for path in (tmp_path / "run").rglob("*.log"))
        assert token not in logs + done.stdout + done.stderr


class TestEngine(EngineConformance):
    """In the network of the cluster: the engine speaks to its dashboard alone."""

    recipe = RECIPE
    limit_s = LIMIT_S
    unknown = "shoal-999"

    @pytest.fixture
    def engine(self, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayEngine]:
        for name, value in (("RAY_BACKEND_LOG_LEVEL", "error"), ("RAY_CLIENT_MODE", "0")):
            monkeypatch.setenv(name, value)  # as Ray, or the engine, sets it
        with inside(cluster):
            yield RayEngine(f"http://127.0.0.1:{DASHBOARD}")


@contextmanager
def inside(cluster: RayCluster) -> Iterator[None]:
    """This thread in the cluster's network."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"/proc/{cluster._first}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert libc.setns(there, _NET) == 0, os.strerror(ctypes.get_errno())
        yield
    finally:
        assert libc.setns(own, _NET) == 0
        os.close(own)
        os.close(there)
