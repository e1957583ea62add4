"""Fingerprints: what a source holds and what a function does, as a hash that changes with it.

What was computed from a source is kept in the cache directory under such a hash, so that it is
found again, and only by those to whom it applies. A source that has `identity()` is believed; what
lies in memory is hashed; a function is known by its code, its constants and whatever it refers to
outside or imports, followed as far as the user's own code goes, and by version beyond.

What cannot be told apart has no fingerprint: `NoIdentity` is raised and nothing is kept, because a
result that is computed again is slow and one of other data is wrong. Cost: a pass over what lies in
memory; a module that a function imports is imported.
"""

import dis
import enum
import functools
import importlib
import operator
import re
import sys
import sysconfig
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from torch import Tensor

from shoal.data.packing import pack
from shoal.data.sources import TensorSource, WindowSource
from shoal.data.validate import text_of
from shoal.data.views import ConcatSource, Subset, View
from shoal.errors import RecipeError, UsageError
from shoal.logs import warn_once

_PLAIN = (type(None), bool, int, float, complex, str, bytes, range)
_NAMES = (np.dtype, torch.dtype, types.EllipsisType)
_LIBRARIES = tuple(
    {sysconfig.get_paths()[name] + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_INSTALLED = ("/site-packages/", "/dist-packages/")  # the user's own, or the system's
_SOURCES = (TensorSource, WindowSource, View, Subset, ConcatSource)
_MOST_DEPTH = 200
_CHUNK_BYTES = 1 << 24  # of a tensor that does not lie in one piece, copied at a time
_MEMBERS = (*_PLAIN, list, tuple, dict, set, frozenset, np.ndarray, Tensor)


class NoIdentity(UsageError):
    """There is no way to tell this source or function from another one."""


def identity_of(source: Any) -> str:
    """A name of the source's content; NoIdentity if there is none."""
    own = getattr(source, "identity", None)
    if callable(own):
        return str(own())
    if isinstance(source, View):
        return identity_of(source.source)
    if isinstance(source, Subset):
        return digest("some", identity_of(source.source), source.kept)
    if isinstance(source, ConcatSource):
        return digest("joined", *map(identity_of, source.sources))
    if isinstance(source, TensorSource):
        return digest("tensors", source.inputs, source.target)
    if isinstance(source, WindowSource):
        return digest("windows", source.spans)
    if isinstance(source, list | tuple):
        return _digest_of_samples(source)
    raise NoIdentity(
        f"a {type(source).__qualname__} does not say what it holds. Give it a method identity() "
        "that returns a text, another one whenever its samples change."
    )


def digest(*values: Any) -> str:
    """A hash of values, functions and types; NoIdentity if one of them has none."""
    described = _Describer().value(list(values))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(described))


def result_key(what: str, source: Any, identity: str | None, *given: Any) -> str | None:
    """What the result of a pass over a source is kept under; None, with a warning, if by nothing.

    `identity` names the source, if the user did; `given` is what else the result depends on.
    """
    try:
        given_name = None if identity is None else text_of(identity, f"{what}(identity=...)")
        name = identity_of(source) if given_name is None else given_name
        return digest(what, name, len(source), *given)
    except NoIdentity as error:
        warn_once(
            f"{what}() looks at all samples at every start, because its result cannot be found "
            f"again: {str(error).rstrip('.')}. Or pass identity=, a text that changes with what "
            f"{what}() is given."
        )
        return None


def _digest_of_samples(samples: list[Any] | tuple[Any, ...]) -> str:
    hashed = xxhash.xxh3_128()
    for sample in samples:
        try:
            packed = pack(sample)
        except RecipeError as error:
            raise NoIdentity(str(error)) from error
        hashed.update(len(packed).to_bytes(8, "little"))
        hashed.update(packed)
    return f"samples-{len(samples)}-{hashed.hexdigest()}"


class _Describer:
    """Turns values into lists of text that are equal if the values are."""

    def __init__(self) -> None:
        self._known: dict[int, list[Any]] = {}
        self._alive: list[Any] = []  # an id is that of one object as long as it lives
        self._within: list[int] = []  # what is being described: a function may call itself

    def value(self, value: Any) -> list[Any]:
        if isinstance(value, float) and not isinstance(value, np.generic):
            return ["float", value.hex()]
        if isinstance(value, _PLAIN + _NAMES):
            return [type(value).__name__, repr(value)]
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _array(value)
        if id(value) in self._within:
            return ["itself", self._within.index(id(value))]
        if len(self._within) > _MOST_DEPTH:
            raise NoIdentity(f"something is nested more than {_MOST_DEPTH} deep")
        if id(value) not in self._known:
            self._alive.append(value)
            self._within.append(id(value))
            shown = self._container(value) or self._callable(value) or self._other(value)
            self._within.pop()
            self._known[id(value)] = [xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(shown))]
        return self._known[id(value)]

    def _container(self, value: Any) -> list[Any] | None:
        if isinstance(value, set | frozenset):
            return ["set", *sorted(self.value(part) for part in value)]
        if isinstance(value, Mapping):
            parts = [part for pair in value.items() for part in pair]
            return [type(value).__qualname__, *map(self.value, parts)]
        if isinstance(value, list | tuple):
            return [type(value).__qualname__, *map(self.value, value)]
        return None

    def _callable(self, value: Any) -> list[Any] | None:
        if isinstance(value, functools.partial):
            return ["partial", *map(self.value, (value.func, value.args, value.keywords))]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__self__), self.value(value.__func__)]
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            bound = getattr(value, "__self__", None)
            if bound is not None and not isinstance(bound, types.ModuleType):
                return ["built-in", value.__name__, self.value(bound)]
        if isinstance(value, types.MethodDescriptorType):
            return ["built-in", value.__name__, self.value(value.__objclass__)]
        if isinstance(value, np.ufunc):
            return ["ufunc", value.__name__, np.__version__]
        if isinstance(value, types.ModuleType):
            if not _is_of_a_library(value):
                raise NoIdentity(f"what is used of the module {value.__name__} is not known")
            return ["module", *_version_of(value.__name__)]
        if _is_foreign(value):
            return ["foreign", *_version_of(value.__module__), value.__qualname__]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        return self._type(value) if isinstance(value, type) else None

    def _function(self, function: types.FunctionType) -> list[Any]:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        codes = list(_codes(function.__code__))
        names = sorted({name for code in codes for name in code.co_names})
        outside = function.__globals__
        try:
            found = [*_imported(codes, outside), *cells]
            for name in sorted(_globals(codes) & outside.keys()):
                found += [name, outside[name]]
            used = [list(_followed(value, names)) for value in found]
            refers_to = self.value([function.__defaults__, function.__kwdefaults__, used])
        except NoIdentity as error:
            raise NoIdentity(f"{function.__qualname__} refers to this: {error}") from None
        return ["function", self._code(function.__code__), refers_to]

    def _code(self, code: types.CodeType) -> list[Any]:
        constants = [
            self._code(part) if isinstance(part, types.CodeType) else self.value(part)
            for part in code.co_consts
        ]
        return [code.co_code.hex(), list(code.co_names), list(code.co_varnames), constants]

    def _type(self, kind: type) -> list[Any]:
        shown: list[Any] = [kind.__qualname__]
        if issubclass(kind, msgspec.Struct):
            config = kind.__struct_config__
            shown += [kind.__struct_encode_fields__, len(kind.__struct_defaults__)]
            shown += [config.forbid_unknown_fields, config.array_like, config.tag, config.tag_field]
        try:
            shown += [typing.get_type_hints(kind, include_extras=True)]
        except (NameError, TypeError, AttributeError) as error:
            raise NoIdentity(f"an annotation of {kind.__qualname__} is unknown: {error}") from None
        members = {name: _member(name, value) for name, value in vars(kind).items()}
        return ["type", *map(self.value, [*shown, members, *kind.__bases__])]

    def _other(self, value: Any) -> list[Any]:
        if isinstance(value, re.Pattern):
            return ["pattern", repr(value.pattern), value.flags]
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__qualname__, value.name, self.value(value.value)]
        if isinstance(value, operator.itemgetter | operator.attrgetter | operator.methodcaller):
            return ["getter", *map(self.value, value.__reduce__())]
        if callable(getattr(value, "identity", None)) or isinstance(value, _SOURCES):
            return ["source", identity_of(value)]
        if isinstance(value, msgspec.Struct):
            parts = [getattr(value, name) for name in value.__struct_fields__]
            return ["struct", self.value(type(value)), *map(self.value, parts)]
        if typing.get_origin(value) is not None:
            metadata = getattr(value, "__metadata__", ())
            parts = [typing.get_origin(value), *typing.get_args(value), *metadata]
            return ["annotation", *map(self.value, parts)]
        if isinstance(value, msgspec.Meta) or type(value).__module__ == "typing":
            return ["annotation", repr(value)]
        if hasattr(value, "__dict__") and not _is_foreign(type(value)):
            return ["object", self.value(type(value)), self.value(vars(value))]
        raise NoIdentity(
            f"a {type(value).__module__}.{type(value).__qualname__} cannot be told from another"
        )


