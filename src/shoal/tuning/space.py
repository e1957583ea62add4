"""What a study searches: parameters and their ranges, as one line of text or as a Python function.

    lr=log:1e-5..3e-2  width=8|16|64  depth=int:1..4  dropout=0..0.5/0.1

`low..high` is a range of numbers, `int:` of whole ones, `log:` by their logarithm; `/step` is the
distance of its values; `a|b|c` are choices. A function of `file.py:function` takes an Optuna trial
and returns a mapping of names to values, so that a range may depend on what was drawn before.

All of it is text and arithmetic: it loads neither Optuna nor torch. A text that cannot be read is
refused with the place of the character and the nearest form that could be meant.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn, Protocol, Self

from shoal.errors import RecipeError, ShoalError, UsageError, nearest

Value = str | int | float | bool | None
_WORD = re.compile(r"[^\s,]+")
_NAME = re.compile(r"[^\W\d]\w*")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_OTHER_RANGE = re.compile(rf"[\[(]?({_NUMBER})(?:-|:|\.\.\.|to|;)({_NUMBER})[\])]?")
_SCALES = ("int", "log")
FORMS = "lr=log:1e-5..3e-2, width=8|64, depth=int:1..4 or wd=0..0.1"


class SpaceError(UsageError):
    """A space that cannot be searched, with the place of what is wrong in its text."""


class Draws(Protocol):
    """What draws values: a trial of Optuna."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int: ...

    def suggest_categorical(self, name: str, choices: Any) -> Any: ...


class Dimension(NamedTuple):
    """One parameter and its range. With `choices` nothing else counts."""

    name: str
    choices: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    step: float | None = None
    is_int: bool = False
    is_log: bool = False

    def draw(self, trial: Draws) -> Value:
        if self.choices:
            drawn: Value = trial.suggest_categorical(self.name, self.choices)
            return drawn
        if self.is_int:
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            return trial.suggest_int(self.name, low, high, step=step, log=self.is_log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.is_log)

    def grid(self) -> tuple[Value, ...]:
        """Every value, for a search of all of them; SpaceError if there is no end of them."""
        if self.choices:
            return self.choices
        step = self.step or (1 if self.is_int else None)
        if step is None:
            raise SpaceError(
                f"A grid tries every value, and {self} has no end of them. Give choices, as in "
                f"{self.name}={_shown(self.low)}|{_shown(self.high)}, or a step, as in "
                f"{self.name}={_shown(self.low)}..{_shown(self.high)}/"
                f"{(self.high - self.low) / 4:.1g}."
            )
        count = math.floor((self.high - self.low) / step + 1e-9) + 1
        if self.is_int:
            return tuple(int(self.low) + i * int(step) for i in range(count))
        return tuple(self.low + i * step for i in range(count))

    def __str__(self) -> str:
        if self.choices:
            return f"{self.name}={'|'.join(map(_shown, self.choices))}"
        scale = "int:" * self.is_int + "log:" * self.is_log
        step = "" if self.step is None else f"/{_shown(self.step)}"
        return f"{self.name}={scale}{_shown(self.low)}..{_shown(self.high)}{step}"


