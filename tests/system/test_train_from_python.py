"""`shoal.train` and `shoal.load`: a run from a script, a thread, a notebook, and how it ends."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
from shoal.api import TrainOptions
from shoal.errors import RecipeError, UsageError
from shoal.events.events import (
    Event,
    FormedEvent,
    PrintedEvent,
    SavedEvent,
    SeatEvent,
)
from shoal.launch.train import Options
from shoal.testing.ranks import Pool
from tests.support.faults import start
from tests.support.leaks import wait_until
from tests.system import tiny

RECIPE = f"{tiny.__file__}:line"
ROOT = Path(__file__).resolve().parents[2]


def trained_by_command(pool: Pool, run_dir: Path) -> dict[str, torch.Tensor]:
    start(pool, RECIPE, run_dir, plan="data=2").wait()
    return load_file(run_dir / "model.safetensors")


def test_a_run_of_a_process_with_threads(pool: Pool, tmp_path: Path) -> None:
    """In a thread of such a process, with a callback, and with the bits of `shoal train`."""
    events: list[Event] = []
    steps = tmp_path / "steps"
    outcomes = []

    def note(info: shoal.StepInfo) -> None:
        with steps.open("a") as file:
            file.write(f"{info.step}\n")

    def train() -> None:
        outcomes.append(
            shoal.train(
                tiny.line,
                "data=2",
                settings={"steps": 8},
                run_dir=tmp_path / "run",
                callbacks=[note],
                progress=events.append,
            )
        )

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    (outcome,) = outcomes
    assert (outcome.exit_code, outcome.steps, outcome.summary.plan) == (0, 8, "data=2 pieces=2")
    assert outcome.metrics == {"loss": outcome.summary.loss}
    assert outcome.checkpoint == str(tmp_path / "run/checkpoints/step-00000008")
    assert sorted(steps.read_text().split()) == sorted([str(n) for n in range(1, 9)] * 2)
    assert {SeatEvent, FormedEvent, SavedEvent} <= {type(event) for event in events}
    undisturbed = trained_by_command(pool, tmp_path / "command")
    for name, value in outcome.model().state_dict().items():
        assert torch.equal(value, undisturbed[name])
    before, path = torch.random.get_rng_state(), list(sys.path)
    loaded = shoal.load(tmp_path / "run", RECIPE, settings={"pause": 1})
    assert torch.equal(torch.random.get_rng_state(), before) and sys.path == path
    assert torch.equal(loaded.state_dict()["0.weight"], undisturbed["0.weight"])


def train_here(run_dir: str) -> int:
    """In a process without threads, which supervises the ranks itself."""
    from shoal.launch import fresh

    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the limit of the test, inherited
    assert fresh.can_fork()
    sys.stdout, sys.stderr = io.StringIO(), io.StringIO()  # as some programs have them
    outcome = shoal.train(tiny.line, "data=2", run_dir=run_dir)
    logs = Path(run_dir, "logs/recipe.log").read_text()
    assert "greeting none" in logs and "greeting" not in sys.stdout.getvalue()
    assert "8 steps of 8 samples" in sys.stderr.getvalue()
    return outcome.exit_code


def test_a_run_of_a_process_without_threads(pool: Pool, tmp_path: Path) -> None:
    command = pool.start(
        train_here,
        str(tmp_path / "run"),
        environment={},
        output=tmp_path / "out",
        errors=tmp_path / "err",
        directory=tmp_path,
    )
    assert command.wait() == 0, (tmp_path / "err").read_text()
    undisturbed = trained_by_command(pool, tmp_path / "command")
    made = load_file(tmp_path / "run/model.safetensors")
    assert all(torch.equal(made[name], undisturbed[name]) for name in undisturbed)


def test_what_the_recipe_raises_is_shown_where_the_run_was_asked_for(tmp_path: Path) -> None:
    def own_mistake(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        print("seen", *output.shape)
        raise KeyError("a key of the loss")

    broken = dataclasses.replace(tiny.line(), loss=own_mistake)
    events: list[Event] = []
    with pytest.raises(RecipeError, match="a key of the loss") as raised:
        shoal.train(broken, "data=1", run_dir=tmp_path / "run", progress=events.append)
    (trace,) = raised.value.__notes__
    assert trace.startswith(f"{__file__}:") and "in own_mistake: raise KeyError" in trace
    assert "trainer.py" not in trace and "logs/rank-000.log has all" in trace
    assert "training/trainer.py" in (tmp_path / "run/logs/rank-000.log").read_text()
    assert raised.value.outcome.steps == 0 and raised.value.outcome.trace == trace
    printed = [event.lines for event in events if isinstance(event, PrintedEvent)]
    assert printed == [["seen 8 1"]]


@pytest.mark.full
def test_what_the_recipe_raises_before_a_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(shoal.ShoalError, match="a key of the recipe's own") as raised:
        shoal.train(tiny.fails, run_dir=tmp_path / "other", progress=False)
    assert "in fails" in "".join(raised.value.__notes__)
    assert not (tmp_path / "other").exists()


def test_what_is_asked_for_wrongly_is_refused_before_a_process_starts() -> None:
    with pytest.raises(TypeError, match=r"no argument 'spare'.*spares"):
        shoal.train(tiny.line, spare=2)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"on=locl: there is no such back end.*local"):
        shoal.train(tiny.line, on="locl")
    with pytest.raises(UsageError, match="`int` >= 0"):
        shoal.train(tiny.line, spares=-1)
    with pytest.raises(UsageError, match="callbacks stay on this host"):
        shoal.train("mine.py:small", listen="127.0.0.1", callbacks=[print])
    with pytest.raises(UsageError, match=r"cannot be sent.*hold open files"):
        held = threading.Lock()
        shoal.train(lambda: held and tiny.line(), progress=False)
    assert set(TrainOptions.__annotations__) | {"plan", "resume", "begun", "on"} == set(
        Options.__struct_fields__
    ) - {"new_data_steps", "new_data_missed", "spans"}


@pytest.mark.full
def test_wrong_plans_and_settings_are_usage_errors(tmp_path: Path) -> None:
    for wrong, match in (
        ({"plan": "data=3"}, "8"),
        ({"settings": {"widht": 3}}, r"^settings=.*neither"),
        ({"plan": "data=4 hosts=2 sync=server", "listen": "127.0.0.1"}, "file.py:function"),
    ):
        with pytest.raises(UsageError, match=match):
            shoal.train(tiny.line, run_dir=tmp_path / "run", progress=False, **wrong)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_processes_of_a_recipe_that_go_on_do_not_hold_the_caller(tmp_path: Path) -> None:
    """Forked where the recipe is loaded, they have the pipe of the answers."""
    events: list[Event] = []

    def recipe() -> shoal.Run:
        if os.fork() == 0:
            os.setsid()
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(300)
            os._exit(0)
        return dataclasses.replace(tiny.line(), steps=1)

    def train() -> None:
        shoal.train(recipe, "data=1", run_dir=tmp_path / "run", progress=events.append)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(60.0)
    is_held = thread.is_alive()
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    thread.join()
    assert not is_held and any(isinstance(event, SavedEvent) for event in events)


SCRIPT = """
import sys
import threading
import shoal
if sys.argv[3] == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
from tests.system import tiny
try:
    outcome = shoal.train(tiny.line, "data=2", settings={"pause": 0.05, "steps": int(sys.argv[2])},
                          run_dir=sys.argv[1], resume=True)
