"""Recipes by name: `file.py:function` or `module:function`, with values set from outside.

`--set name=value` reaches the recipe's own parameters first, then the fields of the Run it
returns. Values are read by the type of the annotation or of the default.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.data.identity import content_name
from shoal.data.orders import order_name, order_of
from shoal.data.sources import recorded_name
from shoal.errors import RecipeError, ShoalError, UsageError, nearest
from shoal.training.options import SETTABLE, check_settings
from shoal.training.run import Run


def load_recipe(given: str | Run | Callable[..., Any], settings: Mapping[str, str]) -> Run:
    """The Run of a recipe, called by its name or as a function, with what was set."""
    check_settings(settings)
    if isinstance(given, Run):
        _refuse_unknown(settings, SETTABLE, "a Run does not have it, or not from outside")
        return _with_fields(given, settings)
    spec = given if isinstance(given, str) else _name_of(given)
    function = find_recipe(given) if isinstance(given, str) else given
    parameters = parameters_of(function, spec)
    _refuse_unknown(settings, [*parameters, *SETTABLE], f"neither {spec} nor a Run has it")
    own = {k: _read(k, v, parameters[k]) for k, v in settings.items() if k in parameters}
    try:
        run = function(**own)
    except ShoalError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"The recipe {spec} failed: {what}") from error
    if not isinstance(run, Run):
        raise UsageError(
            f"The recipe {spec} returned a {type(run).__name__}. A recipe returns a shoal.Run."
        )
    return _with_fields(run, {k: v for k, v in settings.items() if k not in own})


def _refuse_unknown(settings: Mapping[str, str], known: Sequence[str], why: str) -> None:
    for name in settings:
        if name not in known:
            raise UsageError(f"--set {name}: {why}. {nearest(name, known)}")


def find_recipe(spec: str, what: str = "recipe") -> Callable[..., Any]:
    """The function of `file.py:function` or `module:function`; `what` it is in messages."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where:
        raise UsageError(
            f"{spec!r} names no {what}. Write file.py:function or module:function, "
            f"such as {spec.rstrip(':') or 'train.py'}:small."
        )
    module = _load_file(where, spec, what) if where.endswith(".py") else _import(where, spec)
    function = getattr(module, name, None)
    if function is None:
        public = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise UsageError(f"{where} has no {what} {name!r}. {nearest(name, public)}")
    if not callable(function):
        kind, returns = type(function).__name__, " that returns a Run" * (what == "recipe")
        raise UsageError(f"{spec} is a {kind}. A {what} is a function{returns}.")
    found: Callable[..., Any] = function
    return found


def provenance(run: Run, settings: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Each plain value of a run and where it came from; and what its data holds, in which order."""
    described = {}
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        if field.name == "callbacks":
            value = ", ".join(map(recorded_name, value))
        plain = isinstance(value, str | int | float | None)
        if field.name in settings:
            origin = "--set"
        else:
            origin = "default" if plain and value in (field.default, "") else "recipe"
        described[field.name] = {"value": value if plain else _name_of(value), "from": origin}
    described["data_content"] = {"value": content_name(run.data), "from": "data"}
    order = order_name(order_of(run.data), run.seed)
    described["data_order"] = {"value": order, "from": "data"}
    return described


def _with_fields(run: Run, settings: Mapping[str, str]) -> Run:
    types_of = typing.get_type_hints(Run)
    fields = {name: _read(name, text, types_of[name]) for name, text in settings.items()}
    if "steps" in fields and "epochs" not in fields:
        fields["epochs"] = None
    if "epochs" in fields and "steps" not in fields:
        fields["steps"] = None
    return dataclasses.replace(run, **fields)


def parameters_of(function: Callable[..., Any], spec: str) -> dict[str, Any]:
    """The recipe's parameters and their types."""
    hints = _hints(function, spec) if inspect.isroutine(function) else {}
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        default = parameter.default
        guess = str if default is parameter.empty or default is None else type(default)
        found[name] = hints.get(name, guess)
    return found


def _hints(function: Callable[..., Any], spec: str) -> dict[str, Any]:
    """The types of a function's parameters. One of a script or a notebook comes to another process
    without the names that only annotations use: those are left out."""
    try:
        return typing.get_type_hints(function)
    except NameError as error:
        if function.__module__ != "__main__":
            raise UsageError(f"An annotation of {spec} cannot be read: {error}.") from error
    found: dict[str, Any] = {}
    for name, hint in function.__annotations__.items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        with suppress(NameError):
            found |= typing.get_type_hints(one, getattr(function, "__globals__", {}))
    return found


def _read(name: str, text: str, kind: Any) -> Any:
    """A value of the given type from text."""
    options = list(typing.get_args(kind)) if isinstance(kind, types.UnionType) else [kind]
    if type(None) in options and text.lower() == "none":
        return None
    options = [option for option in options if option is not type(None)]
    for option in options:
        try:
            if option is bool:
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            if option in (int, float, str):
                return option(text)
        except (ValueError, KeyError):
            continue
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise UsageError(f"--set {name}={text}: {text!r} is not {names}, which {name} must be.")


def _load_file(where: str, spec: str, what: str) -> types.ModuleType:
    path = Path(where).resolve()
    if not path.is_file():
        raise UsageError(f"There is no {what} file {where}. Give a path to a Python file.")
    sys.path.insert(0, str(path.parent))
    name = f"recipe_{path.stem}"  # a file called copy.py must not stand in for another module
    definition = importlib.util.spec_from_file_location(name, path)
    assert definition is not None and definition.loader is not None
    module = importlib.util.module_from_spec(definition)
    sys.modules[name] = module
    return _executed(spec, lambda: definition.loader.exec_module(module), module)  # type: ignore[union-attr]


def _import(where: str, spec: str) -> types.ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and where.startswith(error.name):
            raise UsageError(f"There is no module {where}, which {spec} names.") from None
        raise RecipeError(f"The recipe {spec} cannot be loaded: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"The recipe {spec} cannot be loaded: {what}") from error


def _executed(spec: str, load: Callable[[], None], module: types.ModuleType) -> types.ModuleType:
    try:
        load()
    except ShoalError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"The recipe {spec} cannot be loaded: {what}") from error
    return module


def _name_of(value: Any) -> str:
    return getattr(value, "__qualname__", recorded_name(value))
