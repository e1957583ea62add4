"""The profile of a recipe by its name, settings and file, for who must not wait for one.

`profile_run` knows a profile by the model that it builds and the samples that it loads. A run that
starts only asks whether the recipe, as it is written now, was profiled before on this machine.
Loads no torch.
"""

import hashlib
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.cost.profile import VERSION, Profile
from shoal.storage.files import write_atomic
from shoal.storage.run_dir import cache_directory
from shoal.training.options import Recipe

if TYPE_CHECKING:
    from shoal.training.run import Run


def profile_recipe(recipe: Recipe, run: "Run") -> Profile:
    """The profile of a recipe's run, which later runs of the recipe find."""
    from shoal.cost.profiler import profile_run

    profile, place = profile_run(run), _place_of(recipe)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, msgspec.json.encode(profile))
    return profile


def recall_profile(recipe: Recipe) -> Profile | None:
    """The profile of this recipe, as its file is now; None if there is none."""
    place = _place_of(recipe)
    with suppress(OSError, msgspec.DecodeError):
        if place is not None:
            return msgspec.json.decode(place.read_bytes(), type=Profile)
    return None


def _place_of(recipe: Recipe) -> Path | None:
    """None of a recipe that has no file to be known by, or that a verb has changed."""
    where, _, function = recipe.name.rpartition(":")
    if not recipe.is_named or recipe.change is not None:
        return None
    try:
        found = None if where.endswith(".py") else importlib.util.find_spec(where)
        origin = where if found is None else found.origin
        content = Path(str(origin)).read_bytes()
    except (OSError, ImportError, ValueError):
        return None
    settings = sorted(item for item in recipe.settings.items() if item[0] not in _NO_MATTER)
    seen = hashlib.sha256(content)
    seen.update(repr((VERSION, str(Path(str(origin)).resolve()), function, settings)).encode())
    return cache_directory() / "profiles" / "recipes" / f"{seen.hexdigest()[:32]}.json"


# Settings that change how long a run is, and no step of it.
_NO_MATTER = ("steps", "epochs", "seed", "evaluate_every", "save_every", "check_every", "end")
