"""Start host agents through the user's own ssh: `--on hosts:a,b,c`.

Each host runs one command, and reads the invitation from its standard input, so no key is on a
command line. ssh's own configuration decides about users, ports, keys and jumps; BatchMode keeps it
from asking. `localhost` and this machine's own name mean this machine. SHOAL_SSH names another
command than `ssh`, called as `COMMAND HOST PYTHON -P -m shoal agent`.

Read next: `agent_starter.py`, for what a starter promises.
"""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from shoal.cluster.agent_starter import AGENT_COMMAND
from shoal.errors import UsageError
from shoal.system.processes import describe_exit

COMMAND = "SHOAL_SSH"
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-T")
END_S = 2.0  # for an ssh to end by itself, once its agent knows that the run is over
TAIL_BYTES = 2000  # of what an agent printed
NOT_CONNECTED = 255  # ssh's exit code for its own failures
NOT_FOUND = 127  # the shell's, for a command that is not there


class _SshAgent(NamedTuple):
    host: str
    process: "subprocess.Popen[bytes]"
    output: IO[bytes]

    def last_words(self) -> str:
        """What it printed last, as one line."""
        size = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, size - TAIL_BYTES))
        lines = self.output.read().decode(errors="replace").strip().splitlines()
        return " ".join(line.strip() for line in lines[-3:])


class SshStarter:
    """Agents on named hosts, each through an ssh of its own."""

    def __init__(self, hosts: Sequence[str], python: str | None = None):
        self._others = [host for host in hosts if not is_this_machine(host)]
        self.num_hosts, self.is_host = len(hosts), len(self._others) < len(hosts)
        self._python = python or sys.executable
        self._agents: list[_SshAgent] = []
        self._next = 0  # of the hosts, whose agent is started next

    @property
    def peer(self) -> str:
        """Another host, towards which this machine listens."""
        host = self._others[0].rpartition("@")[2]
        return _host_name_of(host)

    def start(self, invitation: bytes, count: int) -> None:
        for _ in range(count):
            running = {agent.host for agent in self._agents}
            # In turn, those without an agent first: a host that was lost may be back.
            order = self._others[self._next :] + self._others[: self._next]
            host = min(order, key=lambda name: name in running)
            self._next = (self._others.index(host) + 1) % len(self._others)
            self._start(host, invitation)

    def _start(self, host: str, invitation: bytes) -> None:
        ssh = shlex.split(os.environ.get(COMMAND, "")) or ["ssh", *OPTIONS]
        words = [*ssh, host, shlex.join([self._python, *AGENT_COMMAND])]
        output = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the agent)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the run to handle
            )
        except OSError as error:
            output.close()
            raise UsageError(
                f"Cannot run {ssh[0]}, which starts agents on other hosts: {error.strerror}. "
                f"Install it, or name another command in {COMMAND}."
            ) from error
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `poll` says why
            process.stdin.write(invitation)
            process.stdin.close()
        self._agents.append(_SshAgent(host, process, output))

    def poll(self) -> list[str]:
        ended = [agent for agent in self._agents if agent.process.poll() is not None]
        self._agents = [agent for agent in self._agents if agent not in ended]
        told = [_why_ended(agent, self._python) for agent in ended]
        for agent in ended:
            agent.output.close()
        return told

    def close(self) -> None:
        """The agents have been told that the run is over, or find out by its silence."""
        for agent in self._agents:
            try:
                agent.process.wait(END_S)
            except subprocess.TimeoutExpired:
                agent.process.kill()
                agent.process.wait()
            agent.output.close()
        self._agents = []


def _why_ended(agent: _SshAgent, python: str) -> str:
    code, said = agent.process.returncode, agent.last_words()
    began = f"{agent.host}: "
    if code == NOT_CONNECTED:
        return f"{began}ssh cannot connect: {said or 'it gave no reason'}. Try `ssh {agent.host}`."
    if code == NOT_FOUND or "No such file or directory" in said:
        return (
            f"{began}there is no {python} ({said}). --python PATH names the Python of the other "
            "hosts that has Shoal installed."
        )
    if "No module named shoal" in said or "No module named 'shoal'" in said:
        return (
            f"{began}{python} has no Shoal. Install it there, or name another Python with "
            "--python PATH."
        )
    return f"{began}the agent {describe_exit(code)}: {said or 'it printed nothing'}"


def read_hosts(text: str) -> list[str]:
    """The names in `a,b,c`; UsageError if one is missing, given twice, or no name."""
    names = [name.strip() for name in text.split(",")]
    if not text.strip() or not all(names):
        raise UsageError("--on hosts: name the hosts, as in hosts:localhost,b,c.")
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--on hosts:{text}: {name} is named twice.")
        if name.startswith("-") or any(c.isspace() for c in name):
            raise UsageError(f"--on hosts:{text}: {name!r} is not the name of a host.")
    if sum(map(is_this_machine, names)) > 1:
        raise UsageError(f"--on hosts:{text}: this machine is named twice.")
    if all(map(is_this_machine, names)):
        raise UsageError(f"--on hosts:{text} names this machine alone. Leave --on out.")
    return names


def is_this_machine(host: str) -> bool:
    own = socket.gethostname()
    return host in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0])


def _host_name_of(host: str) -> str:
    """The name behind an alias of ssh's configuration."""
    if os.environ.get(COMMAND):
        return host
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(["ssh", "-G", host], capture_output=True, timeout=10.0, check=True)
        for line in told.stdout.decode(errors="replace").splitlines():
            if line.startswith("hostname "):
                return line.partition(" ")[2].strip()
    return host
