"""What an optimizer makes of gradients that have their momentum in them already."""

import torch
from torch import nn

from shoal.numerics.momentum import without_momentum


def stepped(num_steps: int, corrects: bool, gradient: float) -> tuple[nn.Parameter, nn.Parameter]:
    """Two parameters of which the first is packed."""
    packed, other = (nn.Parameter(torch.ones(4)) for _ in range(2))
    settings = {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    optimizer = torch.optim.SGD([packed, other], **settings)
    (group,) = optimizer.param_groups
    for _ in range(num_steps):
        packed.grad, other.grad = torch.zeros(4), torch.full((4,), gradient)
        if corrects:
            with without_momentum(optimizer, {packed}):
                optimizer.step()
        else:
            optimizer.step()
    assert optimizer.param_groups == [group] and group["params"] == [packed, other]
    assert group["momentum"] == 0.9
    return packed, other


def test_what_is_sent_whole_keeps_the_momentum_of_its_optimizer() -> None:
    assert torch.equal(stepped(5, True, 1.0)[1], stepped(5, False, 1.0)[1])


def test_weight_decay_is_not_less_than_with_momentum() -> None:
    own, usual = (stepped(1500, corrects, 0.0)[0].log() for corrects in (True, False))
    torch.testing.assert_close(own, usual, rtol=0.05, atol=0.0)
