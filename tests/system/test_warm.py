"""The warm process: commands through it behave as commands of their own, and none outlives it."""

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.faults import events
from tests.support.leaks import is_alive, wait_until

SHOAL = str(Path(sys.executable).with_name("shoal"))
TINY = str(Path(__file__).with_name("tiny.py"))
LIMIT_S = 40.0


class Warm:
    """A runtime directory of its own, so that a user's warm process is never touched."""

    def __init__(self, directory: Path):
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory)}

    def shoal(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [SHOAL, *words],
            env=self.environment | options.pop("variables", {}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            **options,
        )

    def start(self, *words: str, **options: Any) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [SHOAL, *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def pid(self) -> int:
        (address,) = (Path(self.environment["XDG_RUNTIME_DIR"]) / "shoal").glob("*.sock")
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if str(address).encode() in words and is_alive(int(entry.parent.name)):
                return int(entry.parent.name)
        raise AssertionError("the warm process is not running")


def started(directory: Path) -> Iterator[Warm]:
    """A warm process, ended by its own stop or else by a signal."""
    made = Warm(directory)
    assert made.shoal("warm", "status").stdout == "cold\n"
    start = made.shoal("warm", "start")
    assert start.stdout == "warm\n", start.stderr
    pid = made.pid()
    try:
        yield made
        expected = "stopped\n" if is_alive(pid) else "there was none\n"
        assert made.shoal("warm", "stop").stdout == expected
        assert all_ended([pid])
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGTERM)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    # A short name: a socket's address has 108 bytes.
    yield from started(tmp_path_factory.mktemp("w"))


@pytest.fixture
def own_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    yield from started(tmp_path_factory.mktemp("w"))


def await_seats(run_dir: Path) -> list[int]:
    """The processes of a run's ranks, once its group has formed."""
    assert wait_until(lambda: bool(events(run_dir, "formed")), LIMIT_S), "no group formed"
    return [event["pid"] for event in events(run_dir, "seat")]


def all_ended(pids: list[int]) -> bool:
    return wait_until(lambda: not any(map(is_alive, pids)), 10.0)


def test_status_and_a_second_start(warm: Warm) -> None:
    assert warm.shoal("warm", "status").stdout == "warm\n"
    assert warm.shoal("warm", "start").stdout == "it was warm already\n"


def test_a_command_has_the_callers_directory_environment_and_terminal(
    warm: Warm, tmp_path: Path
) -> None:
    words = ("train", f"{TINY}:line", "--plan", "data=2", "--run-dir", "mine", "--json")
    done = warm.shoal(*words, cwd=tmp_path, variables={"GREETING": "hello"})
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert result["steps"] == 8 and result["run_dir"] == "mine"
    assert "done: 8 steps" in done.stderr
    assert (tmp_path / "mine" / "model.safetensors").exists()
    told = (tmp_path / "mine" / "logs" / "recipe.log").read_text()
    assert f"greeting hello in {tmp_path}" in told


@pytest.mark.full
def test_the_bits_are_those_of_a_cold_command(warm: Warm, tmp_path: Path) -> None:
    words = ("train", f"{TINY}:line", "--plan", "data=2", "--run-dir")
    cold = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    subprocess.run([SHOAL, *words, "cold"], cwd=tmp_path, env=cold, check=True, timeout=LIMIT_S)
    assert warm.shoal(*words, "warm", cwd=tmp_path).returncode == 0
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cold", "warm")]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("train", f"{TINY}:fails"), 1, "a key of the recipe's own"),
        (("train", f"{TINY}:absent"), 2, "has no recipe 'absent'"),
        (("train",), 2, "Missing argument"),
        (("verify", f"{TINY}:line", "--plan", "data=2", "--steps", "2"), 0, "bit for bit"),
    ],
)
def test_exit_codes_come_through(
    warm: Warm, tmp_path: Path, words: Any, code: int, told: str
) -> None:
    done = warm.shoal(*words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert told in done.stderr


@pytest.mark.quick("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on(warm: Warm, tmp_path: Path, number: int) -> None:
    words = ("train", f"{TINY}:line", "--plan", "data=2", "--run-dir", "r", "--set", "pause=0.3")
    command = warm.start(*words, cwd=tmp_path)
    pids = await_seats(tmp_path / "r")
    command.send_signal(number)
    _, errors = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 75, errors
    assert "as asked" in errors
    assert all_ended(pids)


def test_killing_the_caller_ends_its_ranks(warm: Warm, tmp_path: Path) -> None:
    words = ("train", f"{TINY}:line", "--plan", "data=2", "--run-dir", "r", "--set", "pause=1")
    command = warm.start(*words, cwd=tmp_path)
    pids = await_seats(tmp_path / "r")
    command.kill()
    command.communicate(timeout=LIMIT_S)
    assert all_ended(pids), "ranks outlived their caller"
    assert warm.shoal("warm", "status").stdout == "warm\n"


def test_what_a_command_writes_follows_its_callers_umask(warm: Warm, tmp_path: Path) -> None:
    """And not that of who started the warm process; its socket and log are for its owner."""
    words = ("train", f"{TINY}:line", "--plan", "data=1", "--run-dir", "r", "--set", "steps=2")
    assert warm.shoal(*words, cwd=tmp_path, umask=0o027).returncode == 0
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "r").rglob("*.json*")}
    assert modes == {0o640}
    place = Path(warm.environment["XDG_RUNTIME_DIR"]) / "shoal"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in place.iterdir()} == {0o600}


