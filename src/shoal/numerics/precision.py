"""Precision: the arithmetic of forward and backward, its loss scale, and what the CPU can run.

Parameters and optimizer state stay fp32; `bf16` and `fp16` run the operations that gain from it in
16 bits through autocast. fp16 has a narrow range, so its loss is multiplied by a scale that halves
when a gradient overflows and doubles after 2,000 good steps; bf16 has the range of fp32 and needs
none (arXiv:1710.03740). On CPUs without 16-bit units both are slower than fp32: they save bytes.

The AMX trap: a virtual CPU may advertise AMX and be unable to run it, and then the first bf16
matmul kills the process with SIGILL. `bf16_environment` finds out in a child process, once per CPU
and torch version, and returns the variables that cure it. oneDNN reads them at its first use and
never again. With torch 2.13 it obeyed a variable set before torch was imported and one set right
after, and ignored one set after a single fp32 matmul (seen in the instruction set it reports under
ONEDNN_VERBOSE=1). So set them in the process that starts the ranks, before it computes anything.

Cost: autocast a few microseconds per piece; the probe some seconds, once. Read next:
`shoal.trainer`.
"""

import hashlib
import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from shoal.errors import UsageError, nearest
from shoal.logs import warn_once
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import read_regular_file, write_atomic
from shoal.storage.run_dir import cache_directory

if TYPE_CHECKING:
    import torch


_AS_IT_IS: AbstractContextManager[None] = nullcontext()


