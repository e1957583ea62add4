"""A place to run: hosts, their devices and memory, and the links inside and between them.

A cluster is a TOML file, one of a few that are shipped, or measured on this machine. It says what
a plan would find there, so a plan can be judged for machines that are not at hand. All amounts are
written with their units ("16GB", "1 Gbit/s", "30us") and are plain numbers in the records.

Not for who is there right now: that is the back end's (`cluster/backend.py`). Cost: nothing to
read; some seconds to measure (`this_machine.py`). Read next: `predict.py`, which uses it, and
`docs/how-to/cluster-files.md`.
"""

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec

from shoal.errors import UsageError, nearest
from shoal.formatting import num_bytes_of

MOST_HOSTS = MOST_DEVICES = 1_000_000


class Link(msgspec.Struct, frozen=True):
    """A way between ranks: a message takes `latency_s`, and its bytes at `bytes_per_s`.

    `shared_memory`: ranks of a host also have memory in common, so bytes to a server of the same
    host are copied and not sent.
    """

    latency_s: float
    bytes_per_s: float
    shared_memory: bool = False

    def seconds(self, num_messages: float, num_bytes: float) -> float:
        return num_messages * self.latency_s + num_bytes / self.bytes_per_s


class HostGroup(msgspec.Struct, frozen=True):
    """Hosts that are alike. A device is what one rank computes on: a core, or a GPU. Cores also
    do what messages cost; GPUs compute meanwhile."""

    count: int
    devices: int  # of one host
    memory_bytes: int  # of one host; of all its GPUs together, if those are the devices
    flops: float  # a second, fp32, of one device
    device: Literal["core", "gpu"] = "core"
    half_flops: float = 0.0  # a second, in bf16 and fp16; 0 if that is not known


class Cluster(msgspec.Struct, frozen=True):
    """Hosts, in order, with the links inside a host and between hosts."""

    name: str
    hosts: tuple[HostGroup, ...]
    inside: Link
    between: Link
    failures_per_month: float = 0.0  # of one host

    @property
    def num_hosts(self) -> int:
        return sum(group.count for group in self.hosts)

    @property
    def num_devices(self) -> int:
        return sum(group.count * group.devices for group in self.hosts)

    def group_of(self, host: int) -> HostGroup:
        """The group of the host of this number."""
        for group in self.hosts:
            if host < group.count:
                return group
            host -= group.count
        raise IndexError(f"the cluster has {self.num_hosts} hosts")


# ---- reading


def shipped_clusters() -> list[str]:
    """The names of the clusters that come with Shoal."""
    found = files("shoal.cost").joinpath("clusters").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def read_cluster(path_or_name: str | Path) -> Cluster:
    """The cluster of a TOML file, or the shipped one of that name. UsageError says what is wrong:
    an unknown key with the nearest known one, an amount that cannot be, a file that is not TOML."""
    place, name = Path(path_or_name), str(path_or_name)
    if name in shipped_clusters() and not place.exists():
        content = files("shoal.cost").joinpath("clusters", f"{name}.toml").read_bytes()
    else:
        try:
            content = place.read_bytes()
        except OSError as error:
            raise UsageError(
                f"The cluster {name} cannot be read: {error.strerror}. Give a TOML file, or one of "
                f"those that are shipped: {', '.join(shipped_clusters())}."
            ) from None
    return parse_cluster(content, name)


def parse_cluster(content: bytes, where: str) -> Cluster:
    """The cluster that a TOML file says; `where` is its name, for errors."""
    try:
        given = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} is not TOML: {error}.") from None
    entries = _Entries(given, where, "")
    hosts = entries.take("hosts", _as_tables)
    inside = _link(_Entries(entries.take("inside", _as_table), where, "inside."))
    between = entries.take("between", _as_table, None)
    cluster = Cluster(
        name=entries.take("name", _as_text, Path(where).stem),
        hosts=tuple(_host_group(_Entries(h, where, f"hosts[{i}].")) for i, h in enumerate(hosts)),
        inside=inside,
        between=inside if between is None else _link(_Entries(between, where, "between.")),
        failures_per_month=entries.take("failures_per_month", _at_least_zero, 0.0),
    )
    entries.refuse_others()
    if not cluster.hosts or cluster.num_hosts > MOST_HOSTS:
        raise UsageError(
            f"{where} has {cluster.num_hosts} hosts. Give one [[hosts]] table or more, with 1 to "
            f"{MOST_HOSTS:,} hosts in all."
        )
    if cluster.num_devices > MOST_DEVICES:
        raise UsageError(
            f"{where} has {cluster.num_devices:,} devices, and may have {MOST_DEVICES:,}. Describe "
            "the part of it that a run would take."
        )
    if cluster.num_hosts > 1 and "between" not in given:
        raise UsageError(
            f"{where} has {cluster.num_hosts} hosts and no [between] table. Say how they are "
            'connected: [between] with latency = "100us" and bandwidth = "10 Gbit/s", say.'
        )
    return cluster


def _link(entries: "_Entries") -> Link:
    link = Link(
        latency_s=entries.take("latency", _seconds),
        bytes_per_s=entries.take("bandwidth", _bytes_per_second),
        shared_memory=entries.take("shared_memory", _as_flag, False),
    )
    entries.refuse_others()
    return link


