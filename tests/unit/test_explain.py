"""What a plan does to a model, worked out without ranks: shares, formulas, rows, words, picture."""

import re
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.cost.explain import Explanation, explain
from shoal.cost.svg import draw_svg
from shoal.cost.text import format_explanation
from shoal.errors import PlanError, RecipeError
from shoal.formatting import in_units, table
from shoal.parallel.tensor.cutting import ParameterCut
from shoal.parallel.tensor.summary import grouped
from shoal.sync.server.shard import ServerShard, layout_of, settings_of
from shoal.training.run import Run, resolve

WIDTH = 64
NUM_ELEMENTS = 4 * (WIDTH * WIDTH + WIDTH)


def layers(optimizer: Any = torch.optim.AdamW, num_layers: int = 4, **changes: Any) -> Run:
    inputs = torch.linspace(-1, 1, 16 * WIDTH).view(16, WIDTH)
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))),
        "loss": F.mse_loss,
        "optimizer": lambda named: optimizer(named, lr=0.1),
        "data": shoal.data.tensors(inputs, inputs),
        "batch_size": 16,
        "steps": 2,
    }
    return Run(**given | changes)


def under(plan: str, run: Run | None = None) -> Explanation:
    chosen = run or layers()
    return explain(chosen, resolve(chosen, plan, None))


def test_one_process_holds_all_and_sends_nothing() -> None:
    found = under("data=1")
    (rank,) = found.ranks
    assert rank.num_held == rank.num_stepped == found.num_parameters == NUM_ELEMENTS
    assert rank.memory.parameters.num_bytes == found.alone["parameters"] == 4 * NUM_ELEMENTS
    assert rank.memory.optimizer.num_bytes == found.alone["optimizer"]
    assert not rank.messages and found.bubble is None and found.cuts is None and not found.stages
    assert "Messages: none" in format_explanation(found, "recipe")


def test_buffers_of_one_process_are_kept_twice_and_not_sent() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    (rank,) = under("data=1 pieces=3", layers(model=model, batch_size=12)).ranks
    assert rank.memory.buffers.num_bytes == 2 * (2 * 4 * WIDTH + 8)
    assert rank.memory.extra.formula == "1 partial sum of gradients"
    assert not rank.messages


@pytest.mark.parametrize(
    ("optimizer", "num_bytes"),
    [
        (torch.optim.AdamW, 8 * NUM_ELEMENTS + 8 * 4),  # a counter for each of 8 tensors
        (torch.optim.SGD, 0),
        (lambda named, lr: torch.optim.SGD(named, lr=lr, momentum=0.9), 4 * NUM_ELEMENTS),
        # Factored: a matrix keeps a row and a column, a vector all of it; a counter each.
        (torch.optim.Adafactor, 4 * (4 * 2 * WIDTH + 4 * WIDTH + 8)),
    ],
)
def test_the_state_of_any_optimizer_is_found(optimizer: Any, num_bytes: int) -> None:
    found = under("data=1", layers(optimizer))
    assert found.ranks[0].memory.optimizer.num_bytes == num_bytes


def test_groups_with_settings_of_their_own_are_told_apart() -> None:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        return torch.optim.SGD(
            [{"params": named[:1], "momentum": 0.9}, {"params": named[1:]}], lr=0.1
        )

    found = under("data=1", layers(lambda named, lr: optimizer(named)))
    assert found.ranks[0].memory.optimizer.num_bytes == 4 * WIDTH * WIDTH


