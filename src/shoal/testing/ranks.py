"""A pool of warm ranks for tests: real processes and real Gloo, without a start-up for each test.

`Pool` forks four ranks once, from a warm process, and keeps them for the whole test run.
`pool.run` calls a function on some of them under a fresh group and returns what each rank
returned; a rank that died or hung is replaced, and of a hang the stacks of all ranks are shown.
`pool.start` runs a command in a fork of the same warm process, which saves it the import of
torch.

Functions go by name (module and qualified name), values as msgpack with tensors as bytes: nothing
is pickled, so a function must be importable and must not be a closure. Not for benches: four
ranks on fewer cores measure nothing. Cost of a call: about 20 ms for the group.
"""

import faulthandler
import importlib
import os
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.comm.mesh import Axes, Mesh
from shoal.comm.rendezvous import form_group, join_store, leave_group, serve_store, wait_for_ranks
from shoal.system.fork_server import (
    ForkServer,
    ForkServerReady,
    WorkerExited,
    WorkerMain,
    WorkerSpec,
    WorkerStarted,
)
from shoal.system.processes import describe_exit
from shoal.world import World

NUM_RANKS = 4
LIMIT_S = 50.0  # below the limit of a test, so that the stacks are seen first
GRACE_S = 5.0  # for the others, once one rank has failed
_TENSOR = 1


class RankError(AssertionError):
    """A function failed on a rank, or the rank died or hung; the message holds its traceback."""


class _Call(msgspec.Struct, frozen=True):
    function: str
    rank: int
    num_ranks: int
    group: str
    store_port: int
    arguments: msgspec.Raw


class _CallResult(msgspec.Struct, frozen=True):
    value: msgspec.Raw
    trace: str = ""
    is_echo: bool = False  # the group broke under it: another rank failed first


def pack(value: Any) -> bytes:
    """Plain data and tensors as msgpack."""
    return msgspec.msgpack.encode(value, enc_hook=_pack_tensor)


def unpack(content: bytes | msgspec.Raw) -> Any:
    return msgspec.msgpack.decode(content, ext_hook=_unpack_tensor)


def importable_name(function: Callable[..., Any]) -> str:
    """The name under which another process finds a function of a module."""
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name:
        raise TypeError(f"{name} has no importable name. Use a function of a module.")
    return name


