"""`export` and `import` as a user calls them: there and back, and what is wrong in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from shoal.checkpoint.load import CheckpointReader
from shoal.cli.checkpoint_export import FORMATS, export, import_
from shoal.errors import ShoalError
from shoal.formats.open_weights import open_weights
from shoal.storage.store import DirectoryStore
from shoal.training.recipe import load_recipe
from tests.unit.checkpoint.conftest import Said
from tests.unit.checkpoint.made import NAME, make

RECIPE = """
import torch
from torch import nn
import shoal

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, ids):
        return self.head(self.embed(ids)) * self.scale

def small(width: int = 8) -> shoal.Run:
    ids = torch.arange(60).view(20, 3) % 10
    return shoal.Run(
        model=lambda: Net(width),
        loss=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(ids, ids),
        batch_size=4,
        steps=2,
    )
"""

WRAPPED = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
import shoal

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50))

    def forward(self, ids):
        return self.inner(ids).logits

def small() -> shoal.Run:
    ids = torch.arange(60).view(20, 3) % 10
    return shoal.Run(
        model=Net,
        loss=lambda out, target: nn.functional.cross_entropy(out.flatten(0, 1), target.flatten()),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(ids, ids),
        batch_size=4,
        steps=2,
    )
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.py").write_text(RECIPE)
    return f"{tmp_path / 'recipe.py'}:small"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    weight = torch.randn(10, 8)
    state = {
        "model.embed.weight": weight,
        "model.scale": torch.tensor(2.0),
        "optimizer.embed.weight.momentum": weight,
    }
    make(tmp_path / "run" / "checkpoints", state)
    return tmp_path / "run" / "checkpoints" / NAME


def call(command: click.Command, *words: object) -> str:
    done = CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def refusal(command: click.Command, *words: object) -> str:
    """The sentence that a wrong command ends with; its exit code is 2."""
    with pytest.raises((ShoalError, click.ClickException)) as refused:
        command.main([str(word) for word in words], standalone_mode=False)
    assert refused.value.exit_code == 2
    text = str(getattr(refused.value, "message", refused.value))
    assert "\n" not in text
    return text


@pytest.mark.parametrize("form", ["safetensors", "huggingface", "state_dict", "dcp"])
def test_there_and_back(form: str, checkpoint: Path, recipe: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.safetensors" if form == "safetensors" else "out")
    told = call(export, checkpoint, out, "--to", form)
    assert "2 tensors, 324 B" in told
    told = call(import_, out, tmp_path / "back")
    assert "back: 2 tensors." in told
    found = CheckpointReader(DirectoryStore(tmp_path), "back")
    found.verify()
    wanted = open_weights(checkpoint).weights
    for name in ("model.embed.weight", "model.scale"):
        assert torch.equal(found.whole(name), wanted.whole(name))
    assert len(list(found)) == 2


@pytest.mark.parametrize("form", ["pt2", pytest.param("onnx", marks=pytest.mark.full)])
def test_a_program(
    form: str, checkpoint: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "onnx":
        monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")  # read when it is imported
        for module in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(module, reason="needs the extras onnx and test")
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread for a progress bar
    told = call(export, checkpoint, tmp_path / f"m.{form}", "--to", form, "--like", recipe)
    assert "a program for any number of samples" in told
    if form == "pt2":
        ids = torch.tensor([[1, 2, 3]] * 5)
        weight = open_weights(checkpoint).weights.whole("model.embed.weight")
        found = torch.export.load(tmp_path / "m.pt2").module()(ids)
        assert torch.allclose(found, 2 * weight[ids] @ weight.T, atol=1e-5)


def test_a_recipe_says_what_is_state_and_what_is_tied(
    checkpoint: Path, recipe: str, tmp_path: Path
) -> None:
    out = tmp_path / "m.pt"
    told = call(export, checkpoint, out, "--to", "state_dict", "--like", recipe)
    assert "left out: scale" in told
    loaded = torch.load(out, weights_only=True)
    assert set(loaded) == {"embed.weight", "head.weight"}
    call(import_, out, tmp_path / "a", "--like", recipe)
    assert list(CheckpointReader(DirectoryStore(tmp_path), "a")) == ["model.embed.weight"]


@pytest.mark.full
def test_a_hugging_face_model_inside_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers", reason="reads the Hugging Face layout")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # no thread for a progress bar
    (tmp_path / "wrapped.py").write_text(WRAPPED)
    recipe = f"{tmp_path / 'wrapped.py'}:small"
    model = load_recipe(recipe, {}).make_model()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    make(tmp_path / "c", {f"model.{name}": tensor.detach() for name, tensor in state.items()})
    words = ["--to", "huggingface", "--like", recipe, "--shard-size", "10KB"]
    assert "left out" not in call(export, tmp_path / "c", tmp_path / "hf", *words)
    assert (tmp_path / "hf" / "config.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    for name, tensor in model.inner.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    # And back: the names of the wrapped model, each tensor once.
    call(export, tmp_path / "c", tmp_path / "m.pt", "--to", "state_dict", "--like", recipe)
    call(import_, tmp_path / "m.pt", tmp_path / "a", "--like", recipe)
    call(export, tmp_path / "m.pt", tmp_path / "n.pt", "--to", "state_dict", "--like", recipe)
    first, second = (torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in "mn")
    assert first.keys() == second.keys() == model.state_dict().keys()


def test_a_file_is_what_it_holds_not_what_it_is_called(tmp_path: Path) -> None:
    state = {"w": torch.arange(6.0)}
    save_file(state, tmp_path / "a.pt")
    torch.save(state, tmp_path / "b.safetensors")
    save_file(state, tmp_path / "c")
    for name in ("a.pt", "b.safetensors", "c"):
        call(import_, tmp_path / name, tmp_path / f"from-{name}")
        assert torch.equal(
            CheckpointReader(DirectoryStore(tmp_path), f"from-{name}").whole("model.w"), state["w"]
        )
    for name, told in (("x.safetensors", "no sound safetensors"), ("x", "not what torch.save")):
        (tmp_path / name).write_bytes(b"neither the one nor the other")
        assert told in refusal(import_, tmp_path / name, tmp_path / "out")


def test_elements_take_the_types_of_the_model(recipe: str, tmp_path: Path) -> None:
    weight = torch.randn(10, 8).bfloat16()
    torch.save({"net": {"embed.weight": weight, "head.weight": weight}}, tmp_path / "m.pt")
    told = call(import_, tmp_path / "m.pt", tmp_path / "a", "--like", recipe, "--prefix", "net.")
    assert "converted to the model's types: embed.weight" in told
    found = CheckpointReader(DirectoryStore(tmp_path), "a").whole("model.embed.weight")
    assert torch.equal(found, weight.float())


def test_a_prefix_of_names_is_noticed_and_told(recipe: str, tmp_path: Path) -> None:
    torch.save({"net.embed.weight": torch.ones(10, 8)}, tmp_path / "m.pt")
    told = call(import_, tmp_path / "m.pt", tmp_path / "a", "--like", recipe)
    assert "1 tensors; 'net.' was cut off its names." in told
    found = CheckpointReader(DirectoryStore(tmp_path), "a").whole("model.embed.weight")
    assert bool((found == 1).all())


def test_what_is_not_of_the_model_is_refused(recipe: str, tmp_path: Path) -> None:
    weight = torch.randn(10, 8)
    for state, words in [
        ({"net.table": weight}, "not in it: embed.weight; not in the model: net.table"),
        ({"embed.weight": weight, "more": weight}, "not in the model: more). --prefix"),
        ({"embed.weight": weight[:, :4]}, "of another shape: embed.weight"),
        ({"embed.weight": weight.long()}, "of another kind of numbers: embed.weight"),
        ({"embed.weight": weight, "head.weight": weight + 1}, "are one tensor in the model"),
    ]:
        torch.save(state, tmp_path / "m.pt")
        assert words in refusal(import_, tmp_path / "m.pt", tmp_path / "a", "--like", recipe)
    assert not (tmp_path / "a").exists()


def test_a_run_directory_stands_for_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    run = checkpoint.parent.parent
    save_file({"other": torch.ones(1)}, run / "model.safetensors")  # as a finished run leaves it
    call(export, run, tmp_path / "m.safetensors", "--to", "safetensors")
    assert "embed.weight" in load_file(tmp_path / "m.safetensors")


def test_large_tensors_are_cut_into_chunks(tmp_path: Path) -> None:
    large = torch.randn(3000, 2000)  # more than one chunk holds
    torch.save({"a": large, "b": torch.ones(3, dtype=torch.float64)}, tmp_path / "m.pt")
    call(import_, tmp_path / "m.pt", tmp_path / "a")
    found = CheckpointReader(DirectoryStore(tmp_path), "a")
    found.verify()
    assert torch.equal(found.whole("model.a"), large)


def test_wrong_words_get_one_sentence(checkpoint: Path, recipe: str, tmp_path: Path) -> None:
    out, nothing = tmp_path / "out", tmp_path / "nothing"
    (tmp_path / "text.txt").write_text("hello")
    os.mkdir(tmp_path / "empty")
    cases = [
        ((export, nothing, out, "--to", "dcp"), "There is no"),
        ((export, tmp_path / "empty", out, "--to", "dcp"), "holds no checkpoint"),
        ((export, checkpoint, out, "--to", "pickle"), "'pickle' is not one of"),
        ((export, checkpoint, out, "--to", "pt2"), "needs the model"),
        ((export, checkpoint, out, "--to", "dcp", "--shard-size", "1GB"), "no effect"),
        ((export, checkpoint, out, "--to", "dcp", "--set", "width=3"), "no effect"),
        ((export, checkpoint, out, "--to", "huggingface", "--shard-size", "much"), "is no amount"),
        ((export, checkpoint, tmp_path, "--to", "dcp"), "there already"),
        (
            (export, checkpoint, out, "--to", "huggingface", "--like", recipe),
            "holds no Hugging Face model",
        ),
        (
            (export, checkpoint, out, "--to", "pt2", "--like", recipe, "--set", "width=3"),
            "not of the recipe's model",
        ),
        ((import_, nothing, out), "There is no"),
        ((import_, tmp_path / "text.txt", out), "not what torch.save writes"),
        ((import_, tmp_path / "empty", out), "nothing that can be imported"),
        ((import_, tmp_path / "text.txt", out, "--set", "width=3"), "no effect"),
    ]
    for words, sentence in cases:
        assert sentence in refusal(*words), words
    assert not out.exists() and "pt2" in FORMATS


def test_names_do_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"net.w": torch.ones(2), "\x1b[31m": torch.ones(2)}, tmp_path / "m.pt")
    said = Said(capsys, "import", tmp_path / "m.pt", tmp_path / "a", "--prefix", "net.")
    assert said.code == 0 and "left out: \\x1b[31m" in said.out and "\x1b" not in said.out
    said = Said(capsys, "list", tmp_path / "\x07")
    assert said.code == 2 and "There is no" in said.err and "\x07" not in said.err


FULL = """
import resource, sys
import torch
from shoal.cli.checkpoint_export import export, import_
from shoal.errors import UsageError

checkpoint, out, recipe = sys.argv[1:]
torch.save({"w": torch.ones(5000)}, out + ".pt")
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (200, most))
calls = [(import_, [out + ".pt", out])]
for form in ("safetensors", "huggingface", "state_dict", "dcp", "pt2"):
    more = ["--like", recipe] if form == "pt2" else []
    calls.append((export, [checkpoint, out, "--to", form, *more]))
for command, words in calls:
    try:
        command.main(words, standalone_mode=False)
    except UsageError as error:
        assert "cannot be written: File too large" in str(error), error
    else:
        raise AssertionError(words)
"""


@pytest.mark.full
def test_a_full_disk_costs_a_sentence(checkpoint: Path, recipe: str, tmp_path: Path) -> None:
    """A limit on the size of files, in a process of its own, stands for the disk."""
    out = tmp_path / "out"
    words = [sys.executable, "-c", FULL, str(checkpoint), str(out), recipe]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, env=environment)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt", "recipe.py", "run"]
