"""Write text with a causal language model: what `shoal.generate` and `shoal generate` call.

Text becomes tokens, and tokens text, by the Run's `tokenizer`: anything with `encode` and `decode`,
such as those of transformers; without one, by the tokenizer in the directory of Hugging Face that
the weights are from, or that their run began with. A model of transformers writes by its own
`generate`, which keeps keys and values. Any other that maps tokens [batch, time] to logits [batch,
time, vocabulary] is called once for each token, with as many of the last tokens as it was trained
on.

The same seed gives the same text. Temperature 0 takes the likeliest token each time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict, Unpack

import msgspec
import torch
from torch import Tensor, nn

from shoal.data.batches import LoadOptions
from shoal.data.pieces import pieces_in_order
from shoal.data.sources import stream_of
from shoal.errors import RecipeError, ShoalError, UsageError, nearest, require
from shoal.formats.companions import origin_directory
from shoal.training.load import load
from shoal.training.recipe import load_recipe
from shoal.training.run import Run, call_model

if TYPE_CHECKING:
    from shoal.checkpoint.find import PathOrUrl

_NO_LANGUAGE_MODEL = (
    "generate() needs a causal language model: one of transformers, or one that maps token ids "
    "[batch, time] to logits [batch, time, vocabulary]"
)


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen; `shoal generate --help` says what each is."""

    tokens: int
    temperature: float
    seed: int
    top_k: int | None
    top_p: float | None


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tokens: Annotated[int, msgspec.Meta(ge=1)] = 200
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.8
    seed: int = 0
    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature):
            raise UsageError(f"temperature={self.temperature} must be a number from 0 on.")


class GeneratedText(NamedTuple):
    text: str  # the prompt, and what follows it
    tokens: int  # that were written
    completion: str  # what follows the prompt


def generate(
    run_or_recipe: str | Run | Callable[..., Run],
    from_: "PathOrUrl",
    prompt: str,
    *,
    settings: Mapping[str, Any] | None = None,
    **sampling: Unpack[SamplingOptions],
) -> GeneratedText:
    """Let a trained language model write on from `prompt`.

    `from_` is a run directory, a checkpoint, or weights that another program wrote. `sampling` has
    `tokens` (200), the number to write; `temperature` (0.8), 0 for the likeliest token each time;
    `seed` (0); and `top_k` and `top_p`, which leave out unlikely tokens.
    """
    chosen = _sampling(sampling)
    if not prompt:
        raise UsageError("The prompt is empty, and a model writes on from something. Give a text.")
    run = load_recipe(run_or_recipe, {name: str(v) for name, v in (settings or {}).items()})
    tokenizer = _tokenizer(run, from_)
    tokens = _encoded(tokenizer, prompt)
    model = load(from_, run)
    inner = _transformer(model)
    with torch.no_grad():
        if inner is not None:
            written = _write_by_transformers(inner, tokens, chosen)
        else:
            written = _write(model, _example(run), tokens, chosen)
    text = _decoded(tokenizer, [*tokens, *written])
    return GeneratedText(text, len(written), text[len(_decoded(tokenizer, tokens)) :])


def _sampling(given: Mapping[str, Any]) -> Sampling:
    for name in given:
        if name not in SamplingOptions.__annotations__:
            known = nearest(name, SamplingOptions.__annotations__)
            raise TypeError(f"generate() has no argument {name!r}. {known}")
    try:
        return msgspec.convert(dict(given), Sampling)
    except msgspec.ValidationError as error:
        raise UsageError(f"generate() cannot do that: {error}.") from None


# ---- text and tokens


def _tokenizer(run: Run, from_: "PathOrUrl") -> Any:
    if run.tokenizer is not None:
        return run.tokenizer
    directory = origin_directory(from_)
    if directory is not None:
        transformers = require("transformers", extra="transformers")
        try:
            return transformers.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            first = str(error).strip().split("\n")[0]
            raise UsageError(
                f"{directory} has no tokenizer that transformers could load: {first} Give the Run "
                "a tokenizer=."
            ) from error
    raise UsageError(
        "The recipe does not say how text becomes tokens. Give its Run tokenizer=an object with "
        "encode(text) and decode(ids): a tokenizer of transformers, or shoal.data.Characters. "
        f"{_NO_LANGUAGE_MODEL}."
    )