except KeyboardInterrupt as error:
    print(error.outcome and (error.outcome.steps, error.outcome.is_saved))
    raise
print(outcome.steps)
"""


def start_script(tmp_path: Path, steps: int, kind: str = "threads") -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(steps), kind]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def num_steps(tmp_path: Path) -> int:
    record = tmp_path / "run/metrics.jsonl"
    return len(record.read_bytes().splitlines()) if record.exists() else 0


def train_until_interrupted(run_dir: str, steps: int) -> None:
    """In a fork of the warm process, which has no threads."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = shoal.train(
            tiny.line,
            "data=2",
            settings={"pause": 0.05, "steps": steps},
            run_dir=run_dir,
            resume=True,
        )
    except KeyboardInterrupt as error:
        assert error.outcome.is_saved
        print(error.outcome.steps, error)
    else:
        print(outcome.steps)


def test_an_interrupt_stops_and_saves_and_the_same_call_goes_on(pool: Pool, tmp_path: Path) -> None:
    said = []
    for number, steps in enumerate((400, 0)):
        output, errors = tmp_path / f"{number}.out", tmp_path / f"{number}.err"
        command = pool.start(
            train_until_interrupted,
            str(tmp_path / "run"),
            steps or num_steps(tmp_path) + 2,
            environment={},
            output=output,
            errors=errors,
            directory=tmp_path,
        )
        if steps:
            assert wait_until(lambda: num_steps(tmp_path) > 2, 40.0)
            command.send_signal(signal.SIGINT)
        assert command.wait() == 0, errors.read_text()
        said += [num_steps(tmp_path), output.read_text(), errors.read_text()]
    made, stopped, _, all_made, ended, told = said
    assert stopped.startswith(f"{made} stopped after step {made}") and "resume=True" in stopped
    assert (all_made, ended) == (made + 2, f"{made + 2}\n") and "going on from step" in told


@pytest.mark.full
@pytest.mark.parametrize("kind", ["threads", "no threads"])
def test_a_script_is_interrupted_and_the_same_call_goes_on(tmp_path: Path, kind: str) -> None:
    script = start_script(tmp_path, 400, kind)
    assert wait_until(lambda: num_steps(tmp_path) > 2, 40.0)
    script.send_signal(signal.SIGINT)
    output, errors = script.communicate(timeout=40)
    assert script.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt: stopped after step" in errors
    assert f"go on with the same call and resume=True, run_dir={tmp_path / 'run'}." in errors
    made = num_steps(tmp_path)
    assert output == f"({made}, True)\n"
    again = start_script(tmp_path, made + 2, kind)
    output, errors = again.communicate(timeout=40)
    assert output == f"{made + 2}\n", errors
    assert "going on from step" in errors


