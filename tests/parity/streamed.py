"""Runs on streams, and on datasets and collators of Hugging Face, without a network."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import shoal

NUM_SAMPLES = 50
WORDS = "a stream gives its samples one after the other and no index leads back to any of them"


def rows() -> Iterator[Any]:
    draws = torch.Generator().manual_seed(5)
    for _ in range(NUM_SAMPLES):
        yield torch.randn(4, generator=draws), int(torch.randint(3, (), generator=draws))


class Stated(IterableDataset[Any]):
    """Says where it is; each process writes down what it reads, in the directory `reads`."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        samples = list(rows())
        for number in range(self.at, NUM_SAMPLES):
            self.at = number + 1
            if Path("reads").exists():
                with Path(f"reads/{os.getpid()}").open("a") as file:
                    file.write(f"{number}\n")
            yield samples[number]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def network(data: Any, **changes: Any) -> shoal.Run:
    run = shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        ),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=data,
        batch_size=12,
        steps=12,
    )
    return dataclasses.replace(run, **changes)


def plain() -> shoal.Run:
    return network(rows)


def listed() -> shoal.Run:
    """What `plain` trains on, as a list."""
    return network(shoal.data.in_order(list(rows()) * 3))


def shuffled() -> shoal.Run:
    source = shoal.data.stream(Stated(), shuffle=20)
    return network(shoal.data.mapped(source, lambda s, random: (s[0] + random.random(), s[1])))


def stated() -> shoal.Run:
    return network(Stated(), save_every=5)


def unlike(how: str = "order") -> shoal.Run:
    """Other samples in each process, or an end that comes early in all but one of them."""
    parent = os.getpid()

    def read() -> Iterator[Any]:
        samples = list(rows())
        if os.getpid() != parent and os.environ.get("SHOAL_MEMBER", "").startswith("1"):
            yield from samples[:30] if how == "ends" else samples[::-1]
        else:
            yield from samples

    return network(read)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[MASK]", "[UNK]"]
    words = {word: at for at, word in enumerate([*special, *sorted(set(WORDS.split()))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]"
    )


def texts() -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(3)
    words = WORDS.split()
    sizes = torch.randint(3, len(words), (NUM_SAMPLES,), generator=draws).tolist()
    return [{"text": " ".join(words[-n:]), "label": n % 2} for n in sizes]


def tuned(model: Any, loss: Any, data: Any, collate: Any) -> shoal.Run:
    return shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        data=data,
        collate=collate,
        batch_size=8,
        steps=5,
    )


def config(**changes: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertConfig(vocab_size=40, num_hidden_layers=2, **sizes, **changes)


def tokenized(*names: str) -> Any:
    from datasets import Dataset

    words = tokenizer()
    made = Dataset.from_list(texts()).map(lambda row: words(row["text"]), remove_columns="text")
    return made.select_columns([*names])


def masked() -> shoal.Run:
    """Words that are masked by chance."""
    from transformers import BertForMaskedLM, DataCollatorForLanguageModeling

    data = tokenized("input_ids", "attention_mask")
    collate = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.3)
    return tuned(lambda: BertForMaskedLM(config()), shoal.losses.labels, data, collate)


def classified(buffer: int = 0) -> shoal.Run:
    """A stream of Hugging Face, padded."""
    from transformers import BertForSequenceClassification, DataCollatorWithPadding

    data = tokenized("input_ids", "attention_mask", "label").to_iterable_dataset(num_shards=3)
    data = data.shuffle(seed=1, buffer_size=buffer) if buffer else data
    return tuned(
        lambda: BertForSequenceClassification(config(num_labels=2)),
        shoal.losses.labels,
        data,
        DataCollatorWithPadding(tokenizer()),
    )


def padded() -> shoal.Run:
    """Sequences of unlike lengths, padded by our own collate."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 5)

        def forward(self, tokens: Any, mask: Any) -> Any:
            return self.head(self.embed(tokens) * mask[..., None])

    draws = torch.Generator().manual_seed(4)
    sizes = torch.randint(1, 9, (NUM_SAMPLES,), generator=draws).tolist()
    data = [
        (torch.randint(1, 40, (n,), generator=draws), torch.randint(5, (n,), generator=draws))
        for n in sizes
    ]
    return tuned(Tagger, shoal.losses.labels, data, shoal.data.pad(mask=True))
