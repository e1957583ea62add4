"""The scripts of a job's pods, run as processes of this machine: no cluster is there.

Pod 0 and the others are started as their manifest says, with the secret as a file. The name of pod
0 is that of this machine, and its port a free one.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from shoal.cluster import kubernetes_manifests, on_kubernetes
from shoal.cluster.engine import JobRequest
from shoal.cluster.kubernetes_manifests import manifests, parse_options
from shoal.cluster.on_kubernetes import new_invitation
from tests.support.slurm import free_ports

TINY = Path(__file__).parents[1] / "faults" / "tiny.py"
LIMIT_S = 120.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


class Pods:
    """What the pods of a job run."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch):
        self.volume, self.log = directory / "volume", directory / "log"
        self.volume.mkdir()
        (port,) = free_ports(1)
        secret = directory / "invitation"
        secret.write_bytes(new_invitation(f"localhost:{port}").encode())
        monkeypatch.setattr(kubernetes_manifests, "PORT", port)
        monkeypatch.setattr(kubernetes_manifests, "SECRET_AT", str(directory))
        monkeypatch.setattr(kubernetes_manifests, "first_address", lambda *of: "localhost")
        options = parse_options(f"image=i,claim=c,mount={self.volume},python={sys.executable}")
        words = ["--plan", "data=2", "--spares", "0", "--set", "pause=0.1", "--listen", "127.0.0.1"]
        request = JobRequest(
            name="tiny",
            arguments=(
                f"{TINY}:mlp",
                *words,
                "--on",
                "kubernetes",
                "--run-dir",
                "/a/r",
                "--resume",
            ),
            directory=str(directory),
            run_dir="/a/r",
            num_hosts=2,
        )
        _, job = manifests(request, "tiny", options)
        self.command = job["spec"]["template"]["spec"]["containers"][0]["command"]
        self.environment = os.environ | {on_kubernetes.FILE_VARIABLE: str(secret)}

    @contextmanager
    def started(self, index: int) -> Iterator[subprocess.Popen[bytes]]:
        environment = self.environment | {"JOB_COMPLETION_INDEX": str(index)}
        with self.log.open("ab") as log:
            pod = subprocess.Popen(
                self.command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield pod
        finally:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
            pod.wait()

    def num_steps(self) -> int:
        metrics = self.volume / "r" / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pods:
    return Pods(tmp_path, monkeypatch)


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_is_preempted_has_all_save_and_come_again(pods: Pods, index: int) -> None:
    """Each of them gets SIGTERM, as from Kubernetes; all exit with 75, and are started again."""
    with ExitStack() as held:
        both = [held.enter_context(pods.started(number)) for number in (1, 0)][::-1]
        deadline = time.monotonic() + LIMIT_S
        while pods.num_steps() < 5:
            assert time.monotonic() < deadline and both[0].poll() is None, pods.log.read_text()
            time.sleep(0.05)
        both[index].terminate()
        assert [pod.wait(LIMIT_S) for pod in both] == [75, 75], pods.log.read_text()
    made = pods.num_steps()
    assert 5 <= made < 60
    with ExitStack() as held:
        both = [held.enter_context(pods.started(number)) for number in (0, 1)]
        assert [pod.wait(LIMIT_S) for pod in both] == [0, 0], pods.log.read_text()
    assert pods.num_steps() == 60
