"""A zoo of tiny models, each a run that every plan must train as one process would.

Each is a recipe, so that tests and people name it as a user would: `tests/zoo.py:gpt`. TEN are the
kinds that people train most; MORE are unlike them and one another. Widths, heads and channels
divide by 4, so any of them can be cut over 2 or 4 ranks; each is deep enough for 4 stages. The data
is in memory and comes from a seed. Some clip, and AdamW and SGD with momentum take turns;
`decayed` and `swung` leave weight decay off vectors, as most training does, in a group of its own.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.training.recipe import find_recipe

TEN = ("mlp", "cnn", "unet", "lstm", "gpt", "moe", "towers", "gpt2", "llama", "bert")
MORE = ("encoder", "frozen", "t5", "bart", "seq2seq", "convnext", "several")
NUM_SAMPLES, LENGTH, TOKENS, KINDS = 64, 8, 48, 12
# By its file, as a recipe is, so that it works from any directory.
GPT = find_recipe(f"{Path(__file__).parents[1] / 'recipes' / 'charlm.py'}:GPT")

Named = list[tuple[str, nn.Parameter]]
Optimizer = Callable[[Any], torch.optim.Optimizer]


def adam(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=2e-3)


def momentum(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.02, momentum=0.9)


def _groups(named: Named) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without."""
    return [
        {"params": [(name, p) for name, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def decayed(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_groups(named), lr=2e-3, betas=(0.9, 0.95))


def swung(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(_groups(named), lr=0.02, momentum=0.9, nesterov=True)


def run_of(
    model: Callable[[], nn.Module],
    data: Any,
    loss: Callable[[Any, Any], Any],
    optimizer: Optimizer,
    clip: float | None = None,
) -> shoal.Run:
    return shoal.Run(
        model=model,
        loss=loss,
        optimizer=optimizer,
        data=shoal.data.tensors(*data),
        batch_size=16,
        steps=20,
        clip=clip,
    )


# ---- data and losses


def normal(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(NUM_SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 7, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, TOKENS, (NUM_SAMPLES, length), generator=generator)


def next_tokens() -> tuple[Tensor, Tensor]:
    text = tokens(length=LENGTH + 1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def kinds(of: Tensor) -> Tensor:
    """A label that can be learned from the sample."""
    return of.flatten(1).float().mean(1).argsort().argsort() * KINDS // NUM_SAMPLES


def padding() -> Tensor:
    """A mask under which samples have 4 tokens or more."""
    lengths = torch.arange(NUM_SAMPLES)[:, None] % (LENGTH - 3) + 4
    return (torch.arange(LENGTH)[None] < lengths).long()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def logits_loss(output: Any, target: Tensor) -> Tensor:
    """Of what models of transformers return."""
    logits: Tensor = output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


# ---- the ten


def mlp(dropout: float = 0.1, layers: int = 6) -> shoal.Run:
    def model() -> nn.Module:
        hidden = [(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout)) for _ in range(layers - 2)]
        inner = [module for block in hidden for module in block]
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), *inner, nn.Linear(64, KINDS))

    inputs = normal(32)
    return run_of(model, (inputs, kinds(inputs)), F.cross_entropy, decayed, clip=1.0)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to what came in."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm_first = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm_second = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm_first(self.first(x)))
        past = x if self.short is None else self.short(x)
        return F.relu(past + self.norm_second(self.second(hidden)))


class Flat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def cnn() -> shoal.Run:
    def model() -> nn.Module:
        stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))
        blocks = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 32, 1)]
        return nn.Sequential(stem, nn.ReLU(), *blocks, Flat(), nn.Linear(32, KINDS))

    images = normal(3, 8, 8)
    return run_of(model, (images, kinds(images)), F.cross_entropy, swung)


