"""A small GPT that learns to write Shakespeare, one character at a time.

    shoal train recipes/charlm.py:small
    shoal train recipes/charlm.py:small --plan "data=2" --set layers=6 --set steps=50
    shoal verify recipes/charlm.py:small --plan "data=2"
    shoal generate recipes/charlm.py:small --from runs/charlm-small-1 --prompt "ROMEO:"

Pre-norm blocks, learned positions, and one matrix for the embedding and the head. The loss starts
at the logarithm of the alphabet's size (84 characters: 4.43) and is near 2.4 after 300 steps.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal


class Block(nn.Module):
    """Attention over what came before, then a layer on each position by itself."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm_attention(x)))
        x = x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        return x

    def attend(self, x: Tensor) -> Tensor:
        # [batch, time, 3 * width] -> three of [batch, heads, time, width of a head]
        q, k, v = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return projected

    def feed_forward(self, x: Tensor) -> Tensor:
        narrowed: Tensor = self.narrow(F.relu(self.widen(x)).square())
        return narrowed


class GPT(nn.Module):
    def __init__(
        self, tokens: int, length: int, layers: int, width: int, heads: int, dropout: float
    ):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # What adds to the residual stream starts smaller, the more of it there is.
                adds = name.endswith(("project.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds else 0.02)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def small(
    layers: int = 4, width: int = 128, heads: int = 4, length: int = 128, dropout: float = 0.1
) -> shoal.Run:
    if width % heads:
        raise shoal.ShoalError(
            f"width={width} cannot be shared by {heads} heads. The heads must divide the width."
        )
    text = shoal.data.catalog.text("shakespeare")
    cut = len(text.tokens) * 95 // 100
    return shoal.Run(
        model=lambda: GPT(len(text.alphabet), length, layers, width, heads, dropout),
        loss=cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3, betas=(0.9, 0.98)),
        schedule=shoal.schedules.cosine(warmup=20),
        clip=1.0,
        data=shoal.data.windows(text.tokens[:cut], length),
        evaluate=shoal.data.windows(text.tokens[cut:], length),
        batch_size=32,
        steps=300,
        tokenizer=text.tokenizer,
    )
