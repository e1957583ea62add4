"""`trainer.state`: what a script's own loop keeps between steps, so that it is not lost.

A mapping of text to tensors, plain values, lists, tuples and dicts of these, and objects that have
`state_dict` and `load_state_dict`. `pack` makes tensors and plain values of it, which a peer, or a
checkpoint, can carry without pickle; `arrive` and `begin` bring them back. What arrives finds a
script that has not begun its loop, and perhaps not made its objects: plain values can be read at
once, and everything takes its place when the loop begins, in the tensors, lists and objects that
the script has put there meanwhile.

Read next: `own_loop.py`, for who hands it over and who compares it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.checkpoint.dtypes import why_unsupported
from shoal.errors import RecipeError, UsageError
from shoal.parallel.layout import LocalLayout, slices_of
from shoal.sync.state import DICT, LIST, NUMBER, TENSOR, TUPLE, StateSource, read_whole
from shoal.training.callbacks import RUNNER, CallbackRunner
from shoal.training.rank_check import digest_of_tensor, in_order

OBJECT = "object"  # beside what `sync/state.py` has: the class's name, and its state
PARAMETERS = "parameters"  # tensors of parameters: their name together, and each by its own
_SMALL_BYTES = 4096  # of a tensor that is compared, and kept, as if it were plain
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # whole numbers that MessagePack has


class PackedState(NamedTuple):
    """A state as it is carried: `plain` has the number of a tensor in each one's place."""

    plain: dict[str, Any]
    tensors: list[Tensor]
    names: dict[int, tuple[str, str]]  # of those that are kept as parameters are

    def kept(self) -> "PackedState":
        """As it is now, also if small tensors change; large ones are not copied."""
        return self._replace(tensors=[t.clone() if is_small(t) else t for t in self.tensors])


class ParameterTensors(dict[str, Tensor]):
    """Tensors of parameters, by name, each held as its parameter is: an average of the weights.

    A checkpoint has them as `<name>.<parameter>`, and any plan takes its parts from there.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor]):
        super().__init__(tensors)
        self.name = name


class HeldParameters(NamedTuple):
    """What a rank holds of the parameters, to take tensors of the same form from a checkpoint."""

    tensors: Mapping[str, Tensor]
    holding: LocalLayout

    def read(self, name: str, source: StateSource) -> ParameterTensors:
        made = {n: torch.empty_like(t) for n, t in self.tensors.items()}
        for parameter, tensor in made.items():
            source.fill(f"{name}.{parameter}", slices_of(parameter, tensor, self.holding))
        return ParameterTensors(name, made)


Held = Callable[[], HeldParameters]


class _PutAside(list[Tensor]):
    """Tensors of a state that is packed; `names` of those that are parameters'."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, tuple[str, str]] = {}

    def name_next(self, tensors: ParameterTensors) -> None:
        """Those that are put aside next are these."""
        self.names |= {len(self) + i: (tensors.name, n) for i, n in enumerate(tensors)}


class _Object(NamedTuple):
    """The state of an object that the script must make."""

    kind: str
    state: Any


class LoopState(dict[str, Any]):
    """What a loop keeps. Every rank must change it alike."""

    @classmethod
    def of(cls, callbacks: CallbackRunner) -> Self:
        """With what these keep, if there are any."""
        made = cls()
        if callbacks:
            made[RUNNER] = callbacks
        return made

    def __init__(self) -> None:
        super().__init__()
        self._arrived: dict[str, Any] | None = None
        self._is_exact = False

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise UsageError(f"trainer.state[{key!r}]: a key is text, such as 'best'.")
        super().__setitem__(key, value)

    def pack(self) -> PackedState:
        """As it is, or will be when the loop begins."""
        tensors = _PutAside()
        values = self if self._arrived is None else {**self, **self._arrived}
        try:
            plain = {key: _put(v, _at(key), tensors) for key, v in values.items()}
            return PackedState(plain, tensors, tensors.names)
        except RecursionError:
            raise RecipeError(
                "trainer.state is nested too deep, or holds a list or dict that holds itself."
            ) from None

    def arrive(
        self,
        plain: Mapping[str, Any],
        source: StateSource,
        name: str,
        exact: bool,
        held: "Held | None" = None,
    ) -> None:
        """Take what was packed, its tensors from a source where their names begin with `name`.

        If `exact`, the state is this and nothing else; or else what a script adds to it stays. With
        `held` the source may be of another plan: what is kept by parameter is taken by its name.
        """
        self.let_go()
        self._arrived = {key: _take(value, source, name, held) for key, value in plain.items()}
        self._is_exact = exact
        for key, value in self._arrived.items():
            if not any(isinstance(leaf, _Object) for leaf in _leaves(value)):
                self.setdefault(key, value)  # what the script has put there it may hold as well

    def let_go(self) -> None:
        """Of what has arrived and was not begun with."""
        for key, value in (self._arrived or {}).items():
            if self.get(key) is value:  # of that arrival, and of no other
                del self[key]
        self._arrived = None

    def begin(self) -> None:
        """Let what arrived take its place."""
        arrived, self._arrived = self._arrived, None
        if arrived is None:
            return
        for key, value in arrived.items():
            self[key] = _into(self.get(key), value, _at(key))
        for key in [key for key in self if key not in arrived] if self._is_exact else ():
            del self[key]

    def described(self, with_large: bool) -> dict[str, str]:
        """Each value by its place, as text; large tensors by a digest of all their elements."""
        plain, tensors, _ = self.pack()
        found: dict[str, str] = {}
        for key, value in plain.items():
            _describe(value, _at(key), tensors, with_large, found)
        return found