def import_function(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


class Command(NamedTuple):
    """A command under way in a fork of the warm process."""

    pool: "Pool"
    number: int
    pid: int

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """Its exit code, or minus the signal that ended it."""
        return self.pool._await_exit(self.number, timeout_s)

    def is_running(self) -> bool:
        return not self.pool._has_exited(self.number)

    def send_signal(self, number: int) -> None:
        self.pool._fork_server.kill(self.number, number)


class Pool:
    """Make it before this process starts a thread; use it in a `with` block.

    `warm_up` is called in the warm process: what it imports, no rank and no command need import.
    """

    def __init__(
        self,
        directory: Path,
        num_ranks: int = NUM_RANKS,
        warm_up: Callable[[], object] = lambda: None,
    ):
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._address = f"\0shoal-pool-{secrets.token_hex(16)}"
        self._key = secrets.token_hex(16)
        self._fork_server = ForkServer(partial(_prepare, warm_up), directory / "fork-server.log")
        self._next_number = 0
        self._num_calls = 0
        self._exits: dict[int, int] = {}
        self._listener = Listener(self._address, "AF_UNIX", authkey=self._key.encode())
        report = self._fork_server.next_report()
        if not isinstance(report, ForkServerReady):
            raise RuntimeError(f"The warm process could not be made: {report}")
        self._store, self._store_port = serve_store()
        self._ranks: list[tuple[int, Connection]] = []
        self._num_ranks = num_ranks

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error: object) -> None:
        for _number, line in self._ranks:
            line.close()
        self._listener.close()
        self._fork_server.close()

    def pids(self) -> set[int]:
        """The processes that stay for the whole test run."""
        known = {self._fork_server.pids.get(number) for number, _ in self._ranks}
        return {self._fork_server.pid, *(pid for pid in known if pid is not None)}

    def run(
        self,
        function: Callable[..., Any],
        num_ranks: int,
        *arguments: Any,
        limit_s: float = LIMIT_S,
    ) -> list[Any]:
        """Call `function(mesh, *arguments)` on ranks 0 to num_ranks-1 and return their results."""
        self._num_ranks = max(self._num_ranks, num_ranks)
        self._fill()
        self._num_calls += 1
        packed = msgspec.Raw(pack(list(arguments)))
        lines: dict[Connection, int] = {}
        for rank, (_, line) in enumerate(self._ranks[:num_ranks]):
            call = _Call(
                importable_name(function),
                rank,
                num_ranks,
                f"call/{self._num_calls}",
                self._store_port,
                packed,
            )
            line.send_bytes(msgspec.msgpack.encode(call))
            lines[line] = rank
        results: dict[int, _CallResult] = {}
        try:
            self._collect(lines, results, limit_s)
        finally:
            for rank in set(range(num_ranks)) - results.keys():
                self._kill_rank(rank)
            self._ranks = [(number, line) for number, line in self._ranks if not line.closed]
        _raise_first(results, num_ranks)
        return [unpack(results[rank].value) for rank in range(num_ranks)]

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        output: Path,
        errors: Path,
        directory: Path,
    ) -> Command:
        """Call a function in a process of its own, and exit with what it returns or exits with."""
        variables = {
            "function": importable_name(function),
            "arguments": msgspec.json.encode(list(arguments)).decode(),
            "environment": msgspec.json.encode(dict(environment or {})).decode(),
            "output": str(output.resolve()),
            "errors": str(errors.resolve()),
            "directory": str(directory.resolve()),
        }
        number, pid = self._spawn(variables, self._directory / "commands.log")
        return Command(self, number, pid)

    def _collect(
        self, lines: dict[Connection, int], results: dict[int, _CallResult], limit_s: float
    ) -> None:
        deadline = time.monotonic() + limit_s
        waiting = dict(lines)
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if any(result.trace for result in results.values()):
                    return  # the others wait for one that failed
                raise RankError(self._describe_hang(sorted(waiting.values()), limit_s))
            for line in ready:
                assert isinstance(line, Connection)
                rank = waiting.pop(line)
                results[rank] = self._read(line, rank)
                if results[rank].trace:
                    deadline = min(deadline, time.monotonic() + GRACE_S)

    def _read(self, line: Connection, rank: int) -> _CallResult:
        try:
            return msgspec.msgpack.decode(line.recv_bytes(), type=_CallResult)
        except (EOFError, ConnectionError):
            status = self._await_exit(self._ranks[rank][0], GRACE_S)
            line.close()
            return _CallResult(msgspec.Raw(pack(None)), f"rank {rank} {describe_exit(status)}")

    def _describe_hang(self, ranks: Sequence[int], limit_s: float) -> str:
        """Let all ranks write their stacks into their logs, and return them."""
        logs = {rank: self._log(self._ranks[rank][0]) for rank in ranks}
        before = {rank: log.stat().st_size for rank, log in logs.items()}
        for rank in ranks:
            self._fork_server.kill(self._ranks[rank][0], signal.SIGUSR1)
        time.sleep(1.0)
        stacks = [
            f"rank {rank}:\n{logs[rank].read_bytes()[before[rank] :].decode(errors='replace')}"
            for rank in ranks
        ]
        named = ", ".join(map(str, ranks))
        return f"rank {named} did not answer within {limit_s:g} s.\n" + "\n".join(stacks)

    def _kill_rank(self, rank: int) -> None:
        number, line = self._ranks[rank]
        if not line.closed:
            self._fork_server.kill(number)
            self._await_exit(number, GRACE_S)
            line.close()

    def _fill(self) -> None:
        """Start ranks until all are running; one that died between calls is replaced too."""
        self._read_reports(0)
        for number, line in self._ranks:
            if number in self._exits:
                line.close()
        self._ranks = [(number, line) for number, line in self._ranks if not line.closed]
        while len(self._ranks) < self._num_ranks:
            variables = {"address": self._address, "key": self._key}
            number, _ = self._spawn(variables, self._log(self._next_number))
            self._ranks.append((number, self._listener.accept()))

    def _log(self, number: int) -> Path:
        return self._directory / f"rank-{number:03d}.log"

    def _spawn(self, variables: dict[str, str], log: Path) -> tuple[int, int]:
        number = self._next_number
        self._next_number += 1
        self._fork_server.spawn(WorkerSpec(number, str(log), variables))
        while number not in self._fork_server.pids and number not in self._exits:
            self._read_reports(GRACE_S)
        return number, self._fork_server.pids.get(number, -1)

    def _read_reports(self, timeout_s: float) -> None:
        """Read the reports of the fork server."""
        while (report := self._fork_server.next_report(timeout_s)) is not None:
            if isinstance(report, WorkerExited):
                self._exits[report.number] = report.status
            assert isinstance(report, WorkerStarted | WorkerExited)
            timeout_s = 0

    def _has_exited(self, number: int) -> bool:
        self._read_reports(0)
        return number in self._exits

    def _await_exit(self, number: int, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while number not in self._exits:
            left = deadline - time.monotonic()
            if left < 0:
                raise TimeoutError(f"process {number} has not ended within {timeout_s:g} s")
            self._read_reports(left)
        return self._exits[number]


def _raise_first(results: Mapping[int, _CallResult], num_ranks: int) -> None:
    """Raise for the rank that failed by itself rather than for one that lost its peer."""
    failed = [rank for rank, result in sorted(results.items()) if result.trace]
    if not failed:
        return
    own = [rank for rank in failed if not results[rank].is_echo] or failed
    traces = "\n".join(f"rank {rank}: {results[rank].trace}" for rank in own)
    silent = sorted(set(range(num_ranks)) - results.keys())
    also = f"\nrank {', '.join(map(str, silent))} waited for it and was ended" if silent else ""
    raise RankError(traces + also)


def _prepare(warm_up: Callable[[], object]) -> tuple[dict[str, Any], WorkerMain]:
    """In the warm process."""
    # A test runner's capture has replaced these streams.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (kept for good)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.disable()  # the runner's would write to where the runner's output goes
    torch.set_num_threads(1)
    importlib.import_module("torch.distributed.tensor")
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports hundreds of modules
    warm_up()
    return {}, _worker_main


def _worker_main(spec: WorkerSpec) -> int:
    if "function" in spec.variables:
        return _run_command(spec.variables)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with Client(spec.variables["address"], "AF_UNIX", spec.variables["key"].encode()) as line:
        while True:
            try:
                content = line.recv_bytes()
            except EOFError:
                return 0
            line.send_bytes(msgspec.msgpack.encode(_run_call(content)))


def _run_call(content: bytes) -> _CallResult:
    call = msgspec.msgpack.decode(content, type=_Call)
    torch.manual_seed(0)
    try:
        value = _call_in_group(call)
        return _CallResult(msgspec.Raw(pack(value)))
    except Exception as error:  # noqa: BLE001 (whatever a test raises goes to the test)
        trace = traceback.format_exc()
        broken = type(error).__name__ == "GroupLost" or "onnection" in str(error)
        return _CallResult(msgspec.Raw(pack(None)), trace, is_echo=broken)


def _call_in_group(call: _Call) -> Any:
    function, arguments = import_function(call.function), unpack(call.arguments)
    if call.num_ranks == 1:
        return function(Mesh.form(Group(), Axes(), "cpu"), *arguments)
    world = World(call.rank, call.num_ranks, call.rank, call.num_ranks, "shoal.testing")
    store = join_store("127.0.0.1", call.store_port, timeout_s=10.0)
    form_group(store, call.group, world, timedelta(seconds=10))
    # A call may end at once, and Gloo gives up a mesh in which a peer that is ready hangs up early.
    wait_for_ranks(store, f"{call.group}/formed", world, timeout_s=10.0)
    try:
        return function(Mesh.form(Group(dist.group.WORLD), Axes(), "cpu"), *arguments)
    finally:
        leave_group()


def _run_command(variables: Mapping[str, str]) -> int:
    for path, descriptor in ((variables["output"], 1), (variables["errors"], 2)):
        with open(path, "ab", buffering=0) as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(variables["directory"])
    os.environ.update(msgspec.json.decode(variables["environment"], type=dict[str, str]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    result = import_function(variables["function"])(*msgspec.json.decode(variables["arguments"]))
    with suppress(OSError):
        sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _pack_tensor(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} cannot be sent: use plain data and tensors")
    value = value.detach().contiguous()
    content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    name = str(value.dtype).removeprefix("torch.")
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((name, tuple(value.shape), content)))


def _unpack_tensor(code: int, content: memoryview) -> Tensor:
    assert code == _TENSOR, f"unknown kind {code}"
    name, shape, payload = msgspec.msgpack.decode(content, type=tuple[str, tuple[int, ...], bytes])
    dtype: torch.dtype = getattr(torch, name)
    if not payload:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(dtype).view(shape)
