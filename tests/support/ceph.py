"""A real Ceph (16, Debian's) for tests: a monitor, one OSD, the S3 gateway, and CephFS if wanted.

    with start_ceph() as ceph:             # ceph.gateway is a Server: stop it, start it again
        ...                                # S3_KEY and S3_SECRET of `store_servers` are its user's
    with start_ceph(filesystem=True) as ceph, ceph.mounted() as path:
        ...                                # a CephFS through ceph-fuse

All listens on loopback and keeps its objects in memory. Where a program is missing the test is
skipped with what to install; where there is no /dev/fuse, or no right to mount, what wants a mount
is. Cost: some 20 s until S3 answers, 500 MB.
"""

import json
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import servers
from tests.support.servers import Server
from tests.support.store_servers import S3_KEY, S3_SECRET, START_S

_WAY_OUT = "ceph-mon ceph-osd ceph-mds radosgw ceph-common ceph-fuse"


class Ceph(NamedTuple):
    """A cluster under way."""

    directory: Path
    gateway: Server

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        """The file system, as a path."""
        program = servers._program("ceph-fuse", _WAY_OUT)
        path = self.directory / "mounted"
        path.mkdir()
        command = [program, "-f", "--conf", str(self.directory / "ceph.conf"), str(path)]
        client = _WithoutPort(lambda _: command, "", self.directory / "fuse.out")
        client.start()
        assert client._process is not None
        deadline = time.monotonic() + START_S
        while not path.is_mount() and time.monotonic() < deadline:
            if client._process.poll() is not None:
                said = client.log.read_text(errors="replace").strip().splitlines()[-1:]
                pytest.skip(f"CephFS cannot be mounted here: {' '.join(said)}")
            time.sleep(0.1)
        try:
            yield path
        finally:
            words = ["fusermount", "-u", "-z"] if shutil.which("fusermount") else ["umount", "-l"]
            subprocess.run([*words, str(path)], check=False, capture_output=True)
            client.stop()


@contextmanager
def start_ceph(filesystem: bool = False) -> Iterator[Ceph]:
    names = ("ceph-mon", "ceph-osd", "ceph-mds", "radosgw", "radosgw-admin", "ceph-authtool")
    for name in names:
        servers._program(name, _WAY_OUT)
    with servers._directory("ceph") as directory, ExitStack() as held:
        for folder in ("mon.a", "osd.0", "mds.a", "log", "run"):
            (directory / folder).mkdir()
        patched = held.enter_context(pytest.MonkeyPatch.context())  # another may run already
        patched.setenv("CEPH_ARGS", f"--conf {directory}/ceph.conf")
        held.enter_context(servers._running(_server("mon", directory, _monitor(directory))))
        _wait("the monitor", lambda: _ask("ceph", "-s") is not None)
        _ask("ceph", "osd", "new", str(uuid.uuid4()))
        osd = _server("osd", directory, lambda port: _osd(directory, port))
        held.enter_context(servers._running(osd))
        _wait("the OSD", lambda: "1 up" in (_ask("ceph", "osd", "stat") or ""))

        def rgw(port: int) -> list[str]:
            where = f"[client.rgw]\nrgw frontends = beast endpoint=127.0.0.1:{port}\n"
            with open(directory / "ceph.conf", "a", encoding="utf-8") as file:
                file.write(where)
            return ["radosgw", "-n", "client.rgw", "-f"]

        gateway = _server("rgw", directory, rgw, url="http://127.0.0.1:{port}")
        held.enter_context(servers._running(gateway))
        user = ["--uid=shoal", "--display-name=shoal"]
        keys = [f"--access-key={S3_KEY}", f"--secret={S3_SECRET}"]
        assert _ask("radosgw-admin", "user", "create", *user, *keys), "no user of S3"
        if filesystem:
            for pool in ("meta", "data"):
                _ask("ceph", "osd", "pool", "create", pool, "4")
            _ask("ceph", "fs", "new", "cephfs", "meta", "data")
            mds = _server("mds", directory, lambda port: ["ceph-mds", "-i", "a", "-f"], port=False)
            held.enter_context(servers._running(mds))
            _wait("the MDS", lambda: "up:active" in (_ask("ceph", "mds", "stat") or ""))
        yield Ceph(directory, gateway)


