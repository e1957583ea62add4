"""Read a pickle as data: no class is looked up, no function called, nothing imported.

A pickle is a program for a small stack machine. `safe_unpickle` has only the instructions that
descriptions of tensors need. Where the program names a class, it makes a `PickledObject` with that
name, if the caller allows the name; everything else is refused. Lists of pairs stand for dicts, so
that no hash of untrusted data is computed.
"""

import pickletools
from collections.abc import Callable, Collection
from typing import Any

from shoal.errors import BadCheckpoint
from shoal.storage.decoding import PARSE_ERRORS


class PickledObject:
    """Stands for an object: its class, the arguments of its constructor, and its state."""

    def __init__(self, kind: str, arguments: tuple[Any, ...] | None = None):
        self.kind = kind
        self.arguments = arguments  # None for the class or function itself
        self.state: Any = None


class PickledDict(list[tuple[Any, Any]]):
    """Stands for a dict."""

    def by_text(self) -> dict[str, Any]:
        """A dict, if all keys are text."""
        if not all(isinstance(pair[0], str) for pair in self):
            raise UnsafePickle("a key is not text")
        return dict(self)


class UnsafePickle(BadCheckpoint):
    """The pickle has an instruction or a name that a description of tensors does not need."""


def safe_unpickle(content: bytes, known: Collection[str]) -> Any:
    """The content of a pickle; it may name only the classes and functions in `known`."""
    machine = _Machine(known)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            machine.do(opcode.name, argument)
        return machine.result()
    except UnsafePickle:
        raise
    except PARSE_ERRORS as error:
        raise UnsafePickle(f"it is no sound pickle ({type(error).__name__})") from None


_VALUES = {
    *("BININT", "BININT1", "BININT2", "LONG1"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_COUNTS = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()
_MOST_WAITING = 100_000  # on the stack; pickle itself keeps a few thousand there


class _Machine:
    def __init__(self, known: Collection[str]):
        self._known = known
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._acts: dict[str, Callable[[Any], None]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "STOP": lambda _: None,
            "MARK": lambda _: self._stack.append(_MARK),
            "EMPTY_DICT": lambda _: self._stack.append(PickledDict()),
            "EMPTY_LIST": lambda _: self._stack.append([]),
            "MEMOIZE": lambda _: self._keep(len(self._memo)),
            "BINPUT": self._keep,
            "LONG_BINPUT": self._keep,
            "BINGET": lambda at: self._stack.append(self._memo[at]),
            "LONG_BINGET": lambda at: self._stack.append(self._memo[at]),
            "TUPLE": lambda _: self._stack.append(tuple(self._since_mark())),
            "APPEND": lambda _: self._extend([self._pop()]),
            "APPENDS": lambda _: self._extend(self._since_mark()),
            "SETITEM": lambda _: self._set(self._last(2)),
            "SETITEMS": lambda _: self._set(self._since_mark()),
            "GLOBAL": lambda name: self._name(*name.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._name(*self._last(2)),
            "REDUCE": self._make,
            "NEWOBJ": self._make,
            "BUILD": self._build,
        }

    def do(self, name: str, argument: Any) -> None:
        if len(self._stack) > _MOST_WAITING:
            raise UnsafePickle("it only piles up values")
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _COUNTS:
            self._stack.append(tuple(self._last(_COUNTS[name])))
        elif name in self._acts:
            self._acts[name](argument)
        else:
            raise UnsafePickle(f"it has the instruction {name}, which no such file needs")

    def result(self) -> Any:
        (value,) = self._stack
        return value

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a mark")
        return value

    def _last(self, count: int) -> list[Any]:
        return [self._pop() for _ in range(count)][::-1]

    def _since_mark(self) -> list[Any]:
        found = []
        while (value := self._stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def _keep(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise UnsafePickle("it appends to what is no list")
        target.extend(values)

    def _set(self, flat: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not PickledDict or len(flat) % 2:
            raise UnsafePickle("it sets items of what is no dict")
        target.extend(zip(flat[::2], flat[1::2]))

    def _name(self, module: Any, name: Any) -> None:
        whole = f"{module}.{name}"
        if whole not in self._known:
            raise UnsafePickle(f"it asks for {whole}, which no such file needs")
        self._stack.append(PickledObject(whole))

    def _make(self, _: Any) -> None:
        what, given = self._last(2)
        is_class = type(what) is PickledObject and what.arguments is None
        if not is_class or type(given) is not tuple:
            raise UnsafePickle("it calls what is no class")
        self._stack.append(PickledObject(what.kind, given))

    def _build(self, _: Any) -> None:
        target, state = self._last(2)
        if type(target) is not PickledObject or target.arguments is None:
            raise UnsafePickle("it changes what is no object")
        target.state = state
        self._stack.append(target)
