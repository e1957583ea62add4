"""Small recipes whose trained models are used: a classifier, and language models."""

import time
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

KINDS = 3


def classifier(width: int = 8, pause: float = 0.0, has_evaluate: bool = True) -> shoal.Run:
    """BatchNorm and dropout, which tell an evaluation from a step; 101 samples to evaluate."""
    inputs = torch.arange(404.0).view(101, 4).sin()
    target = torch.arange(101) % KINDS

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(pause)
        return (output.argmax(1) == target).float().mean()

    return shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(4, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(width, KINDS),
        ),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(inputs[:48], target[:48]),
        evaluate=shoal.data.tensors(inputs, target) if has_evaluate else None,
        metrics={"accuracy": accuracy},
        batch_size=12,
        steps=6,
    )


def tabled() -> shoal.Run:
    """An embedding with sparse gradients, which only servers or one rank can train."""
    samples = shoal.data.tensors(torch.arange(30), torch.arange(30) % KINDS)
    return shoal.Run(
        model=lambda: nn.Sequential(nn.Embedding(30, 4, sparse=True), nn.Linear(4, KINDS)),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=samples,
        evaluate=samples,
        batch_size=10,
        steps=2,
    )


class Embedded(nn.Module):
    """Causal, with positions for `length` tokens and no more."""

    def __init__(self, tokens: int, length: int, width: int = 16):
        super().__init__()
        self.embed, self.position = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.layer(self.embed(tokens) + self.position(places), mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def language_loss(output: object, target: Tensor) -> Tensor:
    logits = getattr(output, "logits", output)
    assert isinstance(logits, Tensor)
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


TEXT = "she sells sea shells by the sea shore. " * 20


def characters(length: int = 12) -> shoal.Run:
    tokenizer = shoal.data.Characters("".join(sorted(set(TEXT))))
    return shoal.Run(
        model=lambda: Embedded(len(tokenizer.alphabet), length),
        loss=language_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.windows(torch.tensor(tokenizer.encode(TEXT)), length),
        batch_size=8,
        steps=20,
        tokenizer=tokenizer,
    )


def without_tokenizer() -> shoal.Run:
    return shoal.Run(**{**vars(characters()), "tokenizer": None})


def no_language_model() -> shoal.Run:
    """Whose tokens could be written, if the model gave any."""
    return shoal.Run(**{**vars(classifier()), "tokenizer": shoal.data.Characters("abc")})


class Wrapped(nn.Module):
    """A model of transformers inside of another: its names have a prefix."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.inner = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.inner(tokens).logits
        return logits


def llama(wrapped: bool = False, has_tokenizer: bool = True) -> shoal.Run:
    """A tiny model of transformers, whose own `generate` writes."""
    import transformers

    tokenizer = shoal.data.Characters("".join(sorted(set(TEXT))))
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer.alphabet),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )

    def model() -> nn.Module:
        made = transformers.LlamaForCausalLM(config)
        return Wrapped(made) if wrapped else made

    return shoal.Run(
        model=model,
        loss=language_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.windows(torch.tensor(tokenizer.encode(TEXT)), 12),
        batch_size=8,
        steps=4,
        tokenizer=tokenizer if has_tokenizer else None,
    )


def dying(file: str = "died") -> shoal.Run:
    """One process of those that evaluate ends itself in the middle, once."""
    import os
    import signal

    run, numbers = classifier(), count()

    def accuracy(output: Tensor, target: Tensor) -> Tensor:
        if next(numbers) == 2 and not os.path.exists(file):
            try:
                os.close(os.open(file, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return (output.argmax(1) == target).float().mean()

    return shoal.Run(**{**vars(run), "metrics": {"accuracy": accuracy}})