class UNet(nn.Module):
    """What the way down finds skips to the same height on the way up."""

    def __init__(self, width: int = 8):
        super().__init__()

        def block(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()
            )

        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(block, [3, *sizes[:-1]], sizes))
        self.middle = block(sizes[-1], sizes[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(size, size, 2, 2) for size in reversed(sizes))
        self.join = nn.ModuleList(block(2 * size, max(size // 2, width)) for size in sizes[::-1])
        self.paint = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], 1))
        painted: Tensor = self.paint(x)
        return painted


def unet() -> shoal.Run:
    images = normal(3, 16, 16)
    return run_of(UNet, (images, images.roll(1, 3).tanh()), F.mse_loss, adam, clip=1.0)


class Reader(nn.Module):
    """Reads a sequence both ways, and names its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.both = nn.LSTM(32, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.over = nn.LSTM(64, 32, batch_first=True)
        self.head = nn.Linear(32, KINDS)

    def forward(self, text: Tensor) -> Tensor:
        read, _ = self.both(self.embed(text))
        _, (state, _) = self.over(read)
        named: Tensor = self.head(state[-1])
        return named


def lstm() -> shoal.Run:
    return run_of(Reader, (tokens(), kinds(tokens())), F.cross_entropy, momentum, clip=1.0)


def gpt(layers: int = 4, dropout: float = 0.1) -> shoal.Run:
    def model() -> nn.Module:
        made: nn.Module = GPT(TOKENS, LENGTH, layers, width=32, heads=4, dropout=dropout)
        return made

    return run_of(model, next_tokens(), token_loss, decayed, clip=1.0)


class Experts(nn.Module):
    """Each token goes to two experts of four; which, and how many an expert gets, the data says."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        mixed = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            if rows.numel():
                answer = expert(flat[rows]) * weights[rows, places, None]
                mixed = mixed.index_add(0, rows, answer)
        return mixed.view_as(x)


class Mixture(nn.Module):
    def __init__(self, width: int = 32, layers: int = 3):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(Experts(width) for _ in range(layers))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        for mix, experts in zip(self.mix, self.experts, strict=True):
            x = x + mix(x).tanh().cumsum(1) / LENGTH
            x = x + experts(x)
        logits: Tensor = self.head(x)
        return logits


def moe() -> shoal.Run:
    return run_of(Mixture, next_tokens(), token_loss, momentum)


class Towers(nn.Module):
    """One tower for users, one for things; whether they meet is the product of what they say."""

    def __init__(self, width: int = 32):
        super().__init__()

        def tower() -> nn.Sequential:
            return nn.Sequential(
                nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, width)
            )

        self.users, self.things = nn.Embedding(100, width), nn.Embedding(200, width)
        self.of_user, self.of_thing = tower(), tower()

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        left, right = self.of_user(self.users(user)), self.of_thing(self.things(thing))
        return 4 * F.cosine_similarity(left, right)


def towers() -> shoal.Run:
    user, thing = tokens()[:, 0], tokens(8)[:, 0] * 4
    met = ((user + thing) % 3 == 0).float()
    pairs = {"user": user, "thing": thing}
    return run_of(Towers, (pairs, met), F.binary_cross_entropy_with_logits, decayed)


# Importing transformers takes seconds, so only the models that come from it do.


def gpt2(layers: int = 4, dropout: float = 0.0) -> shoal.Run:
    def model() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes: Any = {"vocab_size": TOKENS, "n_positions": LENGTH, "n_embd": 32, "n_head": 4}
        drops: Any = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": 0.0}
        ends: Any = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        return GPT2LMHeadModel(GPT2Config(**sizes, n_layer=layers, **drops, **ends))

    return run_of(model, next_tokens(), logits_loss, decayed, clip=1.0)


def llama(layers: int = 4) -> shoal.Run:
    """Rotary positions; two heads of keys and values serve four of queries."""

    def model() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes: Any = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64, **heads}
        rest: Any = {"max_position_embeddings": LENGTH, "use_cache": False}
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **rest))

    text, target = next_tokens()
    return run_of(model, ({"input_ids": text}, target), logits_loss, adam, clip=1.0)


def bert(layers: int = 4, dropout: float = 0.1) -> shoal.Run:
    """Padded sentences, one label each."""

    def model() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        sizes: Any = {"vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 64}
        sizes |= {"num_attention_heads": 4, "max_position_embeddings": LENGTH}
        drops: Any = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(num_hidden_layers=layers, num_labels=KINDS, **sizes, **drops)
        return BertForSequenceClassification(config)

    words = {"input_ids": tokens() * padding(), "attention_mask": padding()}
    return run_of(model, (words, kinds(tokens())), logits_loss, swung)


# ---- more of them


class Encoder(nn.Module):
    """torch's own attention, whose three projections are one parameter and no module."""

    def __init__(self, layers: int, dropout: float):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed = nn.Linear(8, 32)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(32), False)
        self.head = nn.Linear(32, KINDS)

    def forward(self, series: Tensor) -> Tensor:
        named: Tensor = self.head(self.layers(self.embed(series)).mean(1))
        return named


def encoder(layers: int = 4, dropout: float = 0.0) -> shoal.Run:
    series = normal(LENGTH, 8)
    data = series, kinds(series)
    return run_of(lambda: Encoder(layers, dropout), data, F.cross_entropy, momentum, clip=1.0)


