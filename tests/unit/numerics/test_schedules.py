"""Schedules: factors at known steps, what counts as a schedule, and rates that are set."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from shoal.errors import RecipeError, UsageError
from shoal.numerics import schedules

STEPS = st.integers(2, 60)
SHARE = st.floats(0, 1)
RATE = 0.3


def sgd(rate=RATE):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rates_of(make_scheduler, steps):
    """The learning rate torch's scheduler sets for each step."""
    optimizer = sgd()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is stepped without an optimizer step
        scheduler = make_scheduler(optimizer)
        rates = []
        for _ in range(steps):
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    return rates


def check(schedule, make_scheduler, steps):
    rates = [RATE * schedule(step, steps) for step in range(steps)]
    assert rates == pytest.approx(rates_of(make_scheduler, steps), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(STEPS, SHARE)
def test_cosine_is_torchs(steps, floor):
    def torchs(optimizer):
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=floor * RATE)

    check(schedules.cosine(floor=floor), torchs, steps)


@settings(deadline=None)
@given(STEPS, SHARE)
def test_linear_is_torchs(steps, floor):
    def torchs(optimizer):
        return lr_scheduler.LinearLR(optimizer, 1.0, floor, total_iters=steps)

    check(schedules.linear(floor=floor), torchs, steps)


@settings(deadline=None)
@given(STEPS, st.integers(2, 10))
def test_warmup_is_torchs(steps, warmup):
    def torchs(optimizer):
        return lr_scheduler.LinearLR(optimizer, 1 / warmup, 1.0, total_iters=warmup - 1)

    check(schedules.constant(warmup=warmup), torchs, steps)


@settings(deadline=None)
@given(st.integers(10, 60), st.floats(0.2, 0.9))
def test_one_cycle_is_torchs(steps, peak_at):
    def torchs(optimizer):
        return lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=steps + 1, pct_start=peak_at, cycle_momentum=False
        )

    # torch refuses to be stepped past total_steps, so it gets one more and we are asked alike.
    schedule = schedules.one_cycle(peak_at)
    rates = [RATE * schedule(step, steps + 1) for step in range(steps)]
    assert rates == pytest.approx(rates_of(torchs, steps), rel=1e-9, abs=1e-12)


@settings(deadline=None)
@given(
    st.integers(0, 100),
    st.integers(1, 60),
    st.sampled_from(
        [
            schedules.constant(5),
            schedules.linear(5, 0.1),
            schedules.cosine(5),
            schedules.one_cycle(),
            schedules.one_cycle(0.01),
        ]
    ),
)
def test_a_factor_is_a_share_even_past_the_end_and_with_few_steps(step, steps, schedule):
    assert 0 <= schedule(step, steps) <= 1


@settings(deadline=None)
@given(STEPS, st.integers(1, 10))
def test_lambda_of_the_step(steps, tenths):
    def decay(step):
        return (1 - tenths / 20) ** step

    check(schedules.as_schedule(decay), lambda o: lr_scheduler.LambdaLR(o, decay), steps)


class Callable:
    def __call__(self, step, steps):
        return step / steps


def test_as_schedule_reads_the_signature():
    assert schedules.as_schedule(lambda step, steps: step / steps)(1, 4) == 0.25
    assert schedules.as_schedule(lambda step, steps=100: step / steps)(1, 4) == 0.25
    assert schedules.as_schedule(lambda step, power=2: step**power)(3, 4) == 9
    assert schedules.as_schedule(lambda step=0: step)(3, 4) == 3
    assert schedules.as_schedule(Callable())(1, 4) == 0.25
    cosine = schedules.cosine()
    assert schedules.as_schedule(cosine) is cosine


def test_as_schedule_refuses_what_is_none():
    for function in (lambda: 1.0, lambda a, b, c: 1.0, lambda step, *, at: 1.0, 3, print):
        with pytest.raises(UsageError, match="is not a schedule"):
            schedules.as_schedule(function)


def test_settings_out_of_range():
    for make in (
        lambda: schedules.constant(-1),
        lambda: schedules.linear(1.5),
        lambda: schedules.cosine(floor=2),
        lambda: schedules.one_cycle(peak_at=0),
        lambda: schedules.one_cycle(start=-1),
    ):
        with pytest.raises(UsageError):
            make()


def test_apply_multiplies_each_groups_first_rate():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]]}, {"params": [parameters[1]], "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedules.remember_rates(optimizer)
    for factor in (0.5, 0.0, 0.25):
        schedules.apply(optimizer, factor)
        schedules.remember_rates(optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx([0.1 * factor, 0.01 * factor])


def test_apply_fills_a_tensor_in_place():
    rate = torch.tensor(0.5)
    optimizer = sgd(rate)
    schedules.remember_rates(optimizer)
    schedules.apply(optimizer, 0.5)
    schedules.apply(optimizer, 0.5)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == 0.25


def test_apply_refuses_a_factor_that_cannot_be():
    optimizer = sgd()
    schedules.remember_rates(optimizer)
    for factor in (float("nan"), float("inf"), -0.1):
        with pytest.raises(RecipeError, match="finite number"):
            schedules.apply(optimizer, factor)


def test_a_group_without_a_rate():
    optimizer = sgd()
    optimizer.param_groups[0]["lr"] = None
    with pytest.raises(UsageError, match="no learning rate"):
        schedules.remember_rates(optimizer)