class Precision(StrEnum):
    """A plan's `precision`. A member equals its name: `Precision("bf16") == "bf16"`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @classmethod
    def _missing_(cls, value: object) -> "Precision":
        names = [str(member) for member in cls]
        raise UsageError(
            f"precision={value} is not one of {', '.join(names)}. {nearest(str(value), names)}"
        )

    @property
    def dtype(self) -> "torch.dtype":
        """What autocast computes in."""
        import torch

        by_name = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        return by_name[self]

    def autocast(self, device_type: str) -> AbstractContextManager[Any]:
        """The context of a forward pass on "cpu" or "cuda"; may be entered again, not nested."""
        if self is Precision.FP32:
            return _AS_IT_IS
        import torch

        return torch.autocast(device_type, dtype=self.dtype)


class PrecisionSchedule(NamedTuple):
    """A plan's `precision` by step: each takes over after so many steps. Pure.

    `bf16` is that of all steps; `bf16@100` is fp32 for 100 steps and bf16 from there on;
    `bf16:fp32@900` is bf16 for 900 steps and fp32 from there on. fp16 stands alone, since its loss
    scale goes through the whole run.
    """

    turns: tuple[tuple[int, Precision], ...]  # steps made before it takes over, the first at 0

    @classmethod
    def parse(cls, text: str) -> "PrecisionSchedule":
        """Raises ValueError for text of another form, UsageError for another name."""
        first, *rest = text.split(":")
        words = [first, *rest] if "@" not in first else [Precision.FP32, first, *rest]
        turns = [(0, Precision(words[0]))]
        for word in words[1:]:
            name, _, step = word.partition("@")
            turns.append((int(step), Precision(name)))
            if not turns[-2][0] < turns[-1][0] or turns[-2][1] == turns[-1][1]:
                raise ValueError(text)
        if len(turns) > 1 and any(precision is Precision.FP16 for _, precision in turns):
            raise ValueError(text)
        return cls(tuple(turns))

    def __str__(self) -> str:
        (_, first), *rest = self.turns
        words = [f"{precision}@{step}" for step, precision in rest]
        return ":".join(words if rest and first is Precision.FP32 else [str(first), *words])

    def at(self, step: int) -> Precision:
        """The precision of the step that follows `step` others."""
        return [precision for first, precision in self.turns if first <= step][-1]

    @property
    def lowest(self) -> Precision:
        """The one with the fewest bits."""
        found = [precision for _, precision in self.turns]
        return next((one for one in found if one is not Precision.FP32), Precision.FP32)


def environment_for(precision: str) -> dict[str, str]:
    """What must be set in the environment, before the first matmul, to compute so."""
    is_bf16 = PrecisionSchedule.parse(precision).lowest is Precision.BF16
    return bf16_environment() if is_bf16 else {}


class ScaleState(NamedTuple):
    """What a checkpoint keeps of a loss scale, and what a new member copies."""

    value: float
    good_steps: int


class LossScale:
    """The factor of the loss before backward; gradients are divided by it in the update.

    Every rank of a replica sees the same overflows, since the finite flag is agreed, so all hold
    the same scale without exchanging it. Call `good_step` after each committed step and `overflow`
    when the agreed gradients are not finite; the batch is then repeated.
    """

    FIRST = 2.0**16
    MOST = 2.0**24
    STEPS_TO_GROW = 2000

    def __init__(self, precision: str) -> None:
        self.dynamic = PrecisionSchedule.parse(precision).lowest is Precision.FP16
        self.value = self.FIRST if self.dynamic else 1.0
        self._good_steps = 0

    def overflow(self) -> bool:
        """Halve the scale; False when it is 1 already, where no smaller scale can cure it."""
        if self.value <= 1.0:
            return False
        self.value = max(self.value / 2.0, 1.0)
        self._good_steps = 0
        return True

    def good_step(self) -> None:
        if not self.dynamic:
            return
        self._good_steps += 1
        if self._good_steps >= self.STEPS_TO_GROW:
            self.value = min(self.value * 2.0, self.MOST)
            self._good_steps = 0

    @property
    def state(self) -> ScaleState:
        return ScaleState(self.value, self._good_steps)

    def load(self, state: ScaleState) -> None:
        if not self.dynamic and state.value != 1.0:
            raise UsageError(
                f"A loss scale of {state.value:g} was saved, but only fp16 has one. "
                "Resume with the precision the run had."
            )
        self.value, self._good_steps = state


# What a bf16 model runs into: matmul, its gradient, a convolution, attention.
_PROBE = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import torch
x = torch.ones(64, 64, dtype=torch.bfloat16, requires_grad=True)
(x @ x).sum().backward()
image = torch.ones(2, 16, 16, 16, dtype=torch.bfloat16)
torch.nn.functional.conv2d(image, torch.ones(16, 16, 3, 3, dtype=torch.bfloat16))
heads = torch.ones(1, 2, 64, 64, dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
assert float(x.grad[0, 0]) == 128.0
"""
# Prints the median seconds of an fp32 matmul over those of a bf16 one.
_RACE = """
import statistics, time, torch
def seconds(dtype):
    x, laps = torch.ones(512, 512, dtype=dtype), []
    for _ in range(7):
        start = time.perf_counter()
        x @ x
        laps.append(time.perf_counter() - start)
    return statistics.median(laps)
print(seconds(torch.float32) / seconds(torch.bfloat16))
"""
_PROBE_TIMEOUT_S = 60.0
_REMEDIES: tuple[dict[str, str], ...] = ({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"})


def bf16_environment() -> dict[str, str]:
    """The variables to set before torch computes, so that bf16 runs on this CPU; mostly none.

    Raises UsageError where no remedy helps. Only a CPU that advertises AMX is probed, and the
    answer is kept in the cache directory.
    """
    model, flags = _cpu()
    if not any(flag.startswith("amx") for flag in flags):
        return {}
    kept = cache_directory() / f"bf16-{_fingerprint(model, flags)}.json"
    answer = _recall(kept)
    if answer is None:
        answer = choose_remedy(_try_bf16, model)
        _keep(kept, answer)
    return answer


def choose_remedy(attempt: Callable[[Mapping[str, str]], str], model: str) -> dict[str, str]:
    """The first remedy under which `attempt` finds nothing wrong."""
    reasons = []
    for remedy in _REMEDIES:
        wrong = attempt(remedy)
        if not wrong:
            return dict(remedy)
        setting = " ".join(f"{name}={value}" for name, value in remedy.items())
        reasons.append(f"{f'with {setting}' if setting else 'as it is'}: {wrong}")
    raise UsageError(
        f"A bf16 matmul does not run on this CPU ({model}): {'; '.join(reasons)}. "
        "bf16 needs a CPU whose instructions torch can use. Use precision=fp32."
    )


def bf16_speed(variables: Mapping[str, str]) -> float:
    """The speed of a bf16 matmul as a multiple of fp32's, measured in a child process."""
    try:
        done = _run(_RACE, variables)
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"A bf16 matmul of 512 x 512 did not finish within {_PROBE_TIMEOUT_S:g} s. "
            "Use precision=fp32."
        ) from None
    if done.returncode != 0:
        raise UsageError(f"A bf16 matmul failed: {_what_ended(done)}. Use precision=fp32.")
    return float(done.stdout)


def _try_bf16(variables: Mapping[str, str], program: str = _PROBE) -> str:
    """Run bf16 in a child under `variables`: what went wrong, or nothing."""
    try:
        done = _run(program, variables)
    except subprocess.TimeoutExpired:
        return f"it did not finish within {_PROBE_TIMEOUT_S:g} s"
    return "" if done.returncode == 0 else _what_ended(done)


def _run(program: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
    )


def _what_ended(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"killed by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _cpu(path: str = "/proc/cpuinfo") -> tuple[str, tuple[str, ...]]:
    """Model name and flags of the first CPU; empty where the system does not tell."""
    model, flags = "", ""
    try:
        with open(path) as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    model = value.strip()
                elif name.strip() == "flags":
                    flags = value
                    break
    except FileNotFoundError:  # not Linux
        return "", ()
    return model, tuple(flags.split())


def _fingerprint(model: str, flags: tuple[str, ...]) -> str:
    """Of all that the answer depends on."""
    parts = (
        model,
        " ".join(flags),
        importlib.metadata.version("torch"),
        os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
        os.environ.get("DNNL_MAX_CPU_ISA", ""),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _recall(path: Path) -> dict[str, str] | None:
    try:
        answer = try_decode_json(read_regular_file(path), dict[str, str])
    except OSError:  # never asked, or nothing that can be read: ask again
        return None
    return answer if answer in _REMEDIES else None  # it becomes part of the environment


def _keep(path: Path, answer: dict[str, str]) -> None:
    """Two processes that probe at once write the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, msgspec.json.encode(answer))
    except OSError as error:
        warn_once(
            f"{path} could not be written ({error.strerror}), so bf16 is probed again each time. "
            "Set SHOAL_CACHE to a directory that is writable."
        )
