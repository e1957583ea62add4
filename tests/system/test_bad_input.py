"""Bad input: one clear message, the right exit code, nothing left behind, never a hang."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.main import run_here
from shoal.storage.run_dir import RunDir
from shoal.testing.ranks import Pool

RECIPES = str(Path(__file__).with_name("bad_recipes.py"))
SHOAL = Path(sys.executable).with_name("shoal")

Shoal = Callable[..., tuple[int, str]]


@pytest.fixture
def shoal(pool: Pool, tmp_path: Path) -> Shoal:
    """Run a command in an empty directory; its exit code and what it said to a person."""

    def run(*words: str) -> tuple[int, str]:
        output, errors = tmp_path / "output", tmp_path / "errors"
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        command = pool.start(run_here, list(words), output=output, errors=errors, directory=place)
        code = command.wait()
        return code, errors.read_text()

    return run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "place"


def left_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


REFUSED = {
    "callback with a misspelt method": (
        ["train", f"{RECIPES}:callback_is_misspelt"],
        ["Misspelt has the method on_stpe", "Did you mean 'on_step'?"],
    ),
    "callback without an evaluation": (
        ["train", f"{RECIPES}:callback_has_no_evaluation"],
        ["EarlyStopping follows 'loss' of evaluations", "evaluate="],
    ),
    "callback under another plan": (
        ["train", f"{RECIPES}:callback_freezes", "--plan", "data=2 zero=3"],
        ["Freeze does not go with zero=3", "Use data"],
    ),
    "scheduler as a schedule": (
        ["train", f"{RECIPES}:schedule_is_a_scheduler"],
        ["ReduceLROnPlateau", "shoal.callbacks.TorchScheduler"],
    ),
    "no recipe at all": (["train"], ["Missing argument", "RECIPE"]),
    "no function": (["train", RECIPES], ["names no recipe", "file.py:function"]),
    "no file": (["train", "absent.py:fine"], ["no recipe file absent.py"]),
    "no back end": (
        ["train", f"{RECIPES}:fine", "--on", "locl"],
        ["--on locl: there is no such back end", "'local'"],
    ),
    "no module": (["train", "absent_module:fine"], ["no module absent_module"]),
    "unknown function": (["train", f"{RECIPES}:finee"], ["no recipe 'finee'", "'fine'"]),
    "not callable": (["train", f"{RECIPES}:number"], ["is a int", "function that returns a Run"]),
    "returns another thing": (
        ["train", f"{RECIPES}:returns_a_dict"],
        ["returned a dict", "returns a shoal.Run"],
    ),
    "model is not a function": (
        ["train", f"{RECIPES}:model_is_made"],
        ["Run.model", "must be a function"],
    ),
    "nothing to evaluate": (
        ["train", f"{RECIPES}:nothing_to_evaluate"],
        ["evaluate is empty", "at least 1 sample"],
    ),
    "plan does not fit the ranks": (
        ["train", f"{RECIPES}:fine", "--plan", "data=2", "--ranks", "4"],
        ["needs 2 ranks", "there are 4", "data=4"],
    ),
    "unknown plan key": (
        ["train", f"{RECIPES}:fine", "--plan", "dta=2"],
        ["dta", "Did you mean 'data'?"],
    ),
    "plan value": (["train", f"{RECIPES}:fine", "--plan", "data=two"], ["data", "two"]),
    "not built yet": (["train", f"{RECIPES}:fine", "--plan", "tensor=2"], ["tensor"]),
    "unknown setting": (
        ["train", f"{RECIPES}:fine", "--set", "widht=3"],
        ["widht", "Did you mean 'width'?"],
    ),
    "setting of the wrong type": (
        ["train", f"{RECIPES}:fine", "--set", "steps=many"],
        ["steps", "'many' is not int"],
    ),
    "setting without a value": (["train", f"{RECIPES}:fine", "--set", "steps"], ["name=value"]),
    "a password": (
        ["train", f"{RECIPES}:fine", "--checkpoints", "mirror://[/a,s3://key:hunter2@b/x]"],
        ["--checkpoints mirror://[/a,s3://b/x] was given with a password"],
    ),
    "a password in a queue": (
        ["submit", f"{RECIPES}:fine", "--from", "s3://key:hunter2@b/x"],
        ["--from s3://b/x was given with a password"],
    ),
    "a setting with a password in a queue": (
        ["submit", f"{RECIPES}:fine", "--set", "url=redis://:hunter2@b/x"],
        ["--set url: redis://b/x was given with a password"],
    ),
    "steps of 0": (["train", f"{RECIPES}:fine", "--set", "steps=0"], ["steps=0", "at least 1"]),
    "batch size of 0": (
        ["train", f"{RECIPES}:fine", "--set", "batch_size=0"],
        ["batch_size=0", "at least 1"],
    ),
    "data shorter than a batch": (
        ["train", f"{RECIPES}:short_data", "--plan", "data=1"],
        ["5 samples", "batch_size is 8", "end='pad'"],
    ),
    "no data": (["train", f"{RECIPES}:no_data", "--plan", "data=1"], ["data", "empty"]),
    "batch does not divide": (
        ["train", f"{RECIPES}:fine", "--plan", "data=3"],
        ["data=3 does not divide the batch of 8", "4"],
    ),
    "unknown option": (["train", f"{RECIPES}:fine", "--plna", "data=2"], ["--plna", "--plan"]),
    "unknown verb": (["trian"], ["no verb 'trian'", "'train'"]),
}


@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=REFUSED)
def test_it_is_refused_before_a_rank_starts(shoal: Shoal, place: Path, words, told) -> None:
    code, errors = shoal(*words)
    assert code == 2, errors
    assert "Traceback" not in errors
    assert "hunter2" not in errors
    for part in told:
        assert part in errors, errors
    assert left_in(place) == []


def test_a_recipe_that_raises_shows_its_traceback(shoal: Shoal, place: Path) -> None:
    code, errors = shoal("train", f"{RECIPES}:fails")
    assert code == 1
    assert 'raise KeyError("a key of the recipe' in errors
    assert errors.strip().splitlines()[-1].startswith("shoal: The recipe ")
    assert "a key of the recipe's own" in errors.strip().splitlines()[-1]
    assert left_in(place) == []


def test_a_model_that_is_none_is_the_recipes_error(shoal: Shoal, place: Path) -> None:
    code, errors = shoal("train", f"{RECIPES}:model_is_no_module", "--plan", "data=1")
    assert code == 1
    assert "Run.model returned a str, not an nn.Module" in errors
    assert left_in(place) == []


WRONG_IN_TRAINING = {
    "loss_is_a_vector": ["not a single number", "shape (4,)", "(sum, weight)"],
    "loss_is_a_number": ["not a single number", "float"],
    "loss_has_no_loss": ["a dict of error, without 'loss'"],
    "callback_names_no_metric": [
        "EarlyStopping failed in on_evaluate on rank",
        "follows 'accuracy', which is not measured",
    ],
    "callback_keeps_what_cannot_be_saved": [
        "trainer.state['callbacks']['Keeps']['open'] is of the type _Environ",
        "cannot be handed to another rank or saved",
    ],
    "loss_is_nan": ["Step 1 is not finite", "its loss is nan", "samples"],
    "gradient_is_nan": ["Step 1 is not finite", "its gradient is not"],
    "last_gradient_is_nan": ["every rank failed at step 1: Step 1 is not finite"],
}


@pytest.mark.quick(
    "loss_is_a_vector",
    "callback_names_no_metric",
    "callback_keeps_what_cannot_be_saved",
    "loss_is_nan",
    "last_gradient_is_nan",
)
@pytest.mark.parametrize(("recipe", "told"), WRONG_IN_TRAINING.items(), ids=WRONG_IN_TRAINING)
def test_what_cannot_be_trained_on_ends_the_run(shoal: Shoal, recipe: str, told) -> None:
    code, errors = shoal("train", f"{RECIPES}:{recipe}", "--plan", "data=2")
    assert code == 1, errors
    last = errors.strip().splitlines()[-1]
    for part in told:
        assert part in last, errors
    assert "Traceback" not in errors


@pytest.mark.quick("data=2")
@pytest.mark.parametrize("plan", ["data=2", "data=2 sync=server"])
def test_a_step_that_wants_a_closure_ends_the_run_in_a_sentence(shoal: Shoal, plan: str) -> None:
    code, errors = shoal("train", f"{RECIPES}:optimizer_wants_a_closure", "--plan", plan)
    assert code == 1, errors
    assert "failed at step 1: The step of Sharp wants a closure" in errors
    assert "Traceback" not in errors


@pytest.mark.quick("misnamed_data")
@pytest.mark.parametrize("recipe", ["misnamed_data", "misnamed_recipe"])
def test_a_name_that_is_no_text_hides_no_error(shoal: Shoal, recipe: str) -> None:
    code, errors = shoal("train", f"{RECIPES}:{recipe}", "--plan", "data=2")
    assert code == 1, errors
    assert r"ValueError: \udcff.jpg is broken" in errors.strip().splitlines()[-1]


def test_an_unwritable_run_directory_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, errors = shoal("train", f"{RECIPES}:fine", "--run-dir", str(tmp_path / "file" / "run"))
    assert code == 2
    assert "cannot be written" in errors and "--run-dir" in errors
    assert "Traceback" not in errors


def test_a_run_directory_in_use_is_refused_with_its_owner(shoal: Shoal, tmp_path: Path) -> None:
    with RunDir(tmp_path / "run", "recipe"):
        code, errors = shoal("train", f"{RECIPES}:fine", "--run-dir", str(tmp_path / "run"))
        assert code == 2
        assert f"in use by process {os.getpid()}" in errors
        assert (tmp_path / "run" / "owner").exists()


def test_a_run_directory_that_holds_a_run_is_refused(shoal: Shoal, tmp_path: Path) -> None:
    words = ["train", f"{RECIPES}:fine", "--plan", "data=1", "--run-dir", str(tmp_path / "run")]
    assert shoal(*words)[0] == 0
    model = (tmp_path / "run" / "model.safetensors").read_bytes()
    code, errors = shoal(*words)
    assert code == 2 and "already holds a run" in errors
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == model


@pytest.mark.parametrize("closed", ["1", "2"], ids=["output", "error"])
def test_a_closed_stream_is_refused(tmp_path: Path, closed: str) -> None:
    line = f'exec {SHOAL} train "{RECIPES}:fine" --json {closed}>&-'
    done = subprocess.run(
        ["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    if closed == "1":
        assert "Standard output is closed" in done.stderr
    assert left_in(tmp_path) == []


def test_a_reader_that_leaves_early_does_no_harm(tmp_path: Path) -> None:
    """`shoal train ... --json | true`: the run ends, and says what it could not write."""
    line = f'{SHOAL} train "{RECIPES}:fine" --plan data=1 --json --run-dir run'
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, stdout=pipe, stderr=subprocess.PIPE, timeout=50
        )
    errors = done.stderr.decode()
    assert done.returncode == 2, errors
    assert "could not be written to standard output" in errors and "Traceback" not in errors
    assert (tmp_path / "run" / "model.safetensors").exists()
