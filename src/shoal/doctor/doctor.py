"""What this machine offers, what is wrong with it, and a way out of each problem.

Every check is a small function that returns one `Finding`; those that judge a number take it as an
argument, so the judgement is tested without the machine. A *problem* breaks a run, a *note* is
worth knowing, the rest is ok. `shoal doctor` prints them.

It looks at this machine only: run it on each host of a cluster. Cost: some seconds, mostly to
import torch; the measurements start child processes with a deadline. Read next:
`cost/all_reduce.py`, `cli/doctor.py`, `numerics/precision.py`.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from shoal.cost.all_reduce import (
    MESSAGE_BYTES,
    MeasurementFailed,
    interfaces_up,
    loopback,
    measure_all_reduce,
)
from shoal.errors import UsageError
from shoal.events.meters import cpu_limit, memory_limit_bytes
from shoal.numerics.precision import bf16_environment, bf16_speed
from shoal.storage.run_dir import cache_directory
from shoal.world import cores

Verdict = Literal["ok", "note", "problem"]

_MB, _GB = 2**20, 2**30


class Finding(msgspec.Struct, frozen=True):
    """The result of a check. `advice` is the way out, empty if there is nothing to do."""

    name: str
    verdict: Verdict
    value: str
    advice: str = ""


def examine(run_dir: Path, quick: bool) -> Iterator[Finding]:
    """All checks in turn; `quick` leaves out what has to be measured."""
    facts: list[tuple[str, Callable[[], Finding]]] = [
        ("python", lambda: check_python(sys.version_info[:3])),
        ("packages", check_packages),
        ("extras", check_extras),
        ("torch", check_torch),
        ("devices", check_devices),
        ("cores", lambda: check_cores(cores(), os.cpu_count() or 1, cpu_limit())),
        ("memory", check_memory),
        ("shared memory", lambda: check_shared_memory(Path("/dev/shm"))),
        ("network", check_network),
        ("open files", lambda: check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])),
        ("run directory", lambda: check_disk("run directory", run_dir, "--run-dir")),
        ("cache directory", check_cache),
        ("clock", check_clock),
        ("fused optimizer", check_fused_optimizer),
        ("bf16", lambda: check_bf16(measure=not quick)),
    ]
    if not quick:
        facts.append(("all-reduce", check_all_reduce))
    for name, check in facts:
        try:
            yield check()
        except Exception as error:  # noqa: BLE001 (one broken check must not hide the others)
            what = f"could not be looked at: {type(error).__name__}: {error}"
            yield Finding(name, "problem", what, "This check itself failed; please report it.")


def check_python(version: tuple[int, ...]) -> Finding:
    value = ".".join(map(str, version))
    if version < (3, 11):
        return Finding("python", "problem", value, "Shoal needs Python 3.11 or newer.")
    return Finding("python", "ok", f"{value} at {sys.executable}")


def check_packages() -> Finding:
    try:
        found, missing = _installed(extra=False)
    except importlib.metadata.PackageNotFoundError:
        advice = "Shoal runs from its source tree and is not installed: pip install -e ."
        return Finding("packages", "note", "not known", advice)
    if missing:
        advice = f"pip install {' '.join(missing)}"
        return Finding("packages", "problem", f"missing: {', '.join(missing)}", advice)
    return Finding("packages", "ok", ", ".join(found))


def check_extras() -> Finding:
    try:
        found, missing = _installed(extra=True)
    except importlib.metadata.PackageNotFoundError:
        return Finding("extras", "note", "not known", "See packages.")
    value = ", ".join(found) or "none"
    if missing:
        value += f"; not installed: {', '.join(missing)}"
    return Finding("extras", "ok", value)


def _installed(extra: bool) -> tuple[list[str], list[str]]:
    """The requirements, of the package or of its extras: installed with versions, and missing."""
    found, missing = [], []
    for requirement in importlib.metadata.requires("shoal-ml") or []:
        if ("extra ==" in requirement) is extra:
            name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
    return sorted(set(found)), sorted(set(missing))


def check_torch() -> Finding:
    import torch

    threads = torch.get_num_threads()
    value = f"{torch.__version__}, {threads} threads; each rank is given one"
    if not torch.distributed.is_available():
        return Finding(
            "torch", "problem", value, "This build has no torch.distributed; use another."
        )
    return Finding("torch", "ok", value)


def check_devices() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("devices", "ok", f"CPU only ({platform.machine()}); ranks talk through Gloo")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    if not torch.distributed.is_nccl_available():
        return Finding(
            "devices", "problem", ", ".join(names), "This torch has no NCCL; use another."
        )
    return Finding("devices", "ok", ", ".join(names))


def check_cores(usable: int, present: int, quota: float | None) -> Finding:
    value = f"{usable} usable of {present}"
    if quota is not None and quota < usable:
        return Finding(
            "cores",
            "note",
            f"{value}, held to the time of {quota:g}",
            f"The container's CPU limit slows more than {max(int(quota), 1)} ranks; "
            "use fewer with --ranks, or raise the limit.",
        )
    if usable < present:
        return Finding(
            "cores", "note", value, "Affinity (taskset, a cpuset) keeps the others away."
        )
    return Finding("cores", "ok", value)


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    return judge_memory(memory.total, memory.available, memory_limit_bytes())


def judge_memory(total: int, available: int, limit: int | None) -> Finding:
    usable = available if limit is None else min(available, limit)
    value = f"{total / _GB:.1f} GB, {available / _GB:.1f} available"
    if limit is not None and limit < total:
        value += f", held to {limit / _GB:.1f} by the container"
    if usable < 512 * _MB:
        advice = "A rank takes about 300 MB before its model; free some or raise the limit."
        return Finding("memory", "problem", value, advice)
    if usable < 2 * _GB:
        return Finding("memory", "note", value, "Enough for few ranks and small models.")
    return Finding("memory", "ok", value)


def check_shared_memory(path: Path) -> Finding:
    if not path.is_dir():
        return Finding(
            "shared memory", "note", f"no {path}", "Ranks of one host will talk over TCP."
        )
    usage = shutil.disk_usage(path)
    return judge_shared_memory(usage.total, usage.free)


def judge_shared_memory(total: int, free: int) -> Finding:
    value = f"{total / _MB:.0f} MB, {free / _MB:.0f} free"
    if free < 32 * _MB:
        advice = "Remove what lies in /dev/shm, or give the container more (--shm-size=1g)."
        return Finding("shared memory", "problem", value, advice)
    if free < 256 * _MB:
        advice = "Small, as containers have it by default; raise it with --shm-size=1g."
        return Finding("shared memory", "note", value, advice)
    return Finding("shared memory", "ok", value)


def check_network() -> Finding:
    interfaces = interfaces_up()
    value = ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none is up"
    if loopback(interfaces) is None:
        advice = "Ranks of one host meet on loopback; bring it up: ip link set lo up."
        return Finding("network", "problem", value, advice)
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        advice = "Gloo looks the host name up; add it to /etc/hosts or set GLOO_SOCKET_IFNAME."
        return Finding("network", "note", f"{value}; {socket.gethostname()} is not known", advice)
    return Finding("network", "ok", value)


def check_open_files(soft: int) -> Finding:
    value = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        verdict: Verdict = "problem" if soft < 256 else "note"
        return Finding("open files", verdict, value, "Raise it for many ranks: ulimit -n 4096.")
    return Finding("open files", "ok", value)


def check_disk(name: str, path: Path, setting: str) -> Finding:
    """`path` need not exist: its nearest parent that does is looked at."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        advice = f"Make it writable, or choose another with {setting}."
        return Finding(name, "problem", f"{place} is not a directory that is writable", advice)
    return judge_disk(name, path, shutil.disk_usage(place).free, setting)


