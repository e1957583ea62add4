"""What may change when a run goes on from a checkpoint, and what may not.

The plan may, and with it the number of ranks. Of the Run, how long it is, its schedule, and when it
saves and measures. Anything else would make it another run, and is refused by name; so is other
data, as far as it can be told from what the run began with.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.checkpoint.find import list_steps
from shoal.checkpoint.manifest import Manifest, Origin
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.data.identity import identities_differ, short_identity
from shoal.errors import BadCheckpoint, PlanError, UnusableCheckpoint, UsageError
from shoal.logs import warn_on_screen
from shoal.plans.keys import AUTO
from shoal.plans.plan import Plan
from shoal.storage.store import Store
from shoal.training.run import Run, resolve

MAY_CHANGE = (
    *("steps", "epochs", "schedule", "save_every", "check_every", "evaluate", "evaluate_every"),
    *("metrics", "loaders", "tokenizer", "plan", "cuts", "callbacks"),
)


# Among a run's fields: what its data holds (`data/identity.py`), its order (`data/orders.py`), and
# the order of what is taken of it under --new-data, with the samples that are replayed.
_CONTENT, _ORDER, NEW_ORDER = "data_content", "data_order", "new_data_order"


def newest(store: Store) -> Manifest | None:
    """What the newest checkpoint of a run says of itself; None if there is none, or none that is
    not damaged. BadCheckpoint if one may be good, and cannot be read."""
    problems, may_be_good = [], False
    for name in _listed(store):
        try:
            return VerifiedCheckpoint(store, name).manifest
        except BadCheckpoint as bad:
            problems.append(f"{name}: {bad}")
            may_be_good |= isinstance(bad, UnusableCheckpoint)
    if may_be_good:
        raise BadCheckpoint(
            f"No checkpoint in {store} can be read. {' '.join(problems)} Mend that and go on, or "
            "move them away to start again."
        )
    return None


def _listed(store: Store) -> list[str]:
    try:
        return list_steps(store)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(
            f"{store} cannot be read: {error.strerror}, so its checkpoints cannot be listed."
        ) from error


def refuse_used_store(store: Store) -> None:
    """A new run must not find checkpoints of another where it keeps its own."""
    if _listed(store):
        raise UsageError(
            f"{store} already holds checkpoints. Go on from them (--resume, or resume=True), or "
            "choose another place."
        )


def refuse_left_behind(store: Store, before: Store) -> None:
    """A run without a checkpoint in `store` must not start again if it has a good one elsewhere."""
    if newest(before) is not None:
        raise UsageError(
            f"{store} holds no checkpoint to go on from, and the run keeps its own in {before}. "
            "Leave --checkpoints out, or move them there first."
        )


def refuse_other_recipe(recipe: str, origin: Origin, store: Store) -> None:
    """Checkpoints that another run directory's run made, by what its recipe is called."""
    if origin.recipe.rpartition("/")[2] != recipe.rpartition("/")[2]:
        raise UsageError(
            f"The checkpoints in {store} are of the recipe {origin.recipe}, not {recipe}. Choose "
            "another place, or begin with their weights (--from)."
        )


def refuse_changes(own: Mapping[str, Any], run: Run, origin: Origin) -> None:
    """Refuse to go on with another run; `own` is the plain description of this one."""
    for field, value in own.items():
        before = origin.run.get(field, value)
        if field not in (*MAY_CHANGE, _CONTENT, _ORDER, NEW_ORDER) and value != before:
            raise UsageError(
                f"{field} was {before!r} and is {value!r} now. A run goes on as it began; only "
                f"{', '.join(MAY_CHANGE)} may change. Set it back, or begin a new run."
            )
    refuse_other_data(own, run, origin)


def refuse_other_data(own: Mapping[str, Any], run: Run, origin: Origin) -> None:
    """The step says where in the data a run is, if data, batches and their order are the same."""
    for field in ("batch_size", "seed", "end"):
        before = origin.run.get(field, own[field])
        if own[field] != before:
            raise UsageError(
                f"{field} was {before!r} and is {own[field]!r} now, so the place in the data would "
                "be another. Set it back, or take the weights alone (--from)."
            )
    if len(run.data) != origin.num_samples:
        raise UsageError(
            f"The data had {origin.num_samples} samples and has {len(run.data)} now, so no sample "
            "would be where it was in the order. Go on with the data that the run began with."
        )
    if own[_ORDER] != origin.run.get(_ORDER, own[_ORDER]):
        raise UsageError(
            f"The order of samples was {origin.run[_ORDER]!r} when the run began and is "
            f"{own[_ORDER]!r} now, so samples would be lost and repeated. Give the data the order "
            "(in_order, weighted, by_length, some, mix) that it had, or take the weights alone "
            "(--from)."
        )
    _refuse_other_new(own.get(NEW_ORDER), origin.run.get(NEW_ORDER))
    before, now = str(origin.run.get(_CONTENT) or ""), own[_CONTENT]
    is_known_as_other = identities_differ(before, now) if before and now else None
    if is_known_as_other is None:
        warn_on_screen(
            "Whether this is the data that the run began with could not be told, except by its "
            "length: there are no marks of the same samples from then and now."
        )
    if is_known_as_other:
        raise UsageError(
            f"The data was {short_identity(before)!r} when the run began and is "
            f"{short_identity(now)!r} now: as many samples, and other ones. "
            "Resume with the data that the run began with (it may lie elsewhere), or "
            "begin a new run in another directory; --from RUN begins with this "
            "one's weights."
        )


def _refuse_other_new(now: str | None, before: str | None) -> None:
    """By names alone; a run that began without one is known by its marks (`lineage.py`)."""
    if now != before:
        none = "not one of --new-data"
        raise UsageError(
            f"The order of new and replayed samples was {before or none} when the run began and is "
            f"{now or none} now, so samples would be lost and repeated. Go on with the version of "
            "Shoal and the records of earlier runs that it began with, or begin a new run with "
            "these weights (--from)."
        )


def plan_to_resume(run: Run, text: str | None, ranks: int | None, origin: Origin) -> Plan:
    """The plan, by default the last one, with the batch cut into pieces as before if it can be."""
    chosen = Plan.parse(origin.plan if text is None else text)
    before = Plan.parse(origin.plan)
    packs_steps = before.sync == "allreduce" and before.local_steps == 1  # its codec meant the same
    if chosen.is_open and not before.is_open and packs_steps:
        keys = [key for key in ("codec", "bucket") if getattr(chosen, key) == AUTO]
        kept = {key: getattr(before, key) for key in keys}
        chosen = msgspec.structs.replace(chosen, **kept)
        warn_on_screen(
            f"A run that is resumed keeps {' '.join(f'{k}={v}' for k, v in kept.items())}, which "
            "it was trained with. Name another to change it."
        )
    if chosen.pieces is None:
        try:
            return resolve(run, f"{chosen} pieces={origin.num_pieces}", ranks)
        except PlanError:
            pass  # it needs another number of pieces; the batch is cut differently from here on
    return resolve(run, chosen, ranks)