class Space(NamedTuple):
    """The dimensions of a text or of a mapping."""

    dimensions: tuple[Dimension, ...]

    def draw(self, trial: Draws) -> dict[str, Value]:
        """A value for each parameter."""
        return {one.name: one.draw(trial) for one in self.dimensions}

    def grid(self) -> dict[str, tuple[Value, ...]]:
        return {one.name: one.grid() for one in self.dimensions}

    def __str__(self) -> str:
        return " ".join(map(str, self.dimensions))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `name=range` words, separated by spaces or commas."""
        found: dict[str, Dimension] = {}
        for word in _WORD.finditer(text):
            dimension = _read_word(_Place(word.group(), word.start()))
            if dimension.name in found:
                _Place(word.group(), word.start()).refuse(
                    f"{dimension.name} is given twice. Give it once."
                )
            found[dimension.name] = dimension
        return cls._of(found.values())

    @classmethod
    def of_mapping(cls, given: Mapping[str, Any]) -> Self:
        """Names to ranges: the same texts, or a list of choices."""
        return cls._of([_of_value(name, value) for name, value in given.items()])

    @classmethod
    def _of(cls, dimensions: Iterable[Dimension]) -> Self:
        space = cls(tuple(dimensions))
        if not space.dimensions:
            raise SpaceError(f"The space is empty. Name a parameter and its range, as in {FORMS}.")
        return space


class SpaceFunction(NamedTuple):
    """A function of a trial that returns names and values."""

    name: str  # in records
    function: Callable[[Any], Any]

    def draw(self, trial: Draws) -> dict[str, Value]:
        try:
            drawn = self.function(trial)
        except ShoalError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise RecipeError(f"The space {self.name} failed: {what}") from error
        if not isinstance(drawn, Mapping) or not drawn:
            what = "nothing" if not drawn else f"a {type(drawn).__name__}"
            raise SpaceError(
                f"The space {self.name} returned {what}. It returns a mapping of the recipe's "
                "settings to the values drawn, as in {'lr': trial.suggest_float('lr', 1e-5, 1)}."
            )
        for name, value in drawn.items():
            if not isinstance(name, str) or not isinstance(value, Value):
                raise SpaceError(
                    f"The space {self.name} returned {name!r}: {value!r}. Names are texts, and "
                    "values numbers, texts, booleans or None, as `--set` could set them."
                )
        return dict(drawn)

    def __str__(self) -> str:
        return self.name


AnySpace = Space | SpaceFunction


class EdgeValues:
    """Draws the first value of every range, or the last, to see what a space sets before anything
    runs."""

    number = 0

    def __init__(self, *, is_last: bool = False):
        self._is_last = is_last

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return high if self._is_last else low

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        return high - (high - low) % step if self._is_last else low

    def suggest_categorical(self, name: str, choices: Any) -> Any:
        return list(choices)[-1 if self._is_last else 0]

    def set_user_attr(self, key: str, value: Any) -> None:
        """Kept by a trial of Optuna; there is none yet."""


def names_function(text: str) -> bool:
    """Whether a text names a function (`file.py:space`), and is not a space itself."""
    return "=" not in text and ":" in text.strip(":") and len(text.split()) == 1


def setting(value: Value) -> str:
    """A value as `--set` takes it."""
    return str(value)


class _Place(NamedTuple):
    """A part of a space's text, and where it begins."""

    text: str
    start: int
    name: str = ""  # of the parameter, if it is not part of the text

    def after(self, count: int) -> "_Place":
        return self._replace(text=self.text[count:], start=self.start + count)

    def refuse(self, why: str) -> NoReturn:
        where = self.name or f"The space, character {self.start + 1}"
        raise SpaceError(f"{where}: {self.text!r}: {why}")


def _read_word(word: _Place) -> Dimension:
    name, equals, _ = word.text.partition("=")
    if not equals:
        word.refuse(f"this is not name=range. Write it as in {FORMS}.")
    if not _NAME.fullmatch(name):
        word.refuse(f"{name!r} is no name of a parameter. Write the range as in {FORMS}.")
    return _read_range(name, word.after(len(name) + 1))


def _read_range(name: str, given: _Place) -> Dimension:
    if not given.text:
        given._replace(text=f"{name}=").refuse(f"the range is missing. Write it as in {FORMS}.")
    if "|" in given.text:
        return Dimension(name, choices=_read_choices(given))
    scales, rest = _read_scales(given)
    low_text, dots, high_text = rest.text.partition("..")
    if not dots or "..." in rest.text:
        _refuse_no_range(name, rest)
    high_text, slash, _ = high_text.partition("/")
    low = _read_bound(rest._replace(text=low_text), scales)
    after = rest.after(len(low_text) + 2)
    high = _read_bound(after._replace(text=high_text), scales)
    step = None
    if slash:
        step = _read_bound(after.after(len(high_text) + 1), scales)
    _check_range(rest, low, high, step, scales)
    return Dimension(
        name, low=low, high=high, step=step, is_int="int" in scales, is_log="log" in scales
    )