class Tuned(nn.Module):
    """A frozen body with a small trained part after each layer, a scale, and one that idles."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32)) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.idle = nn.Linear(32, 32)
        self.head = nn.Linear(32, KINDS)
        self.body.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer, part in zip(self.body, self.parts, strict=True):
            x = layer(x).relu()
            x = x + self.scale * part(x)
        named: Tensor = self.head(x)
        return named


def frozen() -> shoal.Run:
    inputs = normal(32)
    return run_of(Tuned, (inputs, kinds(inputs)), F.cross_entropy, adam, clip=1.0)


def _two_texts() -> tuple[dict[str, Tensor], Tensor]:
    """A text and, shifted by one, another that repeats it backwards."""
    text = tokens()
    said = text.flip(1)
    heard = torch.cat([torch.zeros(NUM_SAMPLES, 1, dtype=torch.long), said[:, :-1]], 1)
    return {"input_ids": text, "decoder_input_ids": heard}, said


def t5(layers: int = 2) -> shoal.Run:
    """Two stacks; in each, all layers share the first one's table of relative positions."""

    def model() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes: Any = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
        rest: Any = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
        return T5ForConditionalGeneration(T5Config(num_layers=layers, **sizes, **rest))

    return run_of(model, _two_texts(), logits_loss, momentum, clip=1.0)


def bart(layers: int = 2, dropout: float = 0.0) -> shoal.Run:
    def model() -> nn.Module:
        from transformers import BartConfig, BartForConditionalGeneration

        depth: Any = {"encoder_layers": layers, "decoder_layers": layers, "dropout": dropout}
        heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        sizes: Any = {
            "vocab_size": TOKENS,
            "d_model": 32,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        }
        ids: Any = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        ids |= {"decoder_start_token_id": 0, "forced_eos_token_id": None}
        config = BartConfig(max_position_embeddings=LENGTH, **depth, **heads, **sizes, **ids)
        return BartForConditionalGeneration(config)

    return run_of(model, _two_texts(), logits_loss, decayed)


class Speaker(nn.Module):
    """Hears a sequence, then says one, token by token, in a loop over one cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.hear = nn.GRU(32, 32, batch_first=True)
        self.say = nn.GRUCell(32, 32)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        _, (state,) = self.hear(self.embed(input_ids))
        states = []
        for word in self.embed(decoder_input_ids).unbind(1):
            state = self.say(word, state)
            states.append(state)
        logits: Tensor = self.head(torch.stack(states, 1))
        return logits


def seq2seq() -> shoal.Run:
    return run_of(Speaker, _two_texts(), token_loss, adam)


class Wide(nn.Module):
    """A depthwise convolution, then each pixel by itself; channels scaled by a bare parameter."""

    def __init__(self, width: int):
        super().__init__()
        self.depth = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.GroupNorm(4, width)
        self.widen, self.narrow = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.gelu(self.widen(self.norm(self.depth(x))))
        added: Tensor = x + self.scale * self.narrow(wide)
        return added


def convnext() -> shoal.Run:
    def model() -> nn.Module:
        stem, between = nn.Conv2d(3, 16, 2, 2), nn.Conv2d(16, 32, 2, 2)
        blocks = [stem, Wide(16), Wide(16), between, Wide(32), Wide(32)]
        return nn.Sequential(*blocks, Flat(), nn.LayerNorm(32), nn.Linear(32, KINDS))

    images = normal(3, 16, 16)
    return run_of(model, (images, kinds(images)), F.cross_entropy, adam, clip=1.0)


class Several(nn.Module):
    """Three tensors in, a dict out, and a loss over both of its entries."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(TOKENS, 32), nn.Linear(8, 32)
        self.trunk = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.kind, self.size = nn.Linear(32, KINDS), nn.Linear(32, 1)

    def forward(self, text: Tensor, numbers: Tensor, weight: Tensor) -> dict[str, Tensor]:
        x = self.words(text).mean(1) + weight[:, None] * self.numbers(numbers)
        for layer in self.trunk:
            x = x + layer(x).tanh()
        return {"kind": self.kind(x), "size": self.size(x).squeeze(1)}


def several() -> shoal.Run:
    def loss(output: dict[str, Tensor], target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A sum and its weight: sizes count by what the sample says."""
        named = F.cross_entropy(output["kind"], target["kind"], reduction="none")
        missed = (output["size"] - target["size"]).square()
        return (target["weight"] * (named + missed)).sum(), target["weight"].sum()

    numbers, weight = normal(8), normal(seed=9).abs() + 0.1
    target = {"kind": kinds(tokens()), "size": numbers.sum(1).tanh(), "weight": weight}
    return run_of(Several, ((tokens(), numbers, weight), target), loss, swung)
