"""State between two updates: what changes it is noticed, unless it is somebody who may."""

import torch
from torch import Tensor, nn

from shoal.sync.digests import TensorListing
from shoal.sync.guard import Guard, list_names, tensors_in


def flip(tensor: Tensor, element: int = 0) -> None:
    """As memory does, without torch's knowledge."""
    tensor.detach().numpy().view("uint32").reshape(-1)[element] ^= 1 << 20


def listing(*tensors: Tensor) -> TensorListing:
    return TensorListing.of((tensor, ("t", str(number))) for number, tensor in enumerate(tensors))


def test_a_flipped_bit_is_named() -> None:
    one, two, guard = torch.ones(8), torch.ones(8), Guard(4)
    guard.note(listing(one, two), 0)
    assert guard.changed() == []
    flip(two, 7)
    guard.refresh()
    assert guard.changed() == ["t.1"]


def test_what_was_written_through_torch_is_let_go_of() -> None:
    one, two, guard = torch.ones(8), torch.ones(8), Guard(4)
    guard.note(listing(one, two), 0)
    one.mul_(2)
    guard.refresh()
    assert guard.changed() == []
    flip(two)
    assert guard.changed() == ["t.1"]
    two.mul_(2)  # after the step began nobody may
    assert guard.changed() == ["t.1"]


def test_a_tensor_in_other_memory_is_followed_if_it_is_to_be() -> None:
    for follows in (False, True):
        parameter, guard = nn.Parameter(torch.ones(8)), Guard(4, follows)
        guard.note(listing(parameter), 0)
        parameter.data = torch.ones(8)
        assert guard.changed() == []
        flip(parameter)
        assert guard.changed() == (["t.0"] if follows else [])


def test_slices_take_turns() -> None:
    large, guard = torch.zeros(1 << 18), Guard(4)
    for turn in range(8):
        digests = guard.note(listing(large), turn)
        assert len(digests) == 1
        flip(large, turn % 4 * (1 << 16) + 5)
        assert guard.changed() == ["t.0"]
        flip(large, turn % 4 * (1 << 16) + 5)
        flip(large, (turn + 1) % 4 * (1 << 16) + 5)
        assert guard.changed() == []


def test_without_slices_nothing_is_looked_at() -> None:
    tensor, guard = torch.ones(8), Guard(0)
    assert guard.note(listing(tensor), 0) == []
    flip(tensor)
    assert guard.changed() == []


def test_state_is_looked_through() -> None:
    own = {"step": 3, "moments": [torch.ones(1), (torch.ones(2),)], "more": {"a": torch.ones(3)}}
    names = [".".join(name) for _, name in tensors_in(own, ("p",))]
    assert names == ["p.moments.0", "p.moments.1.0", "p.more.a"]
    again = [".".join(name) for _, name in tensors_in(dict(reversed(own.items())), ("p",))]
    assert again == names


def test_a_few_are_named() -> None:
    assert list_names(["a", "b"]) == "a, b"
    assert list_names(list("abcdef")) == "a, b, c, d and 2 other tensors"
