"""A real Slurm for tests: a slurmctld and several slurmd on this machine, on loopback.

    with start_slurm() as slurm:
        monkeypatch.setenv("SLURM_CONF", slurm.conf)
        slurm.run("sbatch", "--wrap", "hostname")
        slurm.lose("n2")     # as if the machine had died; `slurm.bring_back("n2")` starts it again

Two partitions: `main`, and `urgent`, whose jobs preempt those of `main` after GRACE_S. A job that
is requeued waits REQUEUE_S seconds, where Slurm's own default is 120. Files lie in a directory of
its own that is removed, and all daemons die with the process that started them. Where a program is
not installed the test is skipped, and the reason says what to install. Cost: two seconds; some 50
MB. Linux only. Slurm looks at time limits every 30 seconds or so; a test waits for that.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.leaks import descendants, wait_until
from tests.support.servers import _program as program

LIMIT_S = 30.0
GRACE_S = 20  # between the signal and the end of a job that is preempted
REQUEUE_S = 2
NODES = 4
CORES = 2  # of each node, whatever the machine has
CONF = """\
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={at}/munge.sock,cred_expire={requeue}
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=300
SlurmctldTimeout=30
SlurmdTimeout=15
BatchStartTimeout=10
MessageTimeout=10
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool/%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.%n.pid
SlurmctldDebug=info
SlurmdDebug=info
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
{more}
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cores} "
    "Boards=1 SocketsPerBoard=1 CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=4000"
)


class Slurm:
    """A cluster under way; clients need `SLURM_CONF=conf` in their environment."""

    def __init__(self, directory: Path, more: str):
        self.directory, self.conf = directory, str(directory / "slurm.conf")
        self.environment = {**os.environ, "SLURM_CONF": self.conf}
        self.nodes = [f"n{number}" for number in range(1, NODES + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host = socket.gethostname().partition(".")[0]
        ports = free_ports(2 + NODES)
        nodes = "\n".join(
            NODE.format(name=name, host=host, port=port, cores=CORES)
            for name, port in zip(self.nodes, ports[2:])
        )
        text = CONF.format(
            host=host,
            ports=ports,
            user=getpass.getuser(),
            at=directory,
            requeue=REQUEUE_S,
            grace=GRACE_S,
            nodes=nodes,
            more=more,
        )
        (directory / "slurm.conf").write_text(text)
        (directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
        for name in ("state", *(f"spool/{node}" for node in self.nodes)):
            (directory / name).mkdir(parents=True)

    def start(self) -> None:
        at = self.directory
        key = at / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key": key, "socket": at / "munge.sock", "pid": at / "munged.pid"}
        files |= {"log": at / "munged.log", "seed": at / "munge.seed"}
        words = [f"--{name}-file={path}" for name, path in files.items() if name != "socket"]
        words += [f"--socket={files['socket']}", "--foreground", "--force", "--num-threads=2"]
        self._start("munged", program("munged", "munge"), *words)
        assert wait_until(files["socket"].exists, LIMIT_S), self.said("munged")
        self._start("slurmctld", program("slurmctld", "slurmctld"), "-D", "-i", "-f", self.conf)
        for node in self.nodes:
            self.bring_back(node)
        assert wait_until(self._is_idle, LIMIT_S, 0.1), self.said("slurmctld")

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        with suppress(OSError, subprocess.SubprocessError):
            for state in ("pending", "running", "suspended"):
                self.run("scancel", "--full", f"--state={state}", f"--user={getpass.getuser()}")
            wait_until(lambda: not self.run("squeue", "-h", "-t", "R,CG,S").strip(), 10.0, 0.1)
        for name in sorted(self._daemons, reverse=True):  # slurmd first, munged last
            self._end(name, signal.SIGTERM)

    def run(self, *words: str, **variables: str) -> str:
        """What a command of Slurm prints; an error has what it said."""
        done = subprocess.run(
            words,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr or done.stdout}")
        return done.stdout

    def lose(self, node: str) -> None:
        """Kill the daemon of a node with all that it runs, and let Slurm know."""
        daemon = self._daemons[node]
        steps = [pid for pid in _steps() if _runs_on(pid, node)]
        for pid in {daemon.pid, *(each for step in steps for each in (step, *descendants(step)))}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        daemon.wait()
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def bring_back(self, node: str) -> None:
        self._start(node, program("slurmd", "slurmd"), "-D", "-N", node, "-f", self.conf)

    def said(self, name: str) -> str:
        """The end of the log of a daemon."""
        return (self.directory / f"{name}.out").read_text(errors="replace")[-3000:]

    def _start(self, name: str, *words: str) -> None:
        setpriv = program("setpriv", "util-linux")
        with (self.directory / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [setpriv, "--pdeathsig", "TERM", *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        try:
            daemon.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _is_idle(self) -> bool:
        try:
            return self.run("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") == f"{NODES}\n"
        except OSError:
            return False


@contextmanager
def start_slurm(more: str = "") -> Iterator[Slurm]:
    """A cluster of four nodes; `more` is added to its slurm.conf."""
    for name, package in [("sbatch", "slurm-client"), ("slurmctld", "slurmctld")]:
        program(name, package)
    # Not below the tests' own directory: a socket's path has at most 107 bytes.
    directory = Path(tempfile.mkdtemp(prefix="shoal-slurm-", dir="/tmp"))
    slurm = Slurm(directory, more)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(directory, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def _steps() -> list[int]:
    """The processes that watch the steps of jobs, of any Slurm of these tests."""
    found = []
    for pid in descendants():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd:"):
                found.append(pid)
    return found


def _runs_on(pid: int, node: str) -> bool:
    """By the environment of what it runs: slurmstepd does not say."""
    for each in descendants(pid):
        with suppress(OSError):
            if f"SLURMD_NODENAME={node}\0".encode() in Path(f"/proc/{each}/environ").read_bytes():
                return True
    return False
