"""A server's shard between two steps, and its copies."""

import pytest
import torch
from torch import Tensor, nn

from shoal.sync.guard import CorruptState
from shoal.sync.server.clock import Clock
from shoal.sync.server.messages import Apply
from shoal.sync.server.records import ServerProgress, ShardReplica, replay, update_record
from shoal.sync.server.shard import ServerShard, ShardDigests, layout_of, settings_of
from shoal.sync.state import MemorySource


def shard_of(check_every: int = 4, double: bool = False) -> ServerShard:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    layout = layout_of(model, optimizer, 1)
    shard = ServerShard(model, optimizer, layout, 0, shared=False, check_every=check_every)
    if double:
        shard.sets.add_second()
    return shard


def step(shard: ServerShard, number: int = 0) -> tuple[ShardDigests, bytes, list[bytes | Tensor]]:
    """A step, and the record of it."""
    torch.manual_seed(number)
    sums = {key: torch.randn_like(value) for key, value in shard.values.items()}
    touched = {key: [True] * len(shard.layout.segments(key)) for key in shard.keys}
    apply = Apply(
        generation=0,
        request=1,
        batch=number,
        attempt=1,
        first=0,
        last=1,
        scale=1.0,
        factor=1.0,
        pulled=None,
        settings=settings_of(shard.optimizer),
    )
    checked = shard.apply(sums, touched, 1.0, 1.0, apply.settings)
    header, frames = update_record(apply, sums, touched, [], shard.tables, checked)
    in_bytes = [f.numpy().tobytes() if isinstance(f, Tensor) else f for f in frames]
    return checked, header, in_bytes


def flip(tensor: Tensor) -> None:
    tensor.detach().numpy().view("uint32").reshape(-1)[0] ^= 1 << 20


def moment(shard: ServerShard) -> Tensor:
    return next(iter(shard.optimizer.state.values()))["exp_avg"]


@pytest.mark.parametrize("double", [False, True], ids=["one set", "two sets"])
@pytest.mark.parametrize("what", ["values", "moment"])
def test_a_flipped_bit_is_found_before_the_next_step(double: bool, what: str) -> None:
    shard = shard_of(double=double)
    for number in range(3):
        step(shard, number)
    flip(moment(shard) if what == "moment" else next(iter(shard.values.values())))
    with pytest.raises(CorruptState, match=r"server 0 was corrupted after update 3: \w+\.\d"):
        step(shard, 3)


def test_a_bit_flipped_where_the_next_step_begins_is_found() -> None:
    """Old values are copied ahead, while workers still read them."""
    shard = shard_of(double=True)
    step(shard)
    shard.sets.copy_forward()
    flip(next(iter(shard.sets.sets[1 - shard.sets.now].values())))
    with pytest.raises(CorruptState, match="model"):
        step(shard, 1)


def test_a_state_is_looked_at_before_it_is_given_away() -> None:
    shard = shard_of()
    step(shard)
    shard.state_dict()
    flip(moment(shard))
    with pytest.raises(CorruptState, match="exp_avg"):
        shard.state_dict()


def test_a_state_that_is_taken_over_is_no_corruption() -> None:
    shard, other = shard_of(), shard_of()
    step(shard)
    step(other, 5)
    shard.take_over(other.state_dict())
    step(shard, 1)


def test_nothing_is_looked_at_if_that_is_not_asked_for() -> None:
    shard = shard_of(check_every=0)
    checked, *_ = step(shard)
    assert checked.digests == []
    flip(moment(shard))
    step(shard, 1)


def test_a_copy_that_differs_is_named() -> None:
    shard, copy = shard_of(), ShardReplica(shard_of(), Clock(1, 0))
    for number in range(2):
        _, header, frames = step(shard, number)
        copy.redo([memoryview(header), *map(memoryview, frames)])
    copy.shard.load_state_dict(MemorySource(shard.state_dict()))
    flip(moment(copy.shard))  # nothing of it is noted, so that only a comparison finds it
    _, header, frames = step(shard, 2)
    with pytest.raises(CorruptState, match=r"server 0 and what another .* batch 3, in"):
        copy.redo([memoryview(header), *map(memoryview, frames)])


def test_whoever_does_steps_again_looks_at_the_same_slices() -> None:
    shard, late = shard_of(), shard_of()
    step(shard)
    late.load_state_dict(MemorySource(shard.state_dict()))
    past = ServerProgress(Clock(1, 0, 1), 1, {})
    for number in range(1, 4):
        _, header, frames = step(shard, number)
        past = replay(header, frames, late, past)
    assert late.noted() == shard.noted()