def _encoded(tokenizer: Any, text: str) -> list[int]:
    try:
        tokens = [int(token) for token in tokenizer.encode(text)]
    except ShoalError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"The tokenizer failed on the prompt: {what}") from error
    if not tokens:
        raise UsageError(f"The tokenizer makes no token of the prompt {text!r}. Give another text.")
    return tokens


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    try:
        if hasattr(tokenizer, "save_pretrained"):  # of transformers, with marks that are no text
            return str(tokenizer.decode(tokens, skip_special_tokens=True))
        return str(tokenizer.decode(tokens))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"The tokenizer failed on what the model wrote: {what}") from error


# ---- models of transformers


def _transformer(model: nn.Module) -> Any:
    """The outermost module that writes by itself; None if there is none."""
    for module in model.modules():
        can = getattr(module, "can_generate", None)
        if callable(can) and can():
            if getattr(module.config, "is_encoder_decoder", False):
                raise UsageError(
                    f"The model is a {type(module).__name__}, which turns one text into another. "
                    f"{_NO_LANGUAGE_MODEL}."
                )
            return module
    return None


def _write_by_transformers(model: Any, tokens: list[int], sampling: Sampling) -> list[int]:
    most = getattr(model.config, "max_position_embeddings", None)
    if isinstance(most, int) and len(tokens) + sampling.tokens > most:
        raise UsageError(
            f"A prompt of {len(tokens)} tokens and {sampling.tokens} to write are "
            f"{len(tokens) + sampling.tokens}, and the model has {most} positions. Ask for fewer."
        )
    known = model.generation_config
    ends = known.eos_token_id[0] if isinstance(known.eos_token_id, list) else known.eos_token_id
    pads = next((t for t in (known.pad_token_id, ends) if t is not None), 0)
    options: dict[str, Any] = {"max_new_tokens": sampling.tokens, "pad_token_id": pads}
    if sampling.temperature:
        options |= {"do_sample": True, "temperature": sampling.temperature}
        options |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
    else:
        options |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    given = torch.tensor([tokens])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sampling.seed)
        try:
            found = model.generate(given, attention_mask=torch.ones_like(given), **options)
        except Exception as error:
            raise _failed(error) from error
    written: list[int] = found[0, len(tokens) :].tolist()
    return written


# ---- any other model


def _example(run: Run) -> Tensor:
    """The tokens of one sample, which say how long a text may be, and of which type."""
    has_stream = stream_of(run.data) is not None and run.evaluate is not None
    source = run.evaluate if has_stream else run.data
    inputs = pieces_in_order(source, 1, LoadOptions(run.collate))[0].inputs
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
        form = type(inputs).__name__
        if isinstance(inputs, Tensor):
            form = f"{str(inputs.dtype).removeprefix('torch.')} {list(inputs.shape)}"
        raise UsageError(f"The recipe's model takes {form} for a sample. {_NO_LANGUAGE_MODEL}.")
    return inputs


def _write(model: nn.Module, example: Tensor, tokens: list[int], sampling: Sampling) -> list[int]:
    draws = torch.Generator().manual_seed(sampling.seed)
    known, length = list(tokens), example.shape[1]
    for _ in range(sampling.tokens):
        given = torch.tensor([known[-length:]], dtype=example.dtype)
        try:
            output = call_model(model, given)
        except Exception as error:
            raise _failed(error) from error
        known.append(next_token(_last_logits(output, given.shape[1]), sampling, draws))
    return known[len(tokens) :]


def _last_logits(output: Any, length: int) -> Tensor:
    found = getattr(output, "logits", output)
    if isinstance(found, tuple) and found:
        found = found[0]
    if not isinstance(found, Tensor) or found.dim() != 3 or found.shape[:2] != (1, length):
        form = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(
            f"For tokens of the shape [1, {length}] the model answered with {form}. "
            f"{_NO_LANGUAGE_MODEL}."
        )
    return found[0, -1].float()


def next_token(logits: Tensor, sampling: Sampling, draws: torch.Generator) -> int:
    """Choose a token by its logits [vocabulary]."""
    if not torch.isfinite(logits).any() or torch.isnan(logits).any():
        raise RecipeError("The model's logits are not finite, so no token is likelier than others.")
    if not sampling.temperature:
        return int(logits.argmax())
    scaled, places = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k is not None:
        scaled = scaled[: sampling.top_k]
    likely = scaled.softmax(0)
    if sampling.top_p is not None:  # the fewest tokens that make up so much, the first at least
        likely = likely[likely.cumsum(0) - likely < sampling.top_p]
    return int(places[torch.multinomial(likely, 1, generator=draws)])


def _failed(error: Exception) -> ShoalError:
    if isinstance(error, ShoalError):
        return error
    return RecipeError(f"The model failed while it wrote: {type(error).__name__}: {error}")
