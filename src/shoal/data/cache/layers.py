"""Layers of a cache: the protocol, the checksum that seals every value, and layers as tiers.

A layer keeps bytes under keys of 16 bytes. It may forget anything at any time, and refuse to keep
something; what it gives back is what was put under that very key, or nothing. The seal sees to
that: a hash of the content, seeded with the key, that is compared on every `get`. So a value that
is half-written, flipped, swapped or foreign is a miss, whichever process wrote it or died over it.

The seal is no signature: a client that may write to a shared server can write what passes it. That
is data all the same, never code. Cost: one pass of XXH3 over the content, several GB/s.
Next: `memory.py`, `disk.py`, `remote.py`; `shoal.testing.caches` has the tests that each must pass.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import xxhash

Content: TypeAlias = bytes | bytearray | memoryview

SEAL_BYTES = 16


class CacheLayer(Protocol):
    """Where packed samples are kept. Any thread, and any process that was forked, may call it."""

    def get(self, key: bytes, /) -> bytearray | None:
        """The content, in a buffer that is the caller's own; None if it is not there, or bad."""
        ...

    def put(self, key: bytes, /, *parts: Content) -> bool:
        """Keep the parts as one content; whether it is there now.

        Never raises for want of room or answer.
        """
        ...

    def close(self) -> None:
        """Let go of what is open. Nothing is called afterwards, save `close` again."""
        ...


class TieredCache:
    """Layers as tiers, the nearest first; what a farther one has is copied to the nearer ones."""

    def __init__(self, layers: Sequence[CacheLayer]):
        self.layers = tuple(layers)

    def get(self, key: bytes) -> bytearray | None:
        for number, layer in enumerate(self.layers):
            content = layer.get(key)
            if content is not None:
                for nearer in self.layers[:number]:
                    nearer.put(key, content)
                return content
        return None

    def put(self, key: bytes, *parts: Content) -> bool:
        """Whether any layer has it now."""
        kept = [layer.put(key, *parts) for layer in self.layers]  # all of them, not the first
        return any(kept)

    def close(self) -> None:
        for layer in self.layers:
            layer.close()


def seal_of(key: bytes, *parts: Content) -> bytes:
    """The hash that content under this key must have; the content may lie in parts."""
    seal = xxhash.xxh3_128(seed=int.from_bytes(key[:8], "little"))
    for part in parts:
        seal.update(part)
    return seal.digest()


def sealed(key: bytes, *parts: Content) -> bytes:
    """Seal and content as one value, for layers that keep values."""
    return b"".join((seal_of(key, *parts), *parts))


def unsealed(key: bytes, value: Content) -> bytearray | None:
    """The content of a sealed value, copied; None if the seal is not that of this content."""
    view = memoryview(value)
    if len(view) < SEAL_BYTES:
        return None
    content = bytearray(view[SEAL_BYTES:])
    return content if seal_of(key, content) == view[:SEAL_BYTES] else None


def protected_since(opened: float, now: float, keep_s: float) -> float:
    """What was used at this moment or later is not evicted; what lies before is, oldest first.

    A pass over the data uses each sample once. To evict what this pass has used would cost the next
    pass as much as it saves this one, and a set that is larger than the layer would never be found
    in it; so what was used since the layer was opened stays. But `keep_s`
    later it counts as no longer needed.
    """
    return max(opened, now - keep_s)


Clock: TypeAlias = Callable[[], float]
