"""What `shoal simulate` reports: a simulation, what other settings would give, scaling curves.

Read next: `scenario.py`, `simulation_svg.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from shoal.cost.cluster import Cluster
from shoal.cost.predict import predict
from shoal.cost.prediction import Prediction
from shoal.cost.profile import Profile
from shoal.cost.scenario import (
    CurvePoint,
    Effect,
    Scenario,
    check_numbers,
    effects,
    simulate_plan,
    sweep,
    sweep_sizes,
)
from shoal.cost.simulate import Conditions, Simulation
from shoal.formatting import in_units, num_bytes_of, plural, table
from shoal.plans.plan import Plan
from shoal.training.run import Run, resolve

_MOST_COMPARED = 1024  # ranks, up to which other settings are simulated, too


class SimulationReport(msgspec.Struct, frozen=True):
    """What a simulation reports. `error_share` is that of the predicted step."""

    cluster: str
    num_ranks: int
    num_hosts: int
    simulation: Simulation
    bytes_sent: int  # in an average step, by the rank that sends most
    error_share: float
    effects: list[Effect]
    curve: list[CurvePoint]
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """The fields of the simulation beside the others."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        found = fields.pop("simulation")
        del found["spans"]
        return {**found, **fields}


def make_report(
    run: Run, cluster: Cluster, given: Mapping[str, Any], make_profile: Callable[[], Profile]
) -> SimulationReport:
    """Simulate a run, which is profiled once its plan is known to be legal; `given` has the options
    of the command."""
    text = run.plan if given["plan"] is None else given["plan"]
    plan = Plan.parse(text or "")
    at_size = plan
    if plan.data is None:  # as large as the cluster allows
        at_size = plan.resolve(ranks=None, cores=cluster.num_devices, batch_size=run.batch_size)
    at_size = resolve(run, at_size, None)
    rate = given["failures_per_month"]
    conditions = Conditions(
        hours=given["hours"],
        seed=given["seed"],
        save_every=run.saves_every,
        spares=given["spares"],
        jitter=given["jitter"],
        slow_ranks=given["slow_ranks"],
        slow_links=given["slow_links"],
        failures_per_month=cluster.failures_per_month if rate is None else rate,
        kills_per_month=given["kills_per_month"],
    )
    scenario = Scenario(
        conditions=conditions,
        spare_hosts=given["spare_hosts"],
        repair_s=60 * given["repair_minutes"],
        store_bytes_per_s=float(num_bytes_of(given["store"], "--store")),
    )
    check_numbers(at_size, cluster, conditions)
    profile = make_profile()
    found = simulate_plan(profile, at_size, cluster, scenario)
    predicted = predict(profile, at_size, cluster)
    compares = found.failures and at_size.num_ranks <= _MOST_COMPARED
    over = given["sweep"]
    curve = sweep(profile, plan, cluster, scenario, sweep_sizes(over)) if over else []
    return SimulationReport(
        cluster=cluster.name,
        num_ranks=at_size.num_ranks,
        num_hosts=cluster.num_hosts,
        simulation=found,
        bytes_sent=predicted.bytes_sent,
        error_share=predicted.error_share,
        effects=effects(profile, at_size, cluster, scenario) if compares else [],
        curve=curve,
        notes=_notes(conditions, predicted),
    )


def _notes(conditions: Conditions, predicted: Prediction) -> list[str]:
    notes = [*predicted.notes]
    fails = conditions.failures_per_month or conditions.kills_per_month
    if fails and conditions.save_every is None:
        notes.append(
            "The run saves nothing: where all begin again, they begin at step 0. "
            "--set save_every=N saves every N steps."
        )
    if not predicted.fits:
        notes.append(
            f"The fullest host would hold {in_units(predicted.host_bytes)} of its "
            f"{in_units(predicted.host_limit_bytes)}: this run would not start."
        )
    return notes


def format_simulation(found: SimulationReport, recipe: str) -> str:
    """The report, as text."""
    s = found.simulation
    lost = {
        "steps longer than undisturbed": s.lost.slow,
        "saving": s.lost.saving,
        "steps made again": s.lost.redone,
        "from a loss to the next step": s.lost.down,
    }
    parts = [
        f"{recipe} under {s.plan or 'data=1'!r} on {found.cluster}: "
        f"{plural(found.num_ranks, 'rank')}, {s.hours:g} hours",
        table(
            [
                ["", ""],
                ["step", f"{_time(s.step_s)} (undisturbed {_time(s.undisturbed_step_s)})"],
                ["goodput", f"{s.goodput:.1%} of an undisturbed run: {s.steps:,} steps"],
                *([f"  {what}", f"{share:.1%}"] for what, share in lost.items() if share > 5e-4),
                ["pipeline bubble", f"{s.bubble:.1%} of the time of rounds"],
                ["waiting for slow ranks", f"{s.waiting:.1%} of the time of steps"],
                ["sent by a rank", f"{in_units(found.bytes_sent)} a step"],
                ["failures", _failures(s)],
            ],
            (),
        ).strip("\n"),
    ]
    if s.staleness is not None:
        parts.append(
            f"Batches were begun {s.staleness['mean']:.1f} ahead of those that all have done, "
            f"at most {s.staleness['largest']}."
        )
    if found.effects:
        rows = [[e.setting, str(e.value), f"{e.goodput:.1%}"] for e in found.effects]
        parts.append(f"Goodput if\n{table([['setting', 'is', 'goodput'], *rows], (1, 2))}")
    if found.curve:
        parts.append(_curve_table(found.curve))
    told = f"Steps are predicted, give or take {found.error_share:.0%}."
    parts.append("\n".join(f"- {note}" for note in [told, *found.notes]))
    return "\n\n".join(parts)


def _failures(s: Simulation) -> str:
    if not s.failures:
        return "none"
    repairs = s.repairs
    again = plural(repairs.relaunches, "time")
    then = [
        f"{repairs.recoveries} repaired in place" if repairs.recoveries else "",
        f"{repairs.restarts} starts of all from a checkpoint" if repairs.restarts else "",
        f"the command given again {again}" if repairs.relaunches else "",
    ]
    return f"{s.failures}: {', '.join(filter(None, then)) or 'no rank was there'}"


def _curve_table(curve: list[CurvePoint]) -> str:
    rows = [["scaling", curve[0].axis, "ranks", "batch", "step", "samples/s", "efficiency"]]
    missing: dict[str, str] = {}
    for point in curve:
        if point.samples_per_s is None or point.step_s is None:
            missing.setdefault(f"{point.scaling}, {point.axis}={point.size}", point.reason)
            continue
        efficiency = f"{point.efficiency:.1%}"
        speed = f"{point.samples_per_s:,.0f}"
        batch, step = str(point.batch_size), _time(point.step_s)
        sizes = [point.scaling, str(point.size), str(point.ranks)]
        rows.append([*sizes, batch, step, speed, efficiency])
    lines = [table(rows, (1, 2, 3, 4, 5, 6))]
    lines += [f"  no point {which}: {why}" for which, why in missing.items()]
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
