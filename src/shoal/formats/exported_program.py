"""Export a model as a program that runs without the recipe: torch.export (.pt2) and ONNX.

The recipe's model gets the checkpoint's weights and is traced with a few samples of its data, with
a dynamic batch size where the model allows it. The traced program is run and compared with the
model before anything is written; ONNX is also run in onnxruntime, if that is installed.
"""

import importlib.util
import inspect
import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import BadCheckpoint, RecipeError, UnusableCheckpoint, UsageError, require
from shoal.formats.match import match_tensors
from shoal.formats.new_output import new_files
from shoal.formats.weights import ModelWeights

NUM_SAMPLES = 3  # to trace with; torch treats 1 as a constant, and one less is tried as well
_TORCH = "torch.export"
_NO_REPORTS = "ORT_DISABLE_TELEMETRY"
_LARGEST_FILE = 1 << 30  # bytes of weights; ONNX's own format ends at 2 GB
_TOLERANCE = 1e-3  # of the largest element; other kernels sum in another order
_LOW_TOLERANCE = 2e-2  # in half precision


class ExampleInputs(NamedTuple):
    """The arguments of a call of the model with `num_samples` samples."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_samples: int

    def first(self, count: int) -> "ExampleInputs":
        """The same with fewer samples."""

        def cut(value: Any) -> Any:
            return value[:count] if self._has_samples(value) else value

        args, kwargs = pytree.tree_map(cut, (self.args, self.kwargs))
        return ExampleInputs(args, kwargs, count)

    def shapes(self, model: nn.Module, of_samples: Any) -> Any:
        """The dynamic dims by the model's own arguments, in the form that torch.export takes."""

        def mark(value: Any) -> Any:
            return {0: of_samples} if self._has_samples(value) else None

        taken = inspect.signature(model.forward).bind(*self.args, **self.kwargs)
        return pytree.tree_map(mark, dict(taken.arguments))

    def _has_samples(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:1] == (self.num_samples,)


class ExportResult(NamedTuple):
    """Whether the program takes any batch size, and what it was checked with."""

    any_batch: bool
    checked: str


def load_weights(model: nn.Module, weights: ModelWeights) -> str:
    """Copy weights into a model; raises BadCheckpoint with the names that do not match.

    Returns how names were changed, in words; empty if they were not.
    """
    found = match_tensors(weights, model)
    if problems := found.problems():
        raise BadCheckpoint(
            f"It is not of the recipe's model ({problems}). Give the recipe and the settings of "
            "its run."
        )
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    also = {name: name for name in own if name in weights.names}  # non-persistent buffers
    for name, source in (also | found.source_names).items():
        try:
            weights.fill(source, own[name].detach())
        except UnusableCheckpoint as bad:  # not one that is damaged, which says so
            raise BadCheckpoint(f"It is not of the recipe's model: {bad}") from bad
    return str(found.rule)


def export_pt2(model: nn.Module, inputs: ExampleInputs, path: Path) -> ExportResult:
    """Write a program that `torch.export.load` reads."""
    program, any_batch = _traced(model, inputs)
    content = io.BytesIO()  # a full disk would make torch abort the process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, content)
    with new_files(path) as partial:
        partial.write_bytes(content.getbuffer())
    return ExportResult(any_batch, "torch")


def load_program(path: Path) -> nn.Module:
    """The program in a file that `export_pt2` or torch.export.save wrote, as a module."""
    try:
        module: nn.Module = torch.export.load(path).module()
    except Exception as error:  # a damaged file makes many kinds
        raise UsageError(f"{path} is no program of torch.export: {_line(error)}") from error
    for mode in ("train", "eval"):  # which raise: a program was traced in one mode, and stays in it
        module.__dict__.pop(mode, None)
    return module


def export_onnx(model: nn.Module, inputs: ExampleInputs, path: Path) -> ExportResult:
    """Write an ONNX file; large weights go into a second file beside it."""
    checker = require("onnx", "onnx").checker
    require("onnxscript", "onnx")
    program, any_batch = _traced(model, inputs)
    large = sum(p.nbytes for p in model.state_dict().values()) > _LARGEST_FILE
    checked = "onnx's checker"
    with new_files(path) as partial:
        try:
            _write_onnx(program, partial, large)
            checker.check_model(partial)
        except OSError:
            raise
        except Exception as error:
            raise RecipeError(f"The model cannot be written as ONNX: {_line(error)}") from error
        if importlib.util.find_spec("onnxruntime") is not None:
            _check_onnx(model, partial, _tried(inputs, any_batch))
            checked = "onnxruntime"
    return ExportResult(any_batch, checked)


def _write_onnx(program: Any, path: Path, large: bool) -> None:
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                program, (), str(path), dynamo=True, external_data=large, verbose=False
            )
    finally:
        logger.setLevel(level)