def is_small(tensor: Tensor) -> bool:
    return tensor.nbytes <= _SMALL_BYTES


def _at(key: str) -> str:
    return f"trainer.state[{key!r}]"


def _put(value: Any, path: str, tensors: "_PutAside") -> Any:
    """What stands for a value; tensors are put aside."""
    if isinstance(value, Tensor):
        tensors.append(_own_part(value, path))
        return {TENSOR: [len(tensors) - 1, value.device.type]}
    if isinstance(value, ParameterTensors):
        tensors.name_next(value)
        return {PARAMETERS: [value.name, _put_items(dict(value), path, tensors)]}
    if type(value) is dict:
        return {DICT: _put_items(value, path, tensors)}
    if type(value) in (list, tuple):
        kind = TUPLE if type(value) is tuple else LIST
        return {kind: [_put(part, f"{path}[{i}]", tensors) for i, part in enumerate(value)]}
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return {OBJECT: [type(value).__qualname__, _put_state(value.state_dict(), path, tensors)]}
    if isinstance(value, _Object):
        return {OBJECT: [value.kind, _put_state(value.state, path, tensors)]}
    return _put_plain(value, path)


def _put_state(value: Any, path: str, tensors: "_PutAside") -> Any:
    """Of an object's own state, whose dicts may be of any kind: what it has now tells which."""
    if isinstance(value, dict) and not isinstance(value, ParameterTensors):
        return {DICT: _put_items(dict(value), path, tensors, _put_state)}
    if isinstance(value, list | tuple):
        kind = TUPLE if isinstance(value, tuple) else LIST
        return {kind: [_put_state(part, f"{path}[{i}]", tensors) for i, part in enumerate(value)]}
    return _put(value, path, tensors)


def _put_items(
    items: dict[Any, Any], path: str, tensors: _PutAside, put: Any = _put
) -> list[list[Any]]:
    for key in items:
        if type(key) not in (str, int):
            raise RecipeError(
                f"{path} has the key {key!r}, a {type(key).__name__}. Keys of dicts in "
                "trainer.state are text or whole numbers."
            )
    return [
        [_put_plain(key, path), put(part, f"{path}[{key!r}]", tensors)]
        for key, part in items.items()
    ]


def _put_plain(value: Any, path: str) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {NUMBER: str(float(value))}
    if value is None or type(value) is bool:
        return value
    if type(value) is int and _LEAST <= value <= _MOST:
        return value
    if _is_text(value):
        return value
    what = f"of the type {type(value).__name__}"
    if type(value) is int:
        what = "a whole number of more than 64 bits"
    raise RecipeError(
        f"{path} is {what}, which cannot be handed to another rank or saved. trainer.state holds "
        "dense tensors, numbers, text, True, False, None, lists, tuples and dicts of these, and "
        "objects with state_dict and load_state_dict."
    )


def _is_text(value: Any) -> bool:
    """Whether UTF-8 has bytes for it."""
    return type(value) is str and value.encode("utf-8", "ignore").decode() == value


def _own_part(tensor: Tensor, path: str) -> Tensor:
    """The elements that this rank holds."""
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if why := why_unsupported(own):
        raise RecipeError(
            f"{path} is a tensor that is {why}, which no checkpoint can hold. trainer.state holds "
            "dense tensors of bool, whole numbers, floats of 8 to 64 bits and complex64."
        )
    return in_order(own.detach())


