"""What `codec=auto` and `bucket=auto` become, by figures."""

import pytest

from shoal.errors import PlanError
from shoal.plans.measured import (
    CodecFigures,
    LinkFigures,
    chosen_bucket,
    chosen_codec,
    foreseen_s,
    next_codec,
)
from shoal.plans.plan import Plan

# 40 MB of gradients on this link, and 30 ms of computing.
MODEL_BYTES = 60_000_000  # that a rank of four sends
CODECS = {
    "bf16": CodecFigures(0.5, 0.02),
    "int8": CodecFigures(0.254, 0.06),
    "topk:0.01+int8": CodecFigures(0.0075, 0.15),
}


def link(bytes_per_s: float, hidden_s: float = 0.0) -> LinkFigures:
    exposed = max(0.0, MODEL_BYTES / bytes_per_s - hidden_s)
    return LinkFigures(1e-4, bytes_per_s, 0.03, exposed, MODEL_BYTES)


def decided(figures: LinkFigures, slowdown: float = 1.0) -> tuple[str, list[str]]:
    """The choice, and what was rehearsed; with a codec steps take so many times what was said."""
    measured = {"none": figures.compute_s + figures.exposed_s}
    while (name := next_codec(figures, CODECS, measured)) is not None:
        measured[name] = slowdown * foreseen_s(figures, CODECS[name])
    return chosen_codec(measured), list(measured)[1:]


@pytest.mark.parametrize(
    ("bytes_per_s", "choice"),
    [(125e4, "topk:0.01+int8"), (125e5, "topk:0.01+int8"), (500e6, "bf16"), (5e9, "none")],
)
def test_the_slower_the_link_the_less_is_sent(bytes_per_s: float, choice: str) -> None:
    assert decided(link(bytes_per_s))[0] == choice


def test_what_cannot_pay_is_not_rehearsed() -> None:
    assert decided(link(5e9)) == ("none", [])


def test_what_the_backward_hides_needs_no_codec() -> None:
    """The link takes 0.1 s, and 0.03 s of that go by while ranks compute."""
    assert link(600e6, hidden_s=0.03).hidden_s == pytest.approx(0.03)
    assert decided(LinkFigures(1e-4, 2e9, 0.03, 0.0, MODEL_BYTES)) == ("none", [])


@pytest.mark.parametrize("bytes_per_s", [125e4, 125e5, 500e6])
def test_a_step_that_was_not_faster_is_not_chosen(bytes_per_s: float) -> None:
    """Whatever was foreseen: what counts was measured."""
    choice, tried = decided(link(bytes_per_s), slowdown=1e4)
    assert choice == "none" and tried


def test_a_harsher_codec_must_pay_more() -> None:
    """Half as long again as the gentler one is worth it, less is not."""
    steps = {"none": 10.0, "bf16": 5.0, "int8": 4.1}
    assert chosen_codec(steps) == "bf16"
    assert chosen_codec(steps | {"int8": 3.9}) == "int8"
    assert chosen_codec(steps | {"int8": 3.9, "topk:0.01+int8": 2.7}) == "int8"
    assert chosen_codec(steps | {"topk:0.01+int8": 3.0}) == "topk:0.01+int8"


def test_the_usual_bucket_stays_unless_another_is_clearly_faster() -> None:
    assert chosen_bucket({4: 1.0, 1: 0.95, 16: 1.1}) == 4
    assert chosen_bucket({4: 1.0, 1: 1.2, 16: 0.85}) == 16


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("codec=auto", ""),
        ("data=1 codec=auto", "codec=auto has no effect with data=1"),
        ("data=2 zero=3 codec=auto", "codec=auto does not go with zero=3"),
        ("data=2 tensor=2 codec=auto", "codec=auto does not go with tensor=2"),
        ("data=2 sums=ring codec=auto", "sums=ring does not go with codec=auto"),
        ("data=2 sync=server codec=auto", "codec=auto does not go with sync=server"),
        ("data=2 local_steps=4 codec=auto", "codec=auto does not go with local_steps=4"),
        ("data=2 local_steps=4 bucket=8", "bucket=8 has no effect"),
        ("data=2 zero=3 bucket=auto", "bucket=auto has no effect"),
        ("data=1 bucket=4", "bucket=4 has no effect"),
        ("data=2 bucket=0", "bucket=0 is not possible"),
        ("data=2 bucket=2048", "bucket=2048 is not possible"),
    ],
)
def test_what_cannot_be_measured_is_refused(plan: str, words: str) -> None:
    if not words:
        assert Plan.parse(plan).is_open
        return
    with pytest.raises(PlanError, match=words):
        Plan.parse(plan)


def test_an_open_plan_packs_nothing_yet() -> None:
    plan = Plan.parse("data=2 codec=auto bucket=auto")
    assert (plan.packed_codec, plan.bucket_bytes) == ("none", 4 << 20)
    assert str(plan) == "data=2 codec=auto bucket=auto"
    assert not Plan.parse("data=2 codec=int8 bucket=8").is_open