def _array(value: Any) -> list[Any]:
    """An array or tensor by type, shape and bytes, which are not copied if they lie together."""
    hashed = xxhash.xxh3_128()
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise NoIdentity(f"a {value.layout} tensor is not told from another")
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        if tensor.numel():
            num_rows = max(1, _CHUNK_BYTES * len(tensor) // tensor.nbytes) if tensor.dim() else 1
            parts = [tensor] if tensor.is_contiguous() else tensor.split(num_rows)
            for part in parts:
                hashed.update(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        return ["tensor", str(value.dtype), list(value.shape), hashed.hexdigest()]
    array = np.ascontiguousarray(value)
    if array.dtype.hasobject:
        raise NoIdentity(f"an array of {array.dtype} is not told from another")
    if array.size:
        hashed.update(array.reshape(-1).view(np.uint8).data)
    kind = "array" if isinstance(value, np.ndarray) else "number"
    return [kind, repr(array.dtype), list(np.shape(value)), hashed.hexdigest()]


def _member(name: str, value: Any) -> Any:
    """What an entry of a class says of its behaviour: a method, however bound, or a plain value."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    is_plain = isinstance(value, _MEMBERS) and not name.startswith("__")
    return value if is_plain or isinstance(value, types.FunctionType) else None


def _followed(value: Any, names: list[str]) -> Iterator[Any]:
    """A value that code refers to; of a module of the user's own, what the code may use of it."""
    if not _is_own(value):
        yield value
        return
    known: list[types.ModuleType] = []

    def follow(module: types.ModuleType) -> Iterator[Any]:
        known.append(module)
        for name in names:
            if hasattr(module, name):
                part = getattr(module, name)
                yield name
                if not _is_own(part):
                    yield part
                elif part not in known:
                    yield from follow(part)

    found = list(follow(value))
    yield from found or [value]


def _is_own(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and not _is_of_a_library(value)


def _imported(codes: list[types.CodeType], outside: dict[str, Any]) -> Iterator[Any]:
    """What code imports when it runs."""
    for code in codes:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for at, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":
                level, parts = steps[at - 2].argval, steps[at - 1].argval
                yield from _import("." * level + step.argval, parts or (), outside)


def _import(name: str, parts: tuple[str, ...], outside: dict[str, Any]) -> Iterator[Any]:
    """What `from name import parts` binds, or `import name`, which is the first of its packages."""
    try:
        module = importlib.import_module(name, outside.get("__package__"))
        for part in parts:
            if not hasattr(module, part):  # it is a module itself, or there is no such thing
                importlib.import_module(f"{module.__name__}.{part}")
    except ModuleNotFoundError as error:  # code may be prepared for that
        yield f"without {error.name}"
        return
    except Exception as error:
        raise NoIdentity(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
    if parts:
        yield from (getattr(module, part) for part in parts)
    else:
        yield sys.modules[module.__name__.partition(".")[0]]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


def _globals(codes: list[types.CodeType]) -> set[str]:
    steps = (step for code in codes for step in dis.get_instructions(code))
    return {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return None


def _is_foreign(value: Any) -> bool:
    """Whether a function or type belongs to Python or to an installed library."""
    if isinstance(value, types.FunctionType):
        file = value.__code__.co_filename
        return file.startswith("<frozen ") or _is_installed(file)
    name, home = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(home, str):
        return False
    module = sys.modules.get(home)
    if module is None or not _is_of_a_library(module):
        return False
    # The user's own file may be called like a module of Python; then its types are not there.
    try:
        return operator.attrgetter(name)(module) is value
    except AttributeError:
        return not isinstance(value, type)


def _is_of_a_library(module: types.ModuleType) -> bool:
    if module.__name__ == "__main__":
        return False
    top = sys.modules.get(module.__name__.partition(".")[0], module)
    file = getattr(module, "__file__", None) or getattr(top, "__file__", None)
    if file is None:
        return module.__name__ in sys.builtin_module_names
    return _is_installed(str(file))


def _is_installed(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(folder in file for folder in _INSTALLED)


def _version_of(module: str) -> list[str]:
    top = module.partition(".")[0]
    version = getattr(sys.modules.get(top), "__version__", None)
    return [module, str(version or sys.version)]
