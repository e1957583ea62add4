"""Real servers for tests: Redis, memcached and PostgreSQL, each started for a test and stopped.

    with start_redis() as server:
        client = redis.Redis.from_url(server.url)
        server.stop()      # as if the machine had died; `server.start()` brings it back

Each listens on a free port of loopback, keeps its files in a directory of its own that is removed,
and dies with the process that started it. Where the program is not installed the test is skipped,
and the reason says what to install. Cost: Redis and memcached some 30 ms, PostgreSQL about two
seconds, so share that one among the tests of a module.

Linux only. Not for benches that compare servers: nothing is tuned. PostgreSQL refuses to run as
root; then it runs as the user postgres.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.leaks import descendants

LIMIT_S = 30.0  # for a server to answer, or to end
PASSWORD = "of-no-worth"  # of PostgreSQL's only user, on loopback, for the life of a test
_USER = "shoal"
_PERIOD_S = 0.01
_READY, _READY_POSTGRES = "Ready to accept connections", "ready to accept connections"
_LIKELY = Path("/usr/lib/postgresql")  # Debian keeps PostgreSQL's programs out of the path


class Server:
    """A server under way at `127.0.0.1:port`; `url` is what its clients take."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        url: str,
        log: Path,
        ready: str = "",
        end: signal.Signals = signal.SIGKILL,
        limit_s: float = LIMIT_S,
    ):
        self.port = _free_port()
        self.url = url.format(port=self.port)
        self.log = log
        self._command = command(self.port)
        self._limit_s = limit_s  # for it to answer
        self._ready, self._end = ready.encode(), end  # what it writes once it answers; its signal
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def start(self) -> None:
        """Start it, on the same port as before, and wait until it answers.

        It dies with the thread that calls this, so call it from one that stays.
        """
        name = self._end.name.removeprefix("SIG")
        setpriv = _program("setpriv", "util-linux")
        with self.log.open("ab") as log:
            self._start_of_log = log.tell()
            self._process = subprocess.Popen(
                [setpriv, "--pdeathsig", name, *self._command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )
        deadline = time.monotonic() + self._limit_s
        while not self._answers():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.stop()
                said = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self._command[0]} did not start:\n{said}")
            time.sleep(_PERIOD_S)

    def stop(self) -> None:
        """End it at once; connections break. Does nothing to one that is not running."""
        if self._process is not None:
            self.resume()
            below = descendants(self._process.pid)
            self._process.send_signal(self._end)
            try:
                self._process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for pid in below & descendants():  # children that it left behind
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process = None

    def pause(self) -> None:
        """Let it take connections and answer nothing, as a machine that hangs."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        """To its children too, which answer in its place in PostgreSQL."""
        assert self._process is not None, "the server is not running"
        if self._process.poll() is None:
            for pid in (self._process.pid, *descendants(self._process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _answers(self) -> bool:
        if self._ready not in self.log.read_bytes()[self._start_of_log :]:
            return False
        with suppress(OSError), socket.create_connection(self.address, timeout=1.0):
            return True
        return False


@contextmanager
def start_redis(password: str | None = None, *options: str) -> Iterator[Server]:
    """A Redis without persistence; `options` go to its command line."""
    program = _program("redis-server", "redis-server")
    secret = ["--requirepass", password] if password else []
    user = f":{password}@" if password else ""

    def command(port: int) -> list[str]:
        where = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory)]
        return [program, *where, "--save", "", "--appendonly", "no", *secret, *options]

    with _directory("redis") as directory:
        server = Server(command, f"redis://{user}127.0.0.1:{{port}}/0", directory / "log", _READY)
        with _running(server):
            yield server


@contextmanager
def start_memcached(*options: str) -> Iterator[Server]:
    """A memcached of 64 MB; its `url` is host:port."""
    program = _program("memcached", "memcached")
    user = ["-u", "nobody"] if os.getuid() == 0 else []

    def command(port: int) -> list[str]:
        return [program, "-l", "127.0.0.1", "-p", str(port), "-U", "0", "-m", "64", *user, *options]

    with _directory("memcached") as directory:
        server = Server(command, "127.0.0.1:{port}", directory / "log")
        with _running(server):
            yield server


@contextmanager
def start_postgres() -> Iterator[Server]:
    """A PostgreSQL with one user, who needs the password that its `url` carries."""
    initdb, postgres = (_program(name, "postgresql", _LIKELY) for name in ("initdb", "postgres"))
    with _directory("postgres", open_to_others=True) as directory:
        files, secret = directory / "data", directory / "password"
        secret.write_text(PASSWORD)
        owner: list[str] = []
        if os.getuid() == 0:
            owner = [_program("runuser", "util-linux"), "-u", "postgres", "--"]
            shutil.chown(directory, "postgres")
            shutil.chown(secret, "postgres")
        words = ["-D", str(files), "-U", _USER, "-A", "scram-sha-256", "--pwfile", str(secret)]
        words += ["--no-sync", "--no-locale", "-E", "UTF8"]
        done = subprocess.run([*owner, initdb, *words], capture_output=True, cwd="/", check=False)
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stderr.decode(errors='replace')}")

        def command(port: int) -> list[str]:
            settings = {
                "listen_addresses": "127.0.0.1",
                "unix_socket_directories": "",
                "fsync": "off",
                "autovacuum": "off",  # its workers come and go, and would look like leaks
                "dynamic_shared_memory_type": "mmap",  # inside the directory
            }
            words = [word for pair in settings.items() for word in ("-c", "=".join(pair))]
            return [*_as_postgres(), postgres, "-D", str(files), "-p", str(port), *words]

        url = f"postgresql://{_USER}:{PASSWORD}@127.0.0.1:{{port}}/postgres"
        # QUIT is its own word for "at once"; KILL would leave its children.
        server = Server(command, url, directory / "log", _READY_POSTGRES, signal.SIGQUIT)
        with _running(server):
            yield server


def _as_postgres() -> list[str]:
    """Options of setpriv; a change of user by any other way forgets whose death to die with."""
    if os.getuid() != 0:
        return []
    return ["--reuid", "postgres", "--regid", "postgres", "--init-groups"]


@contextmanager
def _running(server: Server) -> Iterator[None]:
    server.start()
    try:
        yield
    finally:
        server.stop()


@contextmanager
def _directory(name: str, open_to_others: bool = False) -> Iterator[Path]:
    """A directory that is removed; one that other users are to reach lies where they can."""
    places = [tempfile.gettempdir(), "/tmp", "/var/tmp"] if open_to_others else [None]
    place = next(path for path in places if path is None or _reachable(Path(path)))
    directory = Path(tempfile.mkdtemp(prefix=f"shoal-{name}-", dir=place))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _reachable(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in (path, *path.parents))


def _program(name: str, package: str, folder: Path | None = None) -> str:
    """Where a program is; skips the test where it is not."""
    found = shutil.which(name)
    if found is None and folder is not None:
        found = next((str(path) for path in sorted(folder.glob(f"*/bin/{name}"))), None)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt install {package})")
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


@contextmanager
def start_mlflow() -> Iterator[Server]:
    """An MLflow server with a database of its own, from the environment that `make` gives it."""
    program = Path(__file__).parents[2] / ".venv-mlflow" / "bin" / "mlflow"
    if not program.exists():
        pytest.skip("mlflow is not installed (make .venv-mlflow/.ready)")
    with _directory("mlflow") as directory:

        def command(port: int) -> list[str]:
            words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
            words += ["--backend-store-uri", f"sqlite:///{directory}/runs.db"]
            words += ["--artifacts-destination", str(directory / "files")]
            return ["env", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false", str(program), *words]

        url, ready = "http://127.0.0.1:{port}", "Application startup complete"
        server = Server(command, url, directory / "log", ready, limit_s=120.0)
        with _running(server):
            yield server


@contextmanager
def start_prometheus(scraped: int) -> Iterator[Server]:
    """A Prometheus that scrapes a port of loopback each second."""
    program = _program("prometheus", "prometheus")
    with _directory("prometheus") as directory:
        (directory / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s}\n"
            "scrape_configs:\n- job_name: shoal\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{scraped}']}}]\n"
        )

        def command(port: int) -> list[str]:
            words = [f"--config.file={directory}/prometheus.yml"]
            words += [f"--storage.tsdb.path={directory}/data"]
            return [program, *words, f"--web.listen-address=127.0.0.1:{port}"]

        url, ready = "http://127.0.0.1:{port}", "Server is ready to receive web requests"
        server = Server(command, url, directory / "log", ready)
        with _running(server):
            yield server