@pytest.mark.full
def test_an_interrupt_before_the_first_step_is_one(tmp_path: Path) -> None:
    script = start_script(tmp_path, 400, "threads")
    assert wait_until(lambda: (tmp_path / "run/logs").exists(), 40.0)
    script.send_signal(signal.SIGINT)
    _, errors = script.communicate(timeout=40)
    assert script.returncode == -signal.SIGINT, errors
    assert "KeyboardInterrupt: " in errors and "before the first step" in errors


@pytest.mark.full
def test_a_script_that_is_told_to_end_has_its_run_saved(tmp_path: Path) -> None:
    script = start_script(tmp_path, 400, "threads")
    assert wait_until(lambda: num_steps(tmp_path) > 2, 40.0)
    script.send_signal(signal.SIGTERM)
    output, errors = script.communicate(timeout=40)
    assert script.returncode == 0, errors  # the call returned, with the exit code 75
    assert output == f"{num_steps(tmp_path)}\n"


@pytest.mark.full
@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_run_whose_caller_is_killed_saves_itself(tmp_path: Path, is_interrupted: bool) -> None:
    script = start_script(tmp_path, 4000)
    assert wait_until(lambda: num_steps(tmp_path) > 2, 40.0)
    if is_interrupted:  # which the run has heard of, and is not to hear of twice
        script.send_signal(signal.SIGINT)
        events = tmp_path / "run/events.jsonl"
        assert wait_until(lambda: b'"stopping"' in events.read_bytes(), 40.0)
    script.kill()
    script.communicate()
    saved = tmp_path / "run/checkpoints"
    assert wait_until(lambda: saved.exists() and any(saved.glob("step-*/manifest.sha256")), 40.0)
    assert wait_until(lambda: not (tmp_path / "run/owner").exists(), 40.0)


CELLS = (
    """
import torch
from torch import nn
import shoal
xs = torch.linspace(-1, 1, 64)[:, None]
""",
    """
run = shoal.Run(
    model=lambda: nn.Linear(1, 1), loss=nn.functional.mse_loss,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    data=shoal.data.tensors(xs, 2 * xs), batch_size=8, steps=5,
)
outcome = shoal.train(run, "data=2")
print(outcome.steps, outcome.run_dir, sorted(outcome.model().state_dict()))
""",
)


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=50, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    said = json.dumps(notebook.cells[-1].outputs)
    assert "5 runs/notebook-1 ['bias', 'weight']" in said
    assert "5 steps of 8 samples" in said  # the progress is shown in the cell


def test_a_model_by_itself_needs_no_recipe(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()  # whose thread stays
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "gpt2")
    loaded = shoal.load(tmp_path / "gpt2")
    assert type(loaded) is type(model)
    assert torch.equal(loaded.state_dict()["lm_head.weight"], model.state_dict()["lm_head.weight"])
    weights = load_file(tmp_path / "gpt2/model.safetensors")
    del weights["transformer.ln_f.weight"]
    save_file(weights, tmp_path / "gpt2/model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"does not hold all weights.*ln_f\.weight"):
        shoal.load(tmp_path / "gpt2")
    described = json.loads((tmp_path / "gpt2/config.json").read_text())
    for name in ("MineForCausalLM", "pipeline"):
        (tmp_path / "gpt2/config.json").write_text(
            json.dumps(described | {"architectures": [name]})
        )
        with pytest.raises(UsageError, match="no model of transformers"):
            shoal.load(tmp_path / "gpt2")
    linear = nn.Linear(2, 1)
    torch.export.save(torch.export.export(linear, (torch.ones(3, 2),)), tmp_path / "model.pt2")
    program = shoal.load(tmp_path / "model.pt2")
    assert torch.equal(program(torch.ones(3, 2)), linear(torch.ones(3, 2)))


def test_weights_are_not_loaded_without_a_recipe_or_into_another_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 2)}, tmp_path / "weights.safetensors")
    (tmp_path / "run.json").write_text('{"recipe": "evil.py:run"}')
    with pytest.raises(UsageError, match="Name the recipe"):
        shoal.load(tmp_path)
    with pytest.raises(UsageError, match="Name the recipe"):
        shoal.load(tmp_path / "weights.safetensors")
    with pytest.raises(shoal.ShoalError):
        shoal.load(tmp_path / "weights.safetensors", tiny.line)
    with pytest.raises(UsageError, match=r"^settings=.*widht.*neither"):
        shoal.load(tmp_path / "weights.safetensors", tiny.line, settings={"widht": 3})
    with pytest.raises(UsageError, match="settings are for a recipe"):
        shoal.load(tmp_path, settings={"width": 3})
    (tmp_path / "bad.pt2").write_bytes(b"no program")
    with pytest.raises(UsageError, match=r"no program of torch\.export"):
        shoal.load(tmp_path / "bad.pt2")