def _read_choices(given: _Place) -> tuple[Value, ...]:
    choices: list[Value] = []
    at = 0
    for text in given.text.split("|"):
        place = given.after(at)._replace(text=text)
        value = _value_of(text)
        if not text:
            given.refuse("a choice is empty. Write choices as in 8|16|64.")
        if value in choices:
            place.refuse("this choice is given twice. Give it once.")
        choices.append(value)
        at += len(text) + 1
    return tuple(choices)


def _value_of(text: str) -> Value:
    """A choice as what it looks like, so that studies show numbers as numbers."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        return value if math.isfinite(value) and "_" not in text else text
    return text


def _read_scales(given: _Place) -> tuple[set[str], _Place]:
    scales: set[str] = set()
    while ":" in given.text:
        scale = given.text.partition(":")[0]
        if _OTHER_RANGE.fullmatch(given.text):
            break
        if scale not in _SCALES:
            given.refuse(f"there is no scale {scale!r}. {nearest(scale, _SCALES)}")
        if scale in scales:
            given.refuse(f"{scale}: is given twice. Give it once.")
        scales.add(scale)
        given = given.after(len(scale) + 1)
    return scales, given


def _refuse_no_range(name: str, rest: _Place) -> NoReturn:
    meant = _OTHER_RANGE.fullmatch(rest.text)
    if meant:
        low, high = meant.groups()
        rest.refuse(f"this is no range. Did you mean {low}..{high}, or the choices {low}|{high}?")
    if "..." in rest.text:
        rest.refuse("a range has two dots. Write it as in 1..4.")
    rest.refuse(
        f"this is one value, and no range. Set it by --set {name}={rest.text}, or write a range "
        f"as in {FORMS}."
    )


def _read_bound(place: _Place, scales: set[str]) -> float:
    try:
        value = float(place.text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or "_" in place.text:
        place.refuse("this is no number. A range is two numbers, as in 1e-5..3e-2.")
    if "int" in scales and value != int(value):
        place.refuse("this is no whole number, as int: asks for. Leave int: out, or round it.")
    return value


def _check_range(
    place: _Place, low: float, high: float, step: float | None, scales: set[str]
) -> None:
    if low >= high:
        place.refuse(f"{_shown(low)} is not below {_shown(high)}. A range is low..high.")
    if "log" in scales and low <= 0:
        place.refuse("log: needs a range above 0. Begin with a small number, as in log:1e-5..1.")
    if step is None:
        return
    if "log" in scales:
        place.refuse("log: and a step do not go together. Leave one of them out.")
    if not 0 < step <= high - low:
        place.refuse(f"the step {_shown(step)} is not above 0 and within the range.")


def _of_value(name: str, given: Any) -> Dimension:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpaceError(f"{name!r} is no name of a parameter.")
    if isinstance(given, str):
        return _read_range(name, _Place(given, 0, name))
    if isinstance(given, list | tuple) and all(isinstance(value, Value) for value in given):
        if len(set(given)) < max(2, len(given)):
            raise SpaceError(
                f"{name}: {given!r}: give at least two choices, each once. One value is for "
                f"settings={{{name!r}: ...}}."
            )
        return Dimension(name, choices=tuple(given))
    raise SpaceError(
        f"{name}: {given!r} is no range. Give a text such as 'log:1e-5..3e-2', or a list of "
        "choices."
    )


def _shown(value: Value) -> str:
    """A number as it is written: whole ones without a point."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return str(value)