def check_cache() -> Finding:
    return check_disk("cache directory", cache_directory(), "SHOAL_CACHE")


def judge_disk(name: str, path: Path, free: int, setting: str) -> Finding:
    value = f"{path}, {free / _GB:.1f} GB free"
    if free < _GB:
        verdict: Verdict = "problem" if free < 100 * _MB else "note"
        return Finding(name, verdict, value, f"Free some, or choose another with {setting}.")
    return Finding(name, "ok", value)


def check_clock() -> Finding:
    clock = time.get_clock_info("monotonic")
    value = f"monotonic, resolution {clock.resolution * 1e9:.0f} ns"
    if not clock.monotonic or clock.resolution > 1e-3:
        advice = "Heartbeats need a steady clock of 1 ms or finer; this system has none."
        return Finding("clock", "problem", value, advice)
    return Finding("clock", "ok", value)


def check_fused_optimizer() -> Finding:
    import torch

    parameter = torch.nn.Parameter(torch.ones(16))
    parameter.grad = torch.ones(16)
    try:
        torch.optim.AdamW([parameter], fused=True).step()
    except RuntimeError as error:
        advice = "The optimizer step will be two to three times slower; use a newer torch."
        return Finding("fused optimizer", "note", str(error).splitlines()[0], advice)
    return Finding("fused optimizer", "ok", "AdamW(fused=True) works on the CPU")


def check_bf16(measure: bool) -> Finding:
    try:
        variables = bf16_environment()
        ratio = bf16_speed(variables) if measure else None
    except UsageError as error:
        return Finding("bf16", "note", str(error), "Train with precision=fp32.")
    settings = " ".join(f"{name}={value}" for name, value in variables.items())
    value = f"runs with {settings}, which Shoal sets" if settings else "runs"
    if ratio is not None:
        value += f", a matmul at {ratio:.2g} of the speed of fp32"
        value += "" if ratio > 1 else ": it saves bytes, not time"
    return Finding("bf16", "ok", value)


def check_all_reduce() -> Finding:
    name = loopback(interfaces_up())
    if name is None:
        return Finding("all-reduce", "problem", "not measured: no loopback", "See network.")
    try:
        seconds = measure_all_reduce(name)
    except MeasurementFailed as error:
        advice = "Ranks of this host cannot talk; is loopback behind a firewall, the machine busy?"
        return Finding("all-reduce", "problem", f"2 ranks on {name}: {error}", advice)
    rate = MESSAGE_BYTES / seconds["large_s"] / 1e9
    latency = f"{seconds['small_s'] * 1e6:.0f} us for 4 bytes"
    return Finding("all-reduce", "ok", f"2 ranks on {name}: {latency}, {rate:.2f} GB/s at 16 MB")
