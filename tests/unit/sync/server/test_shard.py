"""What a step of a server does with the gradients it is given."""

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import RecipeError
from shoal.sync.server.shard import ChangedSettings, ServerShard, layout_of, settings_of


def shard_of(**options: bool | float) -> tuple[ServerShard, dict[int, Tensor]]:
    """A shard of one small model, and sums for it."""
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **options)  # type: ignore[arg-type]
    shard = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0)
    return shard, {key: torch.randn_like(value) for key, value in shard.values.items()}


def step(shard: ServerShard, sums: dict[int, Tensor], scale: float) -> None:
    touched = {key: [True] * len(shard.layout.segments(key)) for key in shard.keys}
    shard.apply(sums, touched, scale, 1.0, settings_of(shard.optimizer))


def test_a_fused_step_reads_the_sums_where_they_stand() -> None:
    """A pass over all gradients less, where nothing scales them."""
    shard, sums = shard_of(fused=True)
    before = {key: value.clone() for key, value in shard.values.items()}
    step(shard, sums, 1.0)
    stand = [(s.data_ptr(), s.data_ptr() + s.nbytes) for s in sums.values()]
    for run in shard.runs:
        assert run.grad is not None
        assert any(first <= run.grad.data_ptr() < last for first, last in stand)
    for key, value in shard.values.items():
        for s in shard.layout.segments(key):
            where = slice(s.place, s.place + s.length)
            assert torch.equal(value[where], before[key][where] - 0.5 * sums[key][where])


def test_a_step_that_changes_its_own_rate_is_refused() -> None:
    """Workers would set it back, without a word."""
    shard, sums = shard_of()

    def halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
        optimizer.param_groups[0]["lr"] /= 2

    shard.optimizer.register_step_post_hook(halve)
    with pytest.raises(RecipeError, match="The step of SGD changes lr"):
        step(shard, sums, 1.0)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_no_step_changes_the_sums(options: dict[str, bool], scale: float) -> None:
    """They are written down after it. Nesterov's foreach kernel changes the gradients it gets."""
    shard, sums = shard_of(momentum=0.9, nesterov=True, **options)
    kept = {key: total.clone() for key, total in sums.items()}
    for _ in range(2):
        step(shard, sums, scale)
        for key, total in sums.items():
            assert torch.equal(total, kept[key])


def test_a_share_of_the_rate_is_for_one_step() -> None:
    """A checkpoint that was made after it goes on with the rate of the recipe."""
    shard, sums = shard_of()
    before = {key: value.clone() for key, value in shard.values.items()}
    touched = {key: [True] * len(shard.layout.segments(key)) for key in shard.keys}
    shard.apply(sums, touched, 1.0, 0.25, settings_of(shard.optimizer))
    assert shard.optimizer.param_groups[0]["lr"] == 0.5
    for key, value in shard.values.items():
        for s in shard.layout.segments(key):
            where = slice(s.place, s.place + s.length)
            torch.testing.assert_close(value[where], before[key][where] - 0.125 * sums[key][where])


def test_what_an_optimizer_counts_in_its_settings_is_its_own() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5, weight_decay=0.1)
    optimizer.param_groups[0]["num_calls"] = 0
    changed = ChangedSettings(optimizer)
    assert changed.of(optimizer) == [{"lr": 0.5}]
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert changed.of(optimizer) == [{"lr": 0.5, "weight_decay": 0.0}]
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert changed.of(optimizer) == [{"lr": 0.5, "weight_decay": 0.1}], "the server has another"
    always = ChangedSettings(optimizer, always=("lr", "momentum"))
    assert always.of(optimizer) == [{"lr": 0.5, "momentum": 0}]