@pytest.mark.parametrize(
    ("closed", "code", "told"),
    [
        pytest.param("0<&-", 2, "no recipe file", marks=pytest.mark.full),  # in a cold command
        (">&-", 2, "Standard output is closed"),
        ("2>&-", 2, ""),
    ],
)
def test_a_closed_stream_is_no_traceback(
    warm: Warm, tmp_path: Path, closed: str, code: int, told: str
) -> None:
    """Nor does the socket to the warm process take its place."""
    words = ["bash", "-c", f'"$0" train none.py:line {closed}', SHOAL]
    done = subprocess.run(
        words, env=warm.environment, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == code and told in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


# A locale whose names are not in UTF-8, as Python takes the C locale if it is told to.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.full
def test_any_locale_may_start_it_and_come_to_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    made = Warm(tmp_path_factory.mktemp("w"))
    assert made.shoal("warm", "start", variables=ASCII).stdout == "warm\n"
    pid = made.pid()
    try:
        told = [
            made.shoal("train", "n\u00e4he.py:line", variables=variables)
            for variables in ({}, ASCII, {"PYTHONIOENCODING": "ascii"})
        ]
        for done in told:
            assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        assert "no recipe file n\u00e4he.py" in told[0].stderr
        assert "cannot be written in UTF-8" in told[1].stderr
    finally:
        made.shoal("warm", "stop")
        assert all_ended([pid])


def test_nonsense_does_not_end_it(warm: Warm) -> None:
    (address,) = (Path(warm.environment["XDG_RUNTIME_DIR"]) / "shoal").glob("*.sock")
    with open(os.devnull, "rb") as nothing:
        for content in (b"[" * 50_000, b"\xff", b"{}", b'{"environment": 3}', b"null"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
                line.settimeout(LIMIT_S)
                line.connect(str(address))
                head = len(content).to_bytes(8, "big")
                socket.send_fds(line, [head], [nothing.fileno()] * 3)
                line.sendall(content)
                assert line.recv(100) == b""
    assert warm.shoal("warm", "status").stdout == "warm\n"


def test_two_commands_at_once(warm: Warm, tmp_path: Path) -> None:
    commands = [
        warm.start("train", f"{TINY}:line", "--plan", "data=2", "--run-dir", name, cwd=tmp_path)
        for name in ("one", "two")
    ]
    for command in commands:
        _, errors = command.communicate(timeout=LIMIT_S)
        assert command.returncode == 0, errors
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert models[0] == models[1]


@pytest.mark.full
def test_killing_the_warm_process_ends_its_commands(own_warm: Warm, tmp_path: Path) -> None:
    words = ("train", f"{TINY}:line", "--plan", "data=2", "--run-dir", "r", "--set", "pause=1")
    command = own_warm.start(*words, cwd=tmp_path)
    pids = await_seats(tmp_path / "r")
    os.kill(own_warm.pid(), signal.SIGKILL)
    _, errors = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 1
    assert "the warm process ended under this command" in errors
    assert all_ended(pids), "ranks outlived the warm process"
    assert own_warm.shoal("warm", "status").stdout == "cold\n"
    done = own_warm.shoal("train", cwd=tmp_path)
    assert "Missing argument" in done.stderr, "a dead warm process must not be in the way"


@pytest.mark.full
def test_it_leaves_when_idle(tmp_path_factory: pytest.TempPathFactory) -> None:
    idle = Warm(tmp_path_factory.mktemp("w"))
    idle.shoal("warm", "start", "--idle-minutes", "0.02")
    assert all_ended([idle.pid()])
    assert idle.shoal("warm", "status").stdout == "cold\n"
    assert not list((Path(idle.environment["XDG_RUNTIME_DIR"]) / "shoal").glob("*.sock"))


def test_other_code_listens_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that holds older code is not asked."""
    from shoal.cluster import warm as server

    package = tmp_path / "shoal"
    (package / "cluster").mkdir(parents=True)
    module = package / "cluster" / "warm.py"
    module.write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(server, "__file__", str(module))
    first = server.socket_path()
    assert first == server.socket_path()
    later = time.time() + 10
    os.utime(module, (later, later))
    assert server.socket_path() != first
