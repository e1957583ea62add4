"""What a run's figures mean: its bottleneck with what to try, and what differs between runs. Pure.

The bottleneck is the part of the time that would be worth most to win: time outside of steps, then
data, then waiting for a slow rank, then the exchange; a run in which none of them is large
computes. The limits below are where a sentence helps more than it distracts.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress

from shoal.errors import ShoalError
from shoal.formatting import in_units
from shoal.plans.plan import Plan
from shoal.ui.records import Bottleneck, RunView, Setting, SettingsDifference, Totals

LOST, DATA, WAITING, EXCHANGE = 0.3, 0.2, 0.15, 0.25  # shares
SLOW = 1.5  # as many times as long as the middle rank, at which others are held up by it
FEW_STEPS = 5
FEW_BYTES = 64_000  # of a step, which any link carries at once
LOST_S = 10.0  # outside of steps, below which it is the start that every run has
BALANCE = "docs/techniques/balance.md"


def find_bottleneck(totals: Totals, plan: Mapping[str, str], num_ranks: int) -> Bottleneck:
    """In a sentence with its figures; `plan` has the keys of the run's plan."""
    total = sum(totals.seconds.values())
    if totals.steps < FEW_STEPS or total <= 0:
        return Bottleneck(
            sentence=f"{totals.steps} steps are on record, too few to say what takes the time."
        )
    share = {kind: seconds / total for kind, seconds in totals.seconds.items()}
    worked_s = totals.wall_s - totals.paused_s
    lost_s = worked_s - total
    if lost_s > LOST_S and lost_s > LOST * worked_s:
        return _lost(lost_s / worked_s)
    if share["data"] > DATA:
        return _data(share["data"])
    # Where ranks do not meet in each step, who runs ahead is blocked in the exchange.
    meets = plan.get("staleness", "0") == "0" and plan.get("local_steps", "1") == "1"
    is_held = not meets and totals.slowest_times >= SLOW
    waiting = share["waiting"] + (share["exchange"] if is_held else 0.0)
    if waiting > WAITING and num_ranks > 1:
        return _waiting(waiting, totals, plan)
    if share["exchange"] > EXCHANGE and num_ranks > 1:
        return _exchange(share["exchange"], totals, plan)
    return _compute(share["compute"], plan, num_ranks)


def _lost(share: float) -> Bottleneck:
    return Bottleneck(
        kind="lost",
        sentence=f"{share:.0%} of the time of this run went into no step: starts, recoveries, "
        "saves and evaluations.",
        tries=[
            "Look at the incidents below for what was replaced and how long it took.",
            "Start faster: `shoal warm start` keeps torch loaded.",
            "Evaluate or save less often (evaluate_every, save_every).",
        ],
    )


def _data(share: float) -> Bottleneck:
    return Bottleneck(
        kind="data",
        sentence=f"Ranks wait for samples: loading takes {share:.0%} of a step.",
        tries=[
            "Load ahead in processes of their own: --set loaders=2.",
            "Keep what is slow to make: shoal.data.cached.",
            "Build shards once: shoal data build.",
        ],
    )


def _waiting(share: float, totals: Totals, plan: Mapping[str, str]) -> Bottleneck:
    slow = ""
    if totals.slowest and totals.slowest_times >= 1.1:
        slow = f"; {totals.slowest} takes {totals.slowest_times:.1f}x as long as the middle one"
    finer = "pieces=16" if "pieces" not in plan else "more pieces"
    moves = plan.get("sync", "allreduce") == "allreduce" and "local_steps" not in plan
    tries = [f"See what else runs on the host of {totals.slowest or 'the slow rank'}."]
    if plan.get("pipeline", "1") != "1":
        tries = [
            "More microbatches make the time shorter in which stages wait: a larger microbatches.",
            "Stages of even cost, and another schedule: `shoal explain` shows both.",
        ]
    elif moves and plan.get("data") != "1":
        tries.insert(0, f"Cut the batch finer, so that work can move: {finer} ({BALANCE}).")
    tries += _possible(
        plan,
        ("sync=server staleness=2", "Let fast replicas run ahead: sync=server staleness=2."),
        ("local_steps=8", "Agree less often: local_steps=8."),
    )
    whom = "another stage" if plan.get("pipeline", "1") != "1" else "the slowest of them"
    return Bottleneck(
        kind="waiting",
        sentence=f"Ranks wait for {whom} {share:.0%} of the time{slow}.",
        tries=tries,
    )