class Demanding(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("only on Tuesdays")


def test_an_optimizer_that_cannot_step_is_the_recipes_error() -> None:
    with pytest.raises(RecipeError, match=r"Demanding cannot step .* only on Tuesdays"):
        under("data=1", layers(Demanding))


@pytest.mark.parametrize(
    ("key", "held", "stepped", "per_parameter"),
    [
        ("memory=apart", 1, 1, 16),
        ("memory=shared", 1, 0.25, 4 + 12 / 4),  # all hold one copy of the rest
        ("zero=1", 1, 0.25, 4 + 12 / 4),
        ("zero=2", 1, 0.25, 4 + 12 / 4),
        ("zero=3", 0.25, 0.25, 16 / 4),
    ],
)
def test_ranks_hold_what_the_plan_says(
    key: str, held: float, stepped: float, per_parameter: float
) -> None:
    found = under(f"data=4 {key}")
    for rank in found.ranks:
        assert rank.num_held == NUM_ELEMENTS * held
        assert rank.num_stepped == pytest.approx(NUM_ELEMENTS * stepped, rel=0.1)
        memory = rank.memory
        kept = memory.parameters, memory.gradients, memory.optimizer
        assert sum(part.num_bytes for part in kept) == pytest.approx(
            NUM_ELEMENTS * per_parameter, rel=0.1
        )
    assert sum(rank.num_stepped for rank in found.ranks) == NUM_ELEMENTS * (
        4 if stepped == 1 else 1
    )


def test_zero_2_sends_after_every_piece_and_holds_no_whole_gradient() -> None:
    one, two = (under(f"data=2 zero={n} accumulate=4 memory=apart") for n in (1, 2))
    assert two.ranks[0].messages[0].num_bytes == 4 * one.ranks[0].messages[0].num_bytes
    assert "partial sum" in one.ranks[0].memory.extra.formula
    assert "partial sum" not in two.ranks[0].memory.extra.formula


@pytest.mark.parametrize(
    "optimizer", [torch.optim.AdamW, torch.optim.Adafactor], ids=["cut", "whole"]
)
def test_servers_hold_the_state_that_workers_do_not(optimizer: Any) -> None:
    run = layers(optimizer)
    found = under("data=2 sync=server servers=3", run)
    for rank in found.ranks:
        assert rank.num_stepped == rank.memory.optimizer.num_bytes == 0
        assert rank.messages[0].num_bytes == 4 * NUM_ELEMENTS
    model = run.model()
    for told in found.servers:
        stepping = run.make_optimizer(model)
        shard = ServerShard(model, stepping, layout_of(model, stepping, 3), told.server)
        shard.sets.add_second()  # as in lockstep
        touched = {key: [True] * len(shard.layout.segments(key)) for key in shard.keys}
        sums = {key: torch.zeros_like(value) for key, value in shard.values.items()}
        shard.apply(sums, touched, 1.0, 1.0, settings_of(stepping))
        tensors = [t for kept in stepping.state.values() for t in kept.values()]
        state = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        assert told.memory.optimizer.num_bytes == state
        sets = [v.nbytes for values in shard.sets.sets for v in values.values()]
        assert told.memory.parameters.num_bytes == sum(sets)
        assert told.num_stepped == sum(run.numel() for run in shard.runs)
    assert sum(told.num_stepped for told in found.servers) == NUM_ELEMENTS


@pytest.mark.parametrize(("bound", "num_updates"), [("", 1), ("staleness=any", 2)])
def test_copies_are_held_and_sent(bound: str, num_updates: int) -> None:
    plan = f"data=2 sync=server servers=3 {bound}"
    run = layers(torch.optim.Adam)
    once, twice = under(plan, run).servers, under(f"{plan} copies=2", run).servers
    for number, (one, two) in enumerate(zip(once, twice, strict=True)):
        other = once[number - 1]  # whose copy it holds
        assert two.num_stepped == one.num_stepped + other.num_stepped
        for kind in ("parameters", "gradients", "optimizer"):
            held = [getattr(row.memory, kind).num_bytes for row in (one, other, two)]
            num_sets = 2 if kind == "parameters" and not bound else 1  # of which a copy needs one
            assert held[2] == held[0] + held[1] // num_sets
        (_, copies) = two.messages
        assert copies.what == "sums" and copies.count == num_updates
        assert copies.num_bytes == num_updates * one.memory.gradients.num_bytes


@pytest.mark.parametrize(
    ("bound", "num_rows", "kinds"),
    [
        ("", [1, 2, 2], ["gradients", "losses and flags"]),
        ("staleness=any", [1, 1, 1], ["gradients"]),
    ],
)
def test_workers_push_what_the_tree_keeps_apart(
    bound: str, num_rows: list[int], kinds: list[str]
) -> None:
    """Of five pieces: two neighbours may stand in two subtrees of all five; alone they are one."""
    found = under(f"data=3 sync=server pieces=5 {bound}", layers(batch_size=10))
    assert [r.messages[0].num_bytes // (4 * NUM_ELEMENTS) for r in found.ranks] == num_rows
    assert [message.what for message in found.ranks[0].messages] == kinds
    words = format_explanation(found, "recipe")
    assert "3 ranks = data 3, 1 server;" in words and "the rank and the server that have" in words


def test_uneven_shares_of_pieces() -> None:
    found = under("data=3 pieces=4", layers(batch_size=12))
    assert [rank.num_pieces for rank in found.ranks] == [1, 1, 2]
    assert "1 to 2 for each replica" in format_explanation(found, "recipe")


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ("pipeline=2 schedule=gpipe microbatches=4", 1 / 5),
        ("pipeline=4 microbatches=8", 3 / 11),
        ("pipeline=2 schedule=interleaved microbatches=4", 1 / 9),
        ("pipeline=2 schedule=zero-bubble microbatches=4", 1 / 13),
        ("pipeline=2 schedule=zbv microbatches=4", 1 / 25),
        ("pipeline=2 schedule=zbv microbatches=2", 2 / 14),
    ],
)
def test_how_long_a_pipeline_waits(plan: str, share: float) -> None:
    found = under(f"data=1 {plan}")
    assert found.bubble is not None
    assert found.bubble.share == pytest.approx(share)


