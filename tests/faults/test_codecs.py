"""A rank dies while gradients are packed: what it had not sent is gone, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.comm.compression import share_bounds
from shoal.plans.plan import Plan
from shoal.verify import reference
from shoal.verify.reference_codec import PackedReplicas
from tests.faults import tiny
from tests.support.faults import Trained, check_ledger, check_same

NUM_STEPS = 60
INT8 = "data=3 codec=int8 pieces=3"


def drops(steps: int, replica: int) -> dict[str, torch.Tensor]:
    """The weights of the reference, of which a replica loses after some steps what it kept."""
    plan, made = Plan.parse(INT8), list[reference.Replica]()

    def make(*arguments: Any) -> reference.Replica:
        made.append(reference.Replica(*arguments))
        return made[0]

    for step, (state,) in enumerate(reference.train(tiny.packed(0), plan, make), start=1):
        packed = made[0].exchange
        assert isinstance(packed, PackedReplicas) and packed.kept
        for own in packed.kept.values() if step == steps else ():
            cuts = share_bounds(len(own.owed), 1024, 3)
            own.residuals[replica] = torch.zeros_like(own.owed)
            own.owed[cuts[replica] : cuts[replica + 1]] = 0
        weights = {name: tensor.detach().clone() for name, tensor in state.weights.items()}
    return weights


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("step.computed", 1),
        pytest.param("step.exchanged", 0, marks=pytest.mark.full),
        pytest.param("step.committed", 2, marks=pytest.mark.full),
    ],
)
def test_a_newcomer_begins_without_what_was_not_sent(
    start: Callable[..., Any], point: str, rank: int
) -> None:
    """The step under way is made by all who are left, with what each had kept, or not at all."""
    armed = f"{point}:kill:member={rank}:step=20"
    trained: Trained = start(armed, recipe="packed", plan="data=3 codec=int8").wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    assert f"Replica {rank} continues from step" in trained.errors
    found = load_file(trained.run_dir / "model.safetensors")
    made = 20 if point == "step.computed" else 21
    expected = [drops(steps, rank) for steps in {20, made}]
    assert any(all(torch.equal(w[n], t) for n, t in found.items()) for w in expected)


@pytest.mark.full
def test_a_codec_that_keeps_nothing_loses_nothing(
    start: Callable[..., Any], undisturbed_under: Callable[..., Trained]
) -> None:
    plan = "data=3 codec=bf16"
    trained = start("step.computed:kill:member=1:step=20", recipe="packed", plan=plan).wait()
    check_same(trained, undisturbed_under(plan, "packed"))


def test_shards_go_on_from_the_checkpoint_with_what_was_not_sent(
    start: Callable[..., Any], undisturbed_under: Callable[..., Trained]
) -> None:
    plan = "data=3 zero=3 codec=int8"
    armed = "step.computed:kill:member=1:step=25"
    settings = {"save_every": 10, "pause": 0.01}
    trained = start(armed, recipe="packed", plan=plan, **settings).wait()
    check_same(trained, undisturbed_under(plan, "packed"))
    assert trained.events("recovered")[0]["step"] in (10, 20)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=3 zero=1 codec=topk:0.1", "data=3 sync=server codec=int8"])
def test_other_plans_go_on(start: Callable[..., Any], plan: str) -> None:
    trained = start("step.computed:kill:member=1:step=20", recipe="packed", plan=plan).wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