def _traced(model: nn.Module, inputs: ExampleInputs) -> tuple[Any, bool]:
    """The traced program, and whether it takes any batch size; compared with the model."""
    model.eval()
    with _without_caches(model):
        program = _trace_any_batch(model, inputs)
        if program is None:  # a fixed number of samples may still do
            try:
                program = _trace(model, inputs, None)
            except Exception as error:
                raise RecipeError(f"torch.export cannot trace the model: {_line(error)}") from error
        any_batch = inputs.num_samples > 1 and _is_free(program)
        traced = program.module()
        for tried in _tried(inputs, any_batch):
            _compare(model, lambda given: traced(*given.args, **given.kwargs), tried, _TORCH)
    return program, any_batch


@contextmanager
def _without_caches(model: nn.Module) -> Iterator[None]:
    """Models of transformers answer with a cache of keys and values, which no program can hold."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching: list[Any] = [each for each in configs if getattr(each, "use_cache", False) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _trace_any_batch(model: nn.Module, inputs: ExampleInputs) -> Any:
    """A program that takes any batch size, else one of the traced size, else None.

    From its bytecode (strict) a model is traced that asks for len(x), but fewer models are.
    """
    found = None
    for strict in (False, True):
        with suppress(Exception), _without_monitor():  # of any kind
            traced = _trace(model, inputs, inputs.shapes(model, torch.export.Dim.AUTO), strict)
            if _is_free(traced):
                return traced
            found = found or traced
    return found


@contextmanager
def _without_monitor() -> Iterator[None]:
    """Without the thread that tqdm starts for a bar, also for those of torch that nobody sees."""
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if tqdm is None:
        yield
        return
    interval, tqdm.monitor_interval = tqdm.monitor_interval, 0
    try:
        yield
    finally:
        tqdm.monitor_interval = interval


def _trace(model: nn.Module, inputs: ExampleInputs, shapes: Any, strict: bool = False) -> Any:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(
            model, inputs.args, inputs.kwargs, dynamic_shapes=shapes, strict=strict
        )


def _is_free(program: Any) -> bool:
    """Whether the batch size stayed dynamic."""
    inputs = set(program.graph_signature.user_inputs)
    return any(
        isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in inputs
        for size in getattr(node.meta.get("val"), "shape", ())[:1]
    )


def _tried(inputs: ExampleInputs, any_batch: bool) -> Sequence[ExampleInputs]:
    return [inputs, inputs.first(inputs.num_samples - 1)] if any_batch else [inputs]


def _check_onnx(model: nn.Module, path: Path, tried: Sequence[ExampleInputs]) -> None:
    session = _session(path)
    names = [wanted.name for wanted in session.get_inputs()]

    def run(given: ExampleInputs) -> Any:
        tensors = [t for t in pytree.tree_leaves((given.args, given.kwargs)) if _is_tensor(t)]
        if len(tensors) != len(names):
            raise UsageError(f"The ONNX file takes {len(names)} tensors, not {len(tensors)}.")
        found = session.run(None, {name: t.numpy() for name, t in zip(names, tensors)})
        return [torch.from_numpy(array) for array in found]

    for given in tried:
        _compare(model, run, given, "onnxruntime")


def _session(path: Path) -> Any:
    """An onnxruntime session on a file, with telemetry disabled."""
    before = os.environ.get(_NO_REPORTS)
    os.environ[_NO_REPORTS] = "1"
    try:
        runtime = require("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    finally:
        if before is None:
            del os.environ[_NO_REPORTS]
        else:
            os.environ[_NO_REPORTS] = before


def _compare(
    model: nn.Module, run: Callable[[ExampleInputs], Any], given: ExampleInputs, what: str
) -> None:
    """Refuse a program whose outputs differ from the model's."""
    with torch.no_grad():
        wanted = [
            t for t in pytree.tree_leaves(model(*given.args, **given.kwargs)) if _is_tensor(t)
        ]
        try:
            found = [t for t in pytree.tree_leaves(run(given)) if _is_tensor(t)]
        except RuntimeError as error:
            raise RecipeError(f"{what} cannot run what was traced: {_line(error)}") from error
    pairs = zip(wanted, found)
    if len(wanted) != len(found) or not all(_alike(one, other) for one, other in pairs):
        raise RecipeError(
            f"With {given.num_samples} samples, {what} gives another result than the model. A "
            "model that draws random numbers or depends on values in its inputs cannot be exported."
        )


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    low = one.dtype in (torch.float16, torch.bfloat16)
    one, other = one.double(), other.double()
    scale = float(one.nan_to_num().abs().amax()) if one.numel() else 0.0
    tolerance = (_LOW_TOLERANCE if low else _TOLERANCE) * scale
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"


def example_inputs(inputs: Any, num_samples: int) -> ExampleInputs:
    """A sample's inputs as arguments: a tensor alone, a tuple in order, a dict by name."""
    if isinstance(inputs, Mapping):
        return ExampleInputs((), dict(inputs), num_samples)
    if isinstance(inputs, tuple | list):
        return ExampleInputs(tuple(inputs), {}, num_samples)
    return ExampleInputs((inputs,), {}, num_samples)