def test_stages_cover_the_model_and_say_what_they_send() -> None:
    found = under("data=1 pipeline=2 schedule=interleaved microbatches=4")
    assert [stage.rank for stage in found.stages] == [0, 1, 0, 1]
    assert sum(stage.num_parameters for stage in found.stages) == NUM_ELEMENTS
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    assert [stage.num_sent for stage in found.stages] == [1, 1, 1, 0]
    assert {stage.sent_bytes for stage in found.stages[:3]} == {4 * 4 * WIDTH}
    sent = {m.what: m for m in found.ranks[0].messages}
    assert sent["activations"].count == 2 * 4 and sent["their gradients"].count == 4


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x).tanh())
        return y


def test_tied_parameters_are_named_with_who_holds_them() -> None:
    found = under("data=1 pipeline=2", layers(model=Tied))
    (tied,) = found.tied
    assert (tied.name, tied.ranks) == ("first.weight", [0, 1])
    assert all("tied gradients" in [m.what for m in rank.messages] for rank in found.ranks)
    assert "first.weight (16.4 kB) is held by ranks 0 and 1" in format_explanation(found, "recipe")


def test_the_tensor_axis_is_told_with_its_messages() -> None:
    found = under("data=1 tensor=2")
    assert found.cuts is not None
    # Two pairs of layers: a sum in forward for each, and in backward where an input needs it.
    assert (found.cuts.moves.num_forward, found.cuts.moves.num_backward) == (2, 1)
    assert found.cuts.share > 0.98
    assert {rank.num_held for rank in found.ranks} == {NUM_ELEMENTS // 2 + WIDTH}
    assert "cut over 2 ranks" in format_explanation(found, "recipe")


def test_a_plan_that_cannot_work_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot be cut into 8 stages"):
        under("data=1 pipeline=8")


def rows_of(names: Sequence[str]) -> list[ParameterCut]:
    return [ParameterCut(name, (2, 2), "dim 0", "columns") for name in names]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a.0.w", "a.1.w", "a.2.w", "b"], ["a.0..2.w", "b"]),
        (["a.0.w", "a.2.w"], ["a.{0,2}.w"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.0", "a.1.e.1"], ["a.0..1.e.0..1"]),
        (["a.0.e.0", "a.0.e.1", "a.1.e.5"], ["a.0.e.0..1", "a.1.e.5"]),
        (["conv2.w", "conv3.w"], ["conv2.w", "conv3.w"]),
    ],
)
def test_repeated_blocks_are_one_row(names: list[str], told: list[str]) -> None:
    rows = grouped(rows_of(names))
    assert [row.names for row in rows] == told
    assert sum(row.count for row in rows) == len(names)


def test_rows_that_differ_stay_apart() -> None:
    rows = [
        ParameterCut("a.0.w", (2, 2), "whole", "small"),
        ParameterCut("a.1.w", (2, 2), "dim 0", "columns"),
    ]
    assert [row.names for row in grouped(rows)] == ["a.0.w", "a.1.w"]


@pytest.mark.parametrize(
    ("num_bytes", "told"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_600, "1 MB"), (3 * 10**15, "3e+03 TB")],
)
def test_bytes_for_people(num_bytes: int, told: str) -> None:
    assert in_units(num_bytes) == told


def test_a_table_has_straight_columns() -> None:
    assert table([["name", "n"], ["a", "10"]], (1,)).splitlines() == ["  name   n", "  a     10"]


@pytest.mark.parametrize(
    "plan",
    [
        "data=1",
        "data=2 tensor=2 zero=1",
        "data=16 zero=2",
        "data=1 pipeline=2 schedule=zbv",
        "data=1 pipeline=3 schedule=interleaved microbatches=4",
        "data=2 pipeline=2 zero=3 microbatches=2 recompute=blocks",
        "data=2 sync=server servers=2 staleness=3",
    ],
)
def test_the_record_travels_and_the_picture_is_sound(plan: str) -> None:
    run = layers(num_layers=8)
    found = under(plan, run)
    again = msgspec.json.decode(msgspec.json.encode(found), type=Explanation)
    assert again == found
    root = ElementTree.fromstring(draw_svg(found, "recipe <&> more"))
    words = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    drawn = [word for word in words if word.startswith("rank ")]
    assert len(drawn) == min(found.num_ranks, 8)
    assert ("Not drawn: 8 more ranks." in words) == (found.num_ranks == 16)
    # The total of a box is that of the table, and what stands in the box adds up to it.
    for rank in found.ranks[: 1 if found.num_ranks > 8 else None]:
        at = words.index(f"rank {rank.rank}")  # its total stands beside it
        assert words[at + 1] == in_units(rank.memory.num_bytes)
        assert any(f"about {in_units(rank.memory.extra.num_bytes)} extra" in w for w in words) == (
            rank.memory.extra.num_bytes > 0
        )
    table = format_explanation(found, "recipe")
    heaviest = max(rank.memory.num_bytes for rank in found.ranks)
    assert re.search(rf"in all +{re.escape(in_units(heaviest))}\b", table)
    width = float(root.attrib["width"])
    assert all(float(e.attrib.get("x", 0)) < width for e in root.iter())
