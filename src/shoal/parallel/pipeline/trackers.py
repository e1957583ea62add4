"""Track the tensors that a unit creates and uses inside, while a forward is recorded.

A unit is not cut, but it may use tensors that are not among its arguments: parameters and computed
tensors in closures and attributes, and tensors that another unit has stored. `UnitTracker` tracks
tensors as Python objects; `MemoryTracker` tracks them by their memory, and sees compiled code too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.numerics.storage_address import storage_address
from shoal.parallel.pipeline.calls import leaves

Thing = TypeVar("Thing")


class UnitTensor(NamedTuple):
    """Of a tensor that a unit made inside."""

    event: int
    unit: str


class UnitTensors:
    """The tensors that units made so far and that are still there, by object and by memory.

    They are not kept: what a unit lets go is gone, or a recording would hold all activations. Its
    id and its address may then be those of others, so each is asked for what is alive.
    """

    def __init__(self) -> None:
        self._objects = _Alive[Tensor]()
        self._storages = _Alive[torch.UntypedStorage]()

    def add(self, tensor: Tensor, made: UnitTensor, given: Iterable[Tensor]) -> None:
        """`given` are the inputs: a view has the memory of one of them."""
        self._objects.add(id(tensor), tensor, made)
        where = storage_address(tensor)
        if where and all(storage_address(x) != where for x in given):
            self._storages.add(where, tensor.untyped_storage(), made)

    def of_object(self, tensor: Tensor) -> UnitTensor | None:
        return self._objects.get(id(tensor))

    def at(self, where: int) -> UnitTensor | None:
        return self._storages.get(where)


class _Alive(Generic[Thing]):
    """Who made what is alive, by a key that it has alone as long as it is."""

    def __init__(self) -> None:
        self._things = WeakValueDictionary[int, Thing]()
        self._made: dict[int, UnitTensor] = {}

    def add(self, key: int, thing: Thing, made: UnitTensor) -> None:
        if key not in self._things:
            self._things[key], self._made[key] = thing, made

    def get(self, key: int) -> UnitTensor | None:
        return self._made[key] if key in self._things else None


class UnitTracker(TorchFunctionMode):
    """Records the tensor objects that are used and made while a unit runs."""

    def __init__(self, unit_tensors: UnitTensors, event: int, unit: str):
        super().__init__()
        self._unit_tensors, self._event, self._unit = unit_tensors, event, unit
        self.used: dict[int, Tensor] = {}  # by id

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(x): x for x in leaves((args, kwargs), []) if isinstance(x, Tensor)}
        self.used.update(given)
        for x in leaves(result, []):
            if type(x) is Tensor and x.numel() and id(x) not in given:
                self._unit_tensors.add(x, UnitTensor(self._event, self._unit), given.values())
        return result


class MemoryTracker(TorchDispatchMode):
    """Records the memory that operations read or write, also in compiled code."""

    def __init__(self, out_of_sight: Callable[[str, set[int]], None]):
        super().__init__()  # type: ignore[no-untyped-call]
        self._out_of_sight = out_of_sight
        self._noted: set[int] | None = None

    @contextmanager
    def noted(self) -> Iterator[set[int]]:
        """The addresses that are used in the body. Outside of it `out_of_sight` is called."""
        before, self._noted = self._noted, set()
        try:
            yield self._noted
        finally:
            self._noted = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = (x for x in leaves((args, kwargs), []) if isinstance(x, Tensor))
        touched = {where for x in tensors if (where := storage_address(x))}
        if self._noted is not None:
            self._noted |= touched
        else:
            self._out_of_sight(func.overloadpacket.__name__, touched)
        return func(*args, **(kwargs or {}))


def versions(tree: Any) -> list[tuple[Tensor, int]]:
    """Of the tensors in a tree, to tell afterwards which were written into."""
    tensors = [x for x in leaves(tree, []) if isinstance(x, Tensor)]
    return [(x, x._version) for x in tensors if not x.is_inference()]