def _take(value: Any, source: StateSource, name: str, held: Held | None) -> Any:
    """The value that `_put` was given; an object's state as an `_Object`."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == TENSOR:
        number, device = content
        made = read_whole(source, f"{name}{number}")
        return made if device == "cpu" or not torch.cuda.is_available() else made.to(device)
    if kind == OBJECT:
        return _Object(content[0], _take(content[1], source, name, held))
    if kind == NUMBER:
        return float(content)
    if kind == DICT:
        return {key: _take(part, source, name, held) for key, part in content}
    if kind == PARAMETERS:
        average, items = content
        if held is not None:
            return held().read(average, source)
        taken = {key: _take(part, source, name, held) for key, part in items}
        return ParameterTensors(average, taken)
    parts = [_take(part, source, name, held) for part in content]
    return tuple(parts) if kind == TUPLE else parts


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _leaves(part)
    elif type(value) in (list, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


@torch.no_grad()
def _into(old: Any, new: Any, path: str) -> Any:
    """The new value, in the old one's tensors, lists, dicts and objects as far as they fit."""
    if isinstance(new, _Object):
        if not hasattr(old, "load_state_dict"):
            _refuse_missing(new, path)
        old.load_state_dict(_shaped(old.state_dict(), new.state))
        return old
    if isinstance(new, Tensor) and isinstance(old, Tensor):
        own = old._local_tensor if isinstance(old, DTensor) else old
        if own.shape == new.shape and own.dtype == new.dtype:
            own.copy_(new)
            return old
    if type(new) is type(old) and isinstance(new, dict):
        made = {key: _into(old.get(key), part, f"{path}[{key!r}]") for key, part in new.items()}
        old.clear()
        old.update(made)
        return old
    if type(new) in (list, tuple):
        olds = [*old, *[None] * len(new)] if type(old) is type(new) else [None] * len(new)
        parts = [_into(was, part, f"{path}[{i}]") for i, (was, part) in enumerate(zip(olds, new))]
        if type(old) is list and type(new) is list:
            old[:] = parts
            return old
        return type(new)(parts)
    if isinstance(new, dict):
        return {key: _into(None, part, f"{path}[{key!r}]") for key, part in new.items()}
    return new


def _shaped(old: Any, new: Any) -> Any:
    """A state in dicts of the kinds that the object itself uses: a Counter, an OrderedDict."""
    if isinstance(old, dict) and isinstance(new, dict):
        made = copy(old)
        made.clear()
        made.update({key: _shaped(old.get(key), part) for key, part in new.items()})
        return made
    if isinstance(old, list | tuple) and isinstance(new, list | tuple) and len(old) == len(new):
        parts = [_shaped(was, part) for was, part in zip(old, new)]
        return old._make(parts) if hasattr(old, "_make") else type(old)(parts)
    return new


def _refuse_missing(new: _Object, path: str) -> NoReturn:
    raise RecipeError(
        f"{path} has the state of a {new.kind}, and the script has put no object with "
        "load_state_dict there. Make it before the loop, on every rank and in every start."
    )


def _describe(
    value: Any, path: str, tensors: list[Tensor], with_large: bool, found: dict[str, str]
) -> None:
    if not isinstance(value, dict):
        found[path] = repr(value)
        return
    ((kind, content),) = value.items()
    if kind == TENSOR:
        tensor = tensors[content[0]]
        is_known = with_large or is_small(tensor)
        found[path] = _tensor_in_words(tensor) if is_known else "a tensor"
    elif kind == NUMBER:
        found[path] = content
    elif kind == OBJECT:
        _describe(content[1], f"{path}.state_dict()", tensors, with_large, found)
    elif kind in (DICT, PARAMETERS):
        content = content if kind == DICT else content[1]
        found[path] = f"a dict of {len(content)}"
        for key, part in content:
            _describe(part, f"{path}[{key!r}]", tensors, with_large, found)
    else:
        found[path] = f"a {kind} of {len(content)}"
        for number, part in enumerate(content):
            _describe(part, f"{path}[{number}]", tensors, with_large, found)


def _tensor_in_words(tensor: Tensor) -> str:
    if tensor.numel() == 1:
        return repr(tensor.item())
    what = str(tensor.dtype).removeprefix("torch.")
    return f"a tensor of {what} {list(tensor.shape)} with the digest {digest_of_tensor(tensor)}"
