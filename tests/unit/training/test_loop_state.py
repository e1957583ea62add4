"""`trainer.state`: what it carries and how it comes back, without ranks."""

from collections import Counter, deque
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from shoal.errors import RecipeError, UsageError
from shoal.parallel.layout import whole_slice
from shoal.sync.state import MemorySource, ShardedState
from shoal.training.loop_state import LoopState


def carried(state: LoopState) -> tuple[dict[str, Any], MemorySource]:
    """What a peer, or a checkpoint, has of a state: JSON and tensors."""
    plain, tensors, _ = state.pack()
    plain = msgspec.json.decode(msgspec.json.encode(plain))
    named = {f"x.{number}": [whole_slice(tensor.clone())] for number, tensor in enumerate(tensors)}
    return plain, MemorySource(ShardedState(named, {}))


def handed_over(state: LoopState, to: LoopState, exact: bool = True) -> None:
    plain, source = carried(state)
    to.arrive(plain, source, "x.", exact)


def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.MultiStepLR:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


@pytest.mark.parametrize(
    "value",
    [
        1,
        -(1 << 63),
        0.1,
        float("inf"),
        True,
        None,
        "text, \u00e9",
        (1, [2.5, {"a": None, 3: "b"}]),
        [],
        {"a.b": 1, "a": {"b": 2}},
    ],
)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    state, other = LoopState(), LoopState()
    state["value"] = value
    handed_over(state, other)
    assert other["value"] == value and type(other["value"]) is type(value)
    other.begin()
    assert other == {"value": value}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    state, other = LoopState(), LoopState()
    state["t"] = {"a": torch.arange(6).to(dtype).view(2, 3), "b": [torch.tensor(3).to(dtype)]}
    handed_over(state, other)
    other.begin()
    assert torch.equal(other["t"]["a"], state["t"]["a"]) and other["t"]["a"].dtype == dtype
    assert torch.equal(other["t"]["b"][0], state["t"]["b"][0])


def test_what_arrives_wins_over_first_values_and_keeps_what_the_script_holds() -> None:
    state, other = LoopState(), LoopState()
    state["best"], state["ema"], state["gone"] = 0.25, [torch.ones(3)], 1
    del state["gone"]
    handed_over(state, other)
    assert other.get("best") == 0.25, "it can be read before the loop"
    ema = [torch.zeros(3)]
    tensor = ema[0]
    other["best"], other["ema"], other["gone"] = 9.0, ema, 1
    other.begin()
    assert other["best"] == 0.25 and other["ema"] is ema and ema[0] is tensor
    assert tensor.tolist() == [1.0] * 3 and "gone" not in other
    other["best"] = 7.0
    other.begin()
    assert other["best"] == 7.0, "it arrived once"


def test_what_a_checkpoint_does_not_know_of_stays() -> None:
    state, other = LoopState(), LoopState()
    state["old"] = 1
    handed_over(state, other, exact=False)
    other["new"] = 2
    other.begin()
    assert other == {"old": 1, "new": 2}


def test_objects_take_their_state_when_the_script_has_made_them() -> None:
    first, second = (torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0) for _ in range(2))
    state, other = LoopState(), LoopState()
    state["scheduler"], state["ema"] = scheduler(first), nn.Linear(2, 2)
    for _ in range(3):
        first.step()
        state["scheduler"].step()
    handed_over(state, other)
    assert "scheduler" not in other
    other["scheduler"], other["ema"] = scheduler(second), nn.Linear(2, 2)
    other.begin()
    assert other["scheduler"].last_epoch == 3
    assert isinstance(other["scheduler"].milestones, Counter)
    assert torch.equal(other["ema"].weight, state["ema"].weight)


def test_an_object_that_the_script_does_not_make_is_named() -> None:
    state, other = LoopState(), LoopState()
    state["ema"] = nn.Linear(1, 1)
    handed_over(state, other)
    with pytest.raises(RecipeError, match=r"trainer.state\['ema'\] has the state of a Linear"):
        other.begin()


def test_a_state_that_has_not_begun_can_be_handed_on() -> None:
    state, other, third = LoopState(), LoopState(), LoopState()
    state["ema"], state["n"] = nn.Linear(1, 1), 3
    handed_over(state, other)
    handed_over(other, third)
    third["ema"] = nn.Linear(1, 1)
    third.begin()
    assert third["n"] == 3 and torch.equal(third["ema"].weight, state["ema"].weight)


class Odd:
    """Whose state is not made of plain values."""

    def state_dict(self) -> dict[str, Any]:
        return {"queue": deque()}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), r"trainer.state\['x'\] is of the type object"),
        ([1, {2: deque()}], r"trainer.state\['x'\]\[1\]\[2\] is of the type deque"),
        (Counter("a"), "of the type Counter"),
        (b"bytes", "of the type bytes"),
        (1 << 64, "more than 64 bits"),
        ("\ud800", "of the type str"),
        ({(1, 2): 3}, r"the key \(1, 2\), a tuple"),
        (Odd(), r"\['queue'\] is of the type deque"),
        (torch.eye(2).to_sparse(), "a tensor that is sparse"),
        (torch.ones(1, dtype=torch.complex128), "a tensor that is complex128"),
        (SELF, "holds itself"),
    ],
)
def test_what_cannot_be_carried_is_named(value: Any, said: str) -> None:
    state = LoopState()
    state["x"] = value
    with pytest.raises(RecipeError, match=said):
        state.pack()


def test_keys_are_text() -> None:
    with pytest.raises(UsageError, match="a key is text"):
        LoopState()[3] = 1  # type: ignore[index]


def test_descriptions_differ_where_values_do() -> None:
    state, other = LoopState(), LoopState()
    for one in (state, other):
        one["a"], one["t"] = [1, float("nan")], torch.zeros(4096)
    assert state.described(True) == other.described(True)
    other["t"][77] = 1.0
    assert state.described(False) == other.described(False), "large tensors are not looked at"
    told = state.described(True), other.described(True)
    assert {k for k in told[0] if told[0][k] != told[1][k]} == {"trainer.state['t']"}
    other["a"][0] = 2
    told = state.described(False), other.described(False)
    assert {k for k in told[0] if told[0][k] != told[1][k]} == {"trainer.state['a'][0]"}
