"""Fault points: armed by text, hit once, silent otherwise."""

import pytest
import torch

from shoal import faults
from shoal.faults import Fault, InjectedError, faultpoint, parse


@pytest.fixture(autouse=True)
def disarmed():
    yield
    faults._armed.clear()


def test_text_is_read() -> None:
    assert parse("step.begin:kill:member=1:step=20,seat.here:raise") == [
        Fault("step.begin", "kill", 1, 20),
        Fault("seat.here", "raise", None, None),
    ]
    assert parse("") == []


@pytest.mark.parametrize("text", ["step.begin:explode", "p:kill:rank=1", "p:kill:step=x", "p"])
def test_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_a_fault_happens_once_at_its_step_in_its_member(monkeypatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "p:raise:member=1:step=3")
    faults.arm(0)
    faultpoint("p", 3)
    faults.arm(1)
    faultpoint("p", 2)
    faultpoint("q", 3)
    with pytest.raises(InjectedError):
        faultpoint("p", 3)
    faultpoint("p", 3)


def test_a_flip_changes_one_bit_of_what_is_named(monkeypatch) -> None:
    tensor = torch.ones(9)
    monkeypatch.setattr(faults, "_exposed", {})
    faults.expose("nobody", lambda what: None)
    faults.expose("here", lambda what: (tensor.data_ptr(), tensor.nbytes, tensor.itemsize))
    monkeypatch.setenv(faults.VARIABLE, "p:flip:what=weight")
    assert parse("p:flip:what=weight") == [Fault("p", "flip", None, None, "weight")]
    faults.arm(0)
    faultpoint("p")
    faultpoint("p")
    assert (tensor != 1).nonzero().flatten().tolist() == [4]
    assert tensor.isfinite().all() and tensor._version == 0
