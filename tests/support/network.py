"""A switch between hosts that loses, doubles, delays and damages packets, as bad networks do.

    with bad_network(3) as (hosts, network):
        network.tamper = sometimes(0.05, lost)        # every twentieth packet, from now on
        network.tamper = only(is_message, sometimes(0.01, damaged))

Hosts are the network namespaces of `hosts.py`, each with a TAP device whose other end is a thread
of the test. TCP repairs what is lost, doubled and late; what is damaged has a right checksum again,
as one in 65,536 has on a real cable, so that only those who talk can see it. Not for timing.
"""

import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from tests.support.hosts import Host, NoNamespaces, _ip

_TAP = struct.Struct("16sH22x")  # of the kernel's `struct ifreq`
_SET_TAP, _TAP_FLAGS = 0x400454CA, 0x0002 | 0x1000  # TUNSETIFF; IFF_TAP, IFF_NO_PI
_IP, _TCP = b"\x08\x00", 6
_GREETING = b"\xff\0\0\0\0\0\0\0"  # the first bytes of a ZeroMQ connection, and a length
_SYN = 2


class Packet(NamedTuple):
    """An Ethernet frame on its way from a host, and whether its TCP connection is ZeroMQ's."""

    frame: bytes
    source: int
    is_zmq: bool = False

    @property
    def flow(self) -> bytes | None:
        """Addresses and ports of its TCP connection, from the sender's side."""
        if self.frame[12:14] != _IP or self.frame[23] != _TCP:
            return None
        at = self._tcp
        return self.frame[26:34] + self.frame[at : at + 4]

    @property
    def payload(self) -> bytes:
        at = self._tcp
        start = at + 4 * (self.frame[at + 12] >> 4)
        return self.frame[start : 14 + int.from_bytes(self.frame[16:18])]

    @property
    def _tcp(self) -> int:
        return 14 + 4 * (self.frame[14] & 15)

    def flipped(self) -> "Packet":
        """With the last bit of its payload turned over, and a TCP checksum that agrees."""
        frame, at = bytearray(self.frame), self._tcp
        place = at + 4 * (frame[at + 12] >> 4) + len(self.payload) - 1
        start = place - (place - at) % 2  # of the 16-bit word that it lies in
        before = int.from_bytes(frame[start : start + 2])
        frame[place] ^= 1
        # The sum changes by what the word does: RFC 1624.
        total = ~int.from_bytes(frame[at + 16 : at + 18]) & 0xFFFF
        total += (~before & 0xFFFF) + int.from_bytes(frame[start : start + 2])
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        frame[at + 16 : at + 18] = (~total & 0xFFFF).to_bytes(2)
        return self._replace(frame=bytes(frame))


Sent = Sequence[tuple[float, Packet]]  # what leaves the switch for a packet: when, and as what
Tamper = Callable[[Packet], Sent]


def passed(packet: Packet) -> Sent:
    return [(0.0, packet)]


def lost(packet: Packet) -> Sent:
    return []


def doubled(packet: Packet) -> Sent:
    return [(0.0, packet), (0.01, packet)]


def late(packet: Packet) -> Sent:
    """Later than those that follow it."""
    return [(0.05, packet)]


def damaged(packet: Packet) -> Sent:
    return [(0.0, packet.flipped())]


def sometimes(share: float, tamper: Tamper, draws: random.Random) -> Tamper:
    return lambda packet: (tamper if draws.random() < share else passed)(packet)


def only(chosen: Callable[[Packet], bool], tamper: Tamper) -> Tamper:
    return lambda packet: (tamper if chosen(packet) else passed)(packet)


def is_message(packet: Packet) -> bool:
    """Whether it carries bytes of a ZeroMQ connection: everything but what Gloo moves."""
    return packet.is_zmq and bool(packet.payload)


class Network:
    """The switch. `tamper` is called in its thread, for each packet, and must not wait."""

    def __init__(self, taps: Sequence[int]):
        self.tamper: Tamper = passed
        self.num_tampered = 0  # packets that did not pass as they were
        self._taps = taps
        self._addresses: dict[bytes, int] = {}  # Ethernet address -> host
        self._zmq: set[bytes] = set()  # flows, both ways
        self._waiting: list[tuple[float, int, Packet]] = []
        self._order = itertools.count()
        self._end = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._end[1], b"e")
        self._thread.join()
        for end in self._end:
            os.close(end)

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, tap in enumerate(self._taps):
                selector.register(tap, selectors.EVENT_READ, number)
            selector.register(self._end[0], selectors.EVENT_READ, None)
            while True:
                left_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
                for key, _ in selector.select(left_s and max(0.0, left_s)):
                    if key.data is None:
                        return
                    with suppress(BlockingIOError):
                        self._take(Packet(os.read(self._taps[key.data], 1 << 16), key.data))
                while self._waiting and self._waiting[0][0] <= time.monotonic():
                    self._deliver(heapq.heappop(self._waiting)[2])

    def _take(self, packet: Packet) -> None:
        self._addresses[packet.frame[6:12]] = packet.source
        if (flow := packet.flow) is not None:
            packet = packet._replace(is_zmq=self._is_zmq(packet, flow))
        sent = self.tamper(packet)
        self.num_tampered += sent != [(0.0, packet)]
        for delay_s, each in sent:
            if delay_s:
                due = time.monotonic() + delay_s
                heapq.heappush(self._waiting, (due, next(self._order), each))
            else:
                self._deliver(each)

    def _is_zmq(self, packet: Packet, flow: bytes) -> bool:
        back = flow[4:8] + flow[:4] + flow[10:12] + flow[8:10]
        if packet.frame[packet._tcp + 13] & _SYN:  # ports are used again
            self._zmq -= {flow, back}
        elif packet.payload.startswith(_GREETING):
            self._zmq |= {flow, back}
        return flow in self._zmq

    def _deliver(self, packet: Packet) -> None:
        target = self._addresses.get(packet.frame[:6])
        others = [n for n in range(len(self._taps)) if n != packet.source]
        for number in others if target is None else [target]:
            with suppress(OSError):  # the host's interface is down, or its queue is full
                os.write(self._taps[number], packet.frame)


@contextmanager
def bad_network(count: int) -> Iterator[tuple[list[Host], Network]]:
    """Hosts on such a switch. Raises NoNamespaces where none can be made."""
    mark = os.urandom(3).hex()
    hosts = [Host(f"shoal-{mark}-{i}", f"10.79.0.{i + 1}", f"sh{mark}{i}") for i in range(count)]
    taps: list[int] = []
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            taps.append(_tap(host.interface))
            _ip("link", "set", host.interface, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        with Network(taps) as network:
            yield hosts, network
    finally:
        for tap in taps:
            os.close(tap)
        for host in hosts:
            if Path("/run/netns", host.namespace).exists():
                _ip("netns", "delete", host.namespace)


def _tap(interface: str) -> int:
    try:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(tap, _SET_TAP, _TAP.pack(interface.encode(), _TAP_FLAGS))
    except OSError as error:
        raise NoNamespaces(f"there are no TAP devices: {error}") from None
    return tap
