"""Files as disks, other versions and people who mean harm leave them: wrong in any way.

Half of the changes are of bytes, and half of what the bytes say: another type, a number that is too
large, a key that is gone, brackets in brackets. All are drawn from a seed.
"""

import json
import random
from collections.abc import Callable
from typing import Any

Change = Callable[[bytes, random.Random], bytes]

DEEP = b"[" * 100_000
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(0.5, -0.5, 1e308, "", "x", "\0", "\ud800", "../../etc/passwd", "a" * 300, "data=2", "²"),
    *([], {}, [[]], [0], ["x"], {"value": 1}, {"": {}}),
)


def flip(content: bytes, draw: random.Random) -> bytes:
    made = bytearray(content)
    for _ in range(draw.choice((1, 1, 3))):
        if made:
            made[draw.randrange(len(made))] ^= 1 << draw.randrange(8)
    return bytes(made)


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def lengthen(content: bytes, draw: random.Random) -> bytes:
    return content + draw.choice((b"\0", b"}", b"\xff\xfe", draw.randbytes(20), content))


def overwrite(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content) + 1)
    some = draw.choice((b"\xff", b"\xc3(", bytes(9), b"[" * 50, b"9" * 30, draw.randbytes(9)))
    return content[:start] + some + content[start + draw.choice((0, len(some))) :]


def drop(content: bytes, draw: random.Random) -> bytes:
    start = draw.randrange(len(content) + 1)
    return content[:start] + content[start + draw.randint(1, 40) :]


def replace(content: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"", DEEP, b'{"a":' * 50_000, b"null", b"[]", b'"\xff"', b"\x00", b"1e999"))


def repeat_a_number(content: bytes, draw: random.Random) -> bytes:
    """A digit becomes many."""
    places = [place for place, byte in enumerate(content) if 48 <= byte < 58]
    if not places:
        return flip(content, draw)
    at = draw.choice(places)
    return content[:at] + b"9" * draw.choice((3, 19, 400, 5000)) + content[at + 1 :]


def change_a_value(content: bytes, draw: random.Random) -> bytes:
    """Of what is JSON, or of one line of it."""
    lines = content.split(b"\n")
    which = draw.choice([n for n, line in enumerate(lines) if line.strip()] or [0])
    for text, rejoin in (
        (content, lambda made: made),
        (lines[which], lambda made: b"\n".join([*lines[:which], made, *lines[which + 1 :]])),
    ):
        try:
            return rejoin(json.dumps(_changed(json.loads(text), draw)).encode())
        except (ValueError, RecursionError):
            continue
    return flip(content, draw)


def _changed(tree: Any, draw: random.Random) -> Any:
    """With one part of it made into something else, or left out."""
    keys = (
        list(tree) if isinstance(tree, dict) else list(range(len(tree))) if _is_list(tree) else []
    )
    if not keys or draw.random() < 0.1:
        return draw.choice(VALUES)
    made, key = type(tree)(tree), draw.choice(keys)
    action = draw.random()
    if action < 0.15:
        del made[key]
    elif action < 0.25 and isinstance(made, dict):
        made["unknown"] = made.pop(key)
    elif action < 0.35 and _is_list(made):
        made.insert(key, made[key])
    else:
        made[key] = _changed(made[key], draw)
    return made


def _is_list(tree: Any) -> bool:
    return isinstance(tree, list)


BYTES: tuple[Change, ...] = (flip, cut, lengthen, overwrite, drop, replace, repeat_a_number)


def mutated(content: bytes, draw: random.Random) -> bytes:
    """The bytes with one change, or two."""
    for _ in range(draw.choice((1, 1, 2))):
        change = change_a_value if draw.random() < 0.5 else draw.choice(BYTES)
        content = change(content, draw)
    return content
