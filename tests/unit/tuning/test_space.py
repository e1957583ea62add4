"""The text of a space: what it means, what it prints, and what is refused with which words."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.tuning.space import (
    Dimension,
    EdgeValues,
    Space,
    SpaceError,
    SpaceFunction,
    names_function,
    setting,
)

NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-6)
WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)


@st.composite
def dimensions(draw: st.DrawFn, name: str) -> Dimension:
    if draw(st.booleans()):
        choices = draw(st.lists(st.one_of(st.integers(), WORDS), min_size=2, unique=True))
        return Dimension(name, choices=tuple(choices))
    is_int, is_log = draw(st.booleans()), draw(st.booleans())
    low = draw(st.integers(1, 50)) if is_int else draw(st.floats(1e-5, 50))
    high = low + (draw(st.integers(1, 50)) if is_int else draw(st.floats(0.1, 50)))
    step = None
    if not is_log and draw(st.booleans()):
        step = float(draw(st.integers(1, int(high - low)))) if is_int else (high - low) / 2
    return Dimension(name, (), float(low), float(high), step, is_int, is_log)


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    return Space(tuple(draw(dimensions(name)) for name in names))


@given(spaces())
def test_a_space_is_read_as_it_prints(space: Space) -> None:
    assert Space.parse(str(space)) == space


@given(spaces())
def test_first_values_are_in_the_ranges(space: Space) -> None:
    drawn = space.draw(EdgeValues())
    assert list(drawn) == [one.name for one in space.dimensions]
    for one in space.dimensions:
        value = drawn[one.name]
        assert value == (one.choices[0] if one.choices else one.low)
        assert "=" not in setting(value)


@given(spaces())
def test_last_values_are_in_the_ranges(space: Space) -> None:
    drawn = space.draw(EdgeValues(is_last=True))
    for one in space.dimensions:
        value = drawn[one.name]
        if one.choices:
            assert value == one.choices[-1]
        else:
            assert isinstance(value, int | float) and one.low <= value <= one.high


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert Space.parse(text).dimensions
    except SpaceError as error:
        assert str(error)


def test_the_space_of_the_contract() -> None:
    space = Space.parse("lr=log:1e-5..3e-2 width=8|64, depth=int:1..4 wd=0..0.1")
    assert space.dimensions == (
        Dimension("lr", low=1e-5, high=3e-2, is_log=True),
        Dimension("width", choices=(8, 64)),
        Dimension("depth", low=1, high=4, is_int=True),
        Dimension("wd", low=0, high=0.1),
    )


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("lr", 1, "not name=range"),
        ("a=1..2 lr=", 11, "the range is missing"),
        ("lr=lg:1..2", 4, "Did you mean 'log'?"),
        ("a=int:int:1..2", 7, "given twice"),
        ("width=8", 7, "--set width=8"),
        ("a=1-4", 3, "Did you mean 1..4, or the choices 1|4?"),
        ("a=8:64", 3, "Did you mean 8..64"),
        ("a=1...4", 3, "Did you mean 1..4"),
        ("a=1..x", 6, "no number"),
        ("a=nan..2", 3, "no number"),
        ("a=1..inf", 6, "no number"),
        ("a=2..1", 3, "2 is not below 1"),
        ("a=1..1", 3, "not below"),
        ("a=log:0..1", 7, "above 0"),
        ("a=int:1.5..3", 7, "no whole number"),
        ("a=0..1/2", 3, "within the range"),
        ("a=log:1..2/0.5", 7, "do not go together"),
        ("a=8||64", 3, "a choice is empty"),
        ("a=8|16|8", 8, "given twice"),
        ("a=1|2 a=2|3", 7, "a is given twice"),
        ("1a=2|3", 1, "no name of a parameter"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, place: int, words: str) -> None:
    with pytest.raises(SpaceError, match="character") as refused:
        Space.parse(text)
    assert f"character {place}:" in str(refused.value)
    assert words in str(refused.value)


@pytest.mark.parametrize("empty", ["", "  ", ",", " , "])
def test_an_empty_space_is_refused(empty: str) -> None:
    with pytest.raises(SpaceError, match="The space is empty"):
        Space.parse(empty)
    with pytest.raises(SpaceError, match="The space is empty"):
        Space.of_mapping({})


def test_a_mapping_has_texts_and_choices() -> None:
    space = Space.of_mapping({"lr": "log:1e-3..1", "width": [8, 64], "bias": (True, False)})
    assert [str(one) for one in space.dimensions][:2] == ["lr=log:0.001..1", "width=8|64"]
    assert space.dimensions[2].choices == (True, False)


@pytest.mark.parametrize("wrong", [{"a": 3}, {"a": [1]}, {"a": [1, 1]}, {"a": "x"}, {"1": "1..2"}])
def test_a_mapping_that_is_none_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpaceError):
        Space.of_mapping(wrong)


def test_a_grid_has_every_point() -> None:
    assert Space.parse("a=int:1..7/3 b=x|y c=0..1/0.25").grid() == {
        "a": (1, 4, 7),
        "b": ("x", "y"),
        "c": (0.0, 0.25, 0.5, 0.75, 1.0),
    }
    with pytest.raises(SpaceError, match=r"0\.1\.\.0\.5/0\.1"):
        Space.parse("a=0.1..0.5").grid()


@given(st.floats(-100, 100), st.floats(0.01, 10), st.integers(1, 50))
def test_a_grid_stays_in_its_range(low: float, step: float, count: int) -> None:
    grid = Dimension("a", low=low, high=low + count * step, step=step).grid()
    assert len(grid) == count + 1
    assert all(math.isclose(float(x or 0), low + i * step) for i, x in enumerate(grid))


def test_names_of_functions_are_told_from_spaces() -> None:
    assert names_function("a.py:space") and names_function("package.module:space")
    assert not names_function("lr=log:1..2") and not names_function("log:1..2 a")
    assert not names_function("space")


@pytest.mark.parametrize("answer", [None, {}, [1], {"a": [1]}, {1: 2}])
def test_a_function_must_return_settings(answer: object) -> None:
    with pytest.raises(UsageError, match="The space f returned"):
        SpaceFunction("f", lambda trial: answer).draw(EdgeValues())
