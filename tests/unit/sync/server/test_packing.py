"""Gradients that are rounded to two bytes on their way to servers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import RecipeError
from shoal.sync.server.layout import make_layout
from shoal.sync.server.messages import RequestRefused
from shoal.sync.server.packing import GradientPacker
from shoal.sync.state import MemorySource
from tests.unit.sync.server.attached import SIZES, alone, trained_at
from tests.unit.sync.server.played import Worker, make_server, only, send

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STEPS = [1 / 3, -0.1, 7e-3]  # none of them is one of two bytes


def halved(codec: str) -> list[float]:
    return [float(torch.tensor(value).to(DTYPES[codec])) for value in STEPS]


@pytest.mark.parametrize("frames", [True, False], ids=["frames", "shared"])
@pytest.mark.parametrize("codec", DTYPES)
def test_servers_step_on_what_rounding_leaves(codec: str, frames: bool) -> None:
    """The same, wherever a server runs."""
    with trained_at(frames=frames, codec=codec) as (model, strategy, _, step):
        assert strategy._memory is not None
        assert strategy._memory.shares_with(0) != frames
        for value in STEPS:
            step(value)
        for p, expected in zip(model.parts, alone(halved(codec)), strict=True):
            assert torch.equal(p, expected)
        assert not torch.equal(model.parts[0], alone(STEPS)[0]), "it is seen that they are rounded"


@pytest.mark.parametrize("frames", [True, False], ids=["frames", "shared"])
def test_half_the_bytes_are_sent(frames: bool) -> None:
    sent = {}
    for codec in ("none", "fp16"):
        with trained_at(frames=frames, codec=codec) as (_, strategy, _, step):
            step(1.0)
            sent[codec] = strategy.mesh.world.bytes_sent
    assert sent["none"] == 2 * sent["fp16"] >= 4 * sum(SIZES)


def packer(name: str, row: Tensor, checks: bool = False) -> GradientPacker:
    """One that packs a single parameter, for the only replica."""
    p = nn.Parameter(torch.zeros_like(row, dtype=row.dtype))
    made = GradientPacker(name, checks)
    layout = make_layout([(row.numel(), row.itemsize, row.dtype)], True, 1)
    made.attach(layout, [("p", p)], 1, (0, 1))
    return made


def test_elements_of_two_bytes_are_left_alone() -> None:
    row = torch.tensor([1e-30, 3.0], dtype=torch.bfloat16)
    packer("fp16", row).pack(0, [row])
    assert row[0]


def test_what_is_dropped_is_pushed_with_the_next_step() -> None:
    row = torch.full((512,), 1e-3)
    row[0] = 1.0
    packing, before = packer("int4", row), row.clone()
    packing.pack(0, [row])
    assert not row[1:256].any() and row[0] == 1.0
    packing.begin()  # the step is not made
    again = before.clone()
    packing.pack(0, [again])
    assert torch.equal(row, again)
    packing.commit()
    later = torch.zeros(512)
    packing.pack(0, [later])
    torch.testing.assert_close(later[1:256], before[1:256])
    state = packing.state()
    other = packer("int4", row)
    other.load(MemorySource(state), 7)
    assert other.steps == 1
    (kept,), (taken,) = (own.state().tensors.values() for own in (packing, other))
    assert torch.equal(kept[0].tensor, taken[0].tensor)


def test_nothing_comes_late_of_what_is_frozen() -> None:
    row = torch.full((512,), 1e-3)
    row[0] = 1.0
    packing = packer("int4", row)
    packing.pack(0, [row])
    packing.commit()
    packing._named[0][1].requires_grad_(False)
    packing.begin()
    later = torch.zeros(512)
    packing.pack(0, [later])
    assert not later.any() and not any(packing.pushed[0].late)


def test_what_fp16_does_not_hold_is_refused() -> None:
    with trained_at(codec="fp16") as (_, _, (server,), step):
        with pytest.raises(RecipeError, match=r"7e\+04, and codec=fp16 holds 65,504.*codec=bf16"):
            step(70_000.0)
        assert server.clock.committed == 0
    with trained_at(codec="bf16") as (_, _, (server,), step):
        step(70_000.0)
        assert server.clock.committed == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_was_not_finite_before_is_not_the_codecs_fault(value: float) -> None:
    row = torch.tensor([value])
    packer("fp16", row).pack(0, [row])
    assert not row.isfinite().any()


def test_under_a_loss_scale_the_sum_tells_of_an_overflow() -> None:
    row = torch.tensor([70_000.0])
    packer("fp16", row, checks=True).pack(0, [row])
    assert row.isinf().all()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"codec": "int4"}, "bytes came where"),
        ({"codec": "zip"}, "not packed by zip"),
        ({"codec": "none"}, "bytes came where"),
    ],
)
def test_a_server_takes_no_other_packing(other: dict[str, Any], words: str) -> None:
    server = make_server()
    worker = Worker(0, server)
    send(server, worker, worker.hello())
    (key,) = server.shard.keys[:1]
    rows = [row.half() for row in worker.rows(key, 1.0)]
    answer = only(send(server, worker, worker.push(key, 0, **other), rows))
    assert isinstance(answer, RequestRefused) and words in answer.why