def _host_group(entries: "_Entries") -> HostGroup:
    group = HostGroup(
        count=entries.take("count", _count, 1),
        devices=entries.take("devices", _count),
        memory_bytes=entries.take("memory", _memory),
        flops=entries.take("speed", _flops),
        device=entries.take("device", _device, "core"),
        half_flops=entries.take("half_speed", _flops, 0.0),
    )
    entries.refuse_others()
    return group


_MISSING: Any = object()


class _Entries:
    """A table of the file: each key is taken once, and those that are left are refused."""

    def __init__(self, entries: Mapping[str, Any], where: str, prefix: str):
        self._entries, self._where, self._prefix = entries, where, prefix
        self._known: list[str] = []

    def take(self, key: str, read: Callable[[Any], Any], default: Any = _MISSING) -> Any:
        self._known.append(key)
        if key not in self._entries:
            if default is _MISSING:
                near = get_close_matches(key, self._entries, 1)
                meant = f" It has {self._prefix}{near[0]}: is that meant?" if near else ""
                raise UsageError(
                    f"{self._where} has no {self._prefix}{key}, which it needs.{meant}"
                )
            return default
        try:
            return read(self._entries[key])
        except ValueError as rule:
            value = self._entries[key]
            raise UsageError(
                f"{self._where}: {self._prefix}{key} = {value!r} cannot be. It must be {rule}."
            ) from None

    def refuse_others(self) -> None:
        for key in self._entries:
            if key not in self._known:
                name = f"{self._prefix}{key}"
                raise UsageError(f"{self._where}: {name} is unknown. {nearest(key, self._known)}")


# ---- amounts


def _as_text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("text")
    return value


def _as_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _as_table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a table")
    return value


def _as_tables(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError("[[hosts]] tables")
    return value


def _device(value: Any) -> str:
    if value not in ("core", "gpu"):
        raise ValueError('"core" or "gpu"')
    return str(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_HOSTS:
        raise ValueError(f"a whole number from 1 to {MOST_HOSTS:,}")
    return value


def _at_least_zero(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError("a number of 0 or more")
    return float(value)


def _memory(value: Any) -> int:
    try:
        return num_bytes_of(value, "memory")
    except UsageError:
        raise ValueError('an amount above 0 with its unit, as in "16GB"') from None


_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_RATE = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?)(bit|b)(?:/s|ps)", re.IGNORECASE)
_SPEED = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgtp]?)flops?(?:/s)?", re.IGNORECASE)
_TIME = re.compile(r"([\d.]+(?:e[+-]?\d+)?)\s*(ns|us|µs|ms|s)")


def _bytes_per_second(value: Any) -> float:
    rule = 'above 0 with its unit, as in "1 Gbit/s" or "300 MB/s"'
    number, scale, unit = _match(_RATE, value, rule)
    rate = number * _SCALES[scale.lower()]
    # A lower-case b alone is a bit to some and a byte to others.
    if unit == "b":
        raise ValueError('written with B for bytes or bit for bits, as in "1 Gbit/s"')
    return float(rate / 8 if unit.lower() == "bit" else rate)


def _flops(value: Any) -> float:
    rule = 'above 0 with its unit, as in "50 Gflop/s"'
    number, scale = _match(_SPEED, value, rule)
    return float(number * _SCALES[scale.lower()])


def _seconds(value: Any) -> float:
    rule = 'a time of 0 or more with its unit, as in "30us" or "0.5 ms"'
    number, unit = _match(_TIME, value, rule, least=0.0)
    return float(number * {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit])


def _match(form: re.Pattern[str], value: Any, rule: str, least: float | None = None) -> list[Any]:
    """The number in front and the words behind; above 0, or at least `least`."""
    found = form.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(rule)
    first, *words = found.groups()
    try:
        number = float(first)
    except ValueError:
        raise ValueError(rule) from None
    if not (least or 0.0) <= number < math.inf or (least is None and not number):
        raise ValueError(rule)
    return [number, *words]


# ---- writing


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster as the file that `read_cluster` reads. Refuses a file that exists."""
    refuse_existing(path)
    try:
        path.write_text(format_cluster(cluster), "utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from None


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise UsageError(f"{path} exists. Choose another name, or remove it first.")


def format_cluster(cluster: Cluster) -> str:
    lines = [f'name = "{cluster.name}"', f"failures_per_month = {cluster.failures_per_month:g}"]
    for name, link in (("inside", cluster.inside), ("between", cluster.between)):
        lines += ["", f"[{name}]", f'latency = "{link.latency_s * 1e6:.4g}us"']
        lines += [f'bandwidth = "{link.bytes_per_s / 1e6:.5g} MB/s"']
        lines += ["shared_memory = true"] * link.shared_memory
    for group in cluster.hosts:
        lines += ["", "[[hosts]]", f"count = {group.count}", f"devices = {group.devices}"]
        lines += [f'memory = "{group.memory_bytes / 1e6:.0f}MB"']
        lines += [f'speed = "{group.flops / 1e9:.5g} Gflop/s"']
        lines += ['device = "gpu"'] * (group.device == "gpu")
        if group.half_flops:
            lines += [f'half_speed = "{group.half_flops / 1e9:.5g} Gflop/s"']
    return "\n".join(lines) + "\n"