def _exchange(share: float, totals: Totals, plan: Mapping[str, str]) -> Bottleneck:
    sent = totals.bytes_sent / totals.steps
    told = f"Exchanging takes {share:.0%} of a step"
    work = "More work between two exchanges: a larger batch_size, accumulate=4."
    seldom = ("local_steps=8", "Agree less often: local_steps=8.")
    if sent < FEW_BYTES:  # gradients go through memory: it is no link that is slow
        few = f"{told}, of which little is sending ({in_units(sent)} a rank): ranks meet often."
        cores = "See whether each rank has a core of its own: those that share one keep others."
        return Bottleneck(
            kind="exchange",
            sentence=few,
            tries=[cores, *_possible(plan, ("accumulate=4", work), seldom)],
        )
    return Bottleneck(
        kind="exchange",
        sentence=f"{told}; a rank sends {in_units(sent)} each time.",
        tries=_possible(
            plan,
            ("codec=int8", "Send less: codec=bf16, or codec=int8."),
            seldom,
            ("accumulate=4", work),
            ("sums=ring", "Add up in the order that is fastest: sums=ring."),
        )
        or ["More work between two exchanges: a larger batch_size."],
    )


def _compute(share: float, plan: Mapping[str, str], num_ranks: int) -> Bottleneck:
    data = plan.get("data", "")
    more = f"data={2 * (int(data) if data.isdigit() else num_ranks)}"
    tries = _possible(
        plan,
        (more, f"More ranks: {more}, if there are cores for them."),
        ("precision=bf16", "Half precision where that is safe: precision=bf16."),
    )
    if plan.get("recompute", "none") != "none":
        tries.append("Without recompute, if the memory allows it.")
    return Bottleneck(
        kind="compute",
        sentence=f"Ranks compute {share:.0%} of the time: nothing stands in their way.",
        tries=tries or ["A larger model, or more samples a step, costs as much as it computes."],
    )


def _possible(plan: Mapping[str, str], *advice: tuple[str, str]) -> list[str]:
    """The advice, each a change of the plan and a text, that a run of this plan can take."""
    return [text for change, text in advice if _can_take(plan, change)]


def _can_take(plan: Mapping[str, str], change: str) -> bool:
    changed = dict(word.split("=", 1) for word in change.split())
    if any(key in plan for key in changed.keys() - {"data", "accumulate"}):
        return False  # it was chosen
    words = {**plan, **changed}
    words.pop("pieces", None)  # their number follows from the rest
    with suppress(ShoalError):
        Plan.parse(" ".join(f"{key}={value}" for key, value in words.items()))
        return True
    return False


def compression_in_words(totals: Totals, plan: Mapping[str, str], num_parameters: int) -> str:
    """What is sent beside what an all-reduce of plain gradients would send; empty if alone."""
    num_ranks = int(plan["data"]) if plan.get("data", "").isdigit() else 1
    if not (totals.steps and totals.bytes_sent and num_parameters and num_ranks > 1):
        return ""
    plain = 2 * (num_ranks - 1) / num_ranks * 4 * num_parameters
    sent = totals.bytes_sent / totals.steps
    told = f"{in_units(sent)} a step and rank; a ring all-reduce of fp32 gradients sends "
    told += in_units(plain)
    if plan.get("codec", "none") != "none" or plan.get("local_steps", "1") != "1":
        told += f", {plain / sent:.1f} times that" if sent < plain else ""
    elif sent < plain / 2:
        told += "; what ranks of one host pass through shared memory is not sent"
    return told


def settings_differences(runs: Sequence[RunView]) -> list[SettingsDifference]:
    """The settings that are not the same in all runs, the plan among them."""
    columns = [{one.name: one.value for one in run.settings} for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [SettingsDifference(name, [column.get(name) for column in columns]) for name in names]
    return [row for row in rows if len(set(row.values)) > 1]


def settings_of(described: Mapping[str, object]) -> list[Setting]:
    """Every field of the run with its origin, as run.json has them."""
    recipe = Setting("recipe", _text(described.get("recipe")), "command line")
    found = [recipe, Setting("plan", _text(described.get("plan")), "resolved")]
    settings, fields = described.get("settings"), described.get("run")
    fields = fields if isinstance(fields, dict) else {}
    if isinstance(settings, dict):  # of the recipe's own; those of the run are fields of it
        own = [name for name in settings if name not in fields]
        found += [Setting(_text(name), _text(settings[name]), "--set") for name in own]
    for name, field in fields.items():
        if isinstance(field, dict) and name != "plan":
            value, origin = _text(field.get("value")), _text(field.get("from"))
            found.append(Setting(_text(name), value, origin))
    return found[:500]


def _text(value: object) -> str:
    return "none" if value is None else str(value)[:2000]
