"""The back ends of one machine and of several hosts keep what back ends promise."""

import os
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from shoal.cluster.agent_starter import JoinByHand
from shoal.cluster.backend import Backend, StartedRun
from shoal.cluster.host_agent import AgentOptions, serve_run
from shoal.cluster.hosts import HostsBackend
from shoal.cluster.invitation import read_invitation
from shoal.cluster.local import LocalBackend
from shoal.cluster.ssh import SshStarter
from shoal.errors import UsageError
from shoal.events.events import Event, HostsMissingEvent, OnEvent
from shoal.launch.backends import BACKENDS, make_backend, refuse_without_hosts
from shoal.launch.train import Options
from shoal.system.fork_server import ForkServer, Prepare
from shoal.testing.backends import BackendConformance
from shoal.testing.ranks import Command, Pool
from shoal.training.options import Recipe, StartOptions


class TestLocal(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return LocalBackend()

    def lose(self, started: StartedRun) -> None:
        assert isinstance(started.processes, ForkServer) and started.num_hosts == 1
        os.kill(started.processes.pid, signal.SIGKILL)


class JoinedHosts:
    """The back end of several hosts, which another process joins over loopback as soon as it is
    invited."""

    def __init__(self, pool: Pool, directory: Path):
        self._pool, self._directory = pool, directory
        self.agents: list[Command] = []
        self._backend = HostsBackend(
            starter=JoinByHand(2),
            address="127.0.0.1",
            timeout_s=30.0,
            heartbeat_timeout_s=1.5,
            recipe="",
            settings={},
            options=StartOptions(),
        )

    def start(
        self, prepare: Prepare, run_dir: Path, watch: OnEvent
    ) -> AbstractContextManager[StartedRun]:
        return self._start(prepare, run_dir, watch)

    @contextmanager
    def _start(self, prepare: Prepare, run_dir: Path, watch: OnEvent) -> Iterator[StartedRun]:
        def join(event: Event) -> None:
            watch(event)
            if isinstance(event, HostsMissingEvent) and not self.agents:
                files = {name: self._directory / f"join.{name}" for name in ("output", "errors")}
                self.agents.append(
                    self._pool.start(
                        serve_host,
                        str(run_dir),
                        environment={},
                        directory=self._directory,
                        **files,
                    )
                )

        with self._backend.start(prepare, run_dir, join) as started:
            yield started


def serve_host(run_dir: str) -> int:
    """The agent of another host, as `shoal join` runs it."""
    options = AgentOptions(lambda here: TestHosts().prepare(), lambda text: None, "127.0.0.1")
    return serve_run(read_invitation(Path(run_dir)), options).exit_code


class TestHosts(BackendConformance):
    """All processes are on the host that joins."""

    plan, host = "data=2 sync=server", 1

    @pytest.fixture
    def backend(self, pool: Pool, tmp_path: Path) -> Iterator[Backend]:
        self.joined = JoinedHosts(pool, tmp_path)
        yield self.joined
        for agent in self.joined.agents:
            agent.wait()

    def lose(self, started: StartedRun) -> None:
        assert started.num_hosts == 2
        os.kill(self.joined.agents[0].pid, signal.SIGKILL)


def made(on: str, **options: Any) -> Backend:
    return make_backend(Recipe.named("mine.py:small", {}), Options(on=on, **options))


def test_a_back_end_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made("local"), LocalBackend)
    joined = made("local", listen="127.0.0.1", nodes=3)
    assert isinstance(joined, HostsBackend) and joined.starter.num_hosts == 3
    spread = made("hosts:localhost,b", nodes=2)
    assert isinstance(spread, HostsBackend) and isinstance(spread.starter, SshStarter)
    with pytest.raises(UsageError, match="names 2 hosts, and --nodes says 3"):
        made("hosts:localhost,b", nodes=3)
    with pytest.raises(UsageError, match=r"no such back end\. Did you mean 'local'\?"):
        made("locl")
    with pytest.raises(UsageError, match="takes no address"):
        made("local:here")
    found: list[str] = []
    monkeypatch.setitem(
        BACKENDS, "mine", lambda address, *given: found.append(address) or LocalBackend()
    )
    assert isinstance(made("mine://a:1"), LocalBackend) and found == ["//a:1"]


def test_an_interface_that_there_is_not_or_elsewhere_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before anything is made."""
    loopback = psutil.net_if_addrs()["lo"]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": loopback, "eth7": []})
    for name, options, why in [
        ("eth8", Options(), "no interface of that name.*eth7, lo"),
        ("eth8", Options(listen="127.0.0.1", nodes=2), "no interface of that name"),
        ("eth7", Options(listen="127.0.0.1", nodes=2), "at lo, and GLOO_SOCKET_IFNAME names eth7"),
    ]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        with pytest.raises(UsageError, match=why):
            refuse_without_hosts(options)
    refuse_without_hosts(Options())