class _WithoutPort(Server):
    """One that is asked through others whether it answers."""

    def _answers(self) -> bool:
        return True


def _server(
    name: str,
    directory: Path,
    command: Callable[[int], list[str]],
    url: str = "",
    port: bool = True,
) -> Server:
    kind = Server if port else _WithoutPort
    return kind(command, url, directory / f"{name}.out", limit_s=START_S)


def _monitor(directory: Path) -> Callable[[int], list[str]]:
    def command(port: int) -> list[str]:
        fsid, other, first = uuid.uuid4(), servers._free_port(), servers._free_port()
        where = f"[v2:127.0.0.1:{port},v1:127.0.0.1:{other}]"
        (directory / "ceph.conf").write_text(_settings(directory, str(fsid), where, first))
        keys = directory / "keyring"
        of_osd = ["mon", "allow profile osd", "osd", "allow *"]
        everything = ["mon", "allow *", "osd", "allow *", "mds", "allow *", "mgr", "allow *"]
        caps = {
            "mon.": ["mon", "allow *"],
            "client.admin": everything,
            "client.rgw": ["mon", "allow rwx", "osd", "allow rwx"],
            "mds.a": everything,
            "osd.0": of_osd,
        }
        for name, granted in caps.items():
            pairs = [w for pair in zip(granted[::2], granted[1::2]) for w in ("--cap", *pair)]
            create = [] if keys.exists() else ["--create-keyring"]
            _must("ceph-authtool", *create, str(keys), "--gen-key", "-n", name, *pairs)
        plan, address = str(directory / "monmap"), ("--addv", "a", where)
        _must("monmaptool", "--create", "--clobber", "--fsid", str(fsid), *address, plan)
        _must("ceph-mon", "-i", "a", "--mkfs", "--monmap", plan, "--keyring", str(keys))
        return ["ceph-mon", "-i", "a", "-f"]

    return command


def _osd(directory: Path, port: int) -> list[str]:
    ports = ["--ms-bind-port-min", str(port), "--ms-bind-port-max", str(port + 200)]
    identity = json.loads(_ask("ceph", "osd", "dump", "-f", "json") or "{}")["osds"][0]["uuid"]
    _must("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
    return ["ceph-osd", "-i", "0", "-f", *ports]


def _settings(directory: Path, fsid: str, monitor: str, first_port: int) -> str:
    settings = {
        "fsid": fsid,
        "mon initial members": "a",
        "mon host": monitor,
        "public addr": "127.0.0.1",
        "cluster addr": "127.0.0.1",
        "ms bind ipv6": "false",
        "ms bind port min": first_port,
        "ms bind port max": first_port + 200,
        **{f"auth {kind} required": "cephx" for kind in ("cluster", "service", "client")},
        "auth allow insecure global id reclaim": "false",
        "keyring": directory / "keyring",
        "admin socket": f"{directory}/run/$name.asok",
        "pid file": f"{directory}/run/$name.pid",
        "log file": f"{directory}/log/$name.log",
        "run dir": directory / "run",
        "crash dir": directory / "run",
        "mon data": f"{directory}/mon.a",
        "osd data": f"{directory}/osd.0",
        "mds data": f"{directory}/mds.a",
        "mon allow pool size one": "true",
        "mon warn on pool no redundancy": "false",
        "mon data avail warn": 1,
        "mon data avail crit": 1,
        "mon max pg per osd": 1000,
        "osd pool default size": 1,
        "osd pool default min size": 1,
        "osd pool default pg num": 4,
        "osd pool default pgp num": 4,
        "osd pool default pg autoscale mode": "off",
        "osd crush chooseleaf type": 0,
        "osd objectstore": "memstore",
        "memstore device bytes": 4 << 30,
        "osd class update on start": "false",
    }
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    return f"[global]\n{lines}"


def _must(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, timeout=START_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{words[0]} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")


def _ask(*words: str) -> str | None:
    """What a command says; None if it fails, or takes too long."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout.decode(errors="replace")


def _wait(what: str, answers: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not answers():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} of Ceph does not answer after {START_S:g} s")
        time.sleep(0.2)
