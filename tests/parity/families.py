"""Models that people take from packages, of unlike families, each a run with inputs as they are in
use: padded, masked, of unlike lengths, with labels.

TRANSFORMERS are of Hugging Face's package, the OTHERS of ten more. None has more than a million
parameters. Each is a recipe, so that tests name it as a user would: `families.py:mixtral`. Caches
are on where the configuration has them on, and the loss is the model's own where it makes one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

# What each stands for.
TRANSFORMERS = {
    "gpt_neox": "attention beside the MLP, rotary positions over a part of a head, a cache",
    "gemma2": "windows, soft caps, grouped heads, tied embeddings, a cache",
    "mixtral": "a mixture of experts, with the loss that balances them",
    "gpt_oss": "experts in one tensor, sinks in attention",
    "bloom": "positions by the distance, one matrix for query, key and value",
    "mamba": "a state space",
    "recurrent_gemma": "linear recurrences between windows of attention",
    "distilbert": "a label for each token, padding",
    "albert": "one layer, used again and again",
    "deberta": "a table of relative positions that is handed from layer to layer",
    "modernbert": "rotary positions in an encoder, windows and whole attention in turn",
    "xlnet": "two streams of relative attention",
    "fnet": "a Fourier transform instead of attention",
    "t5": "an encoder and a decoder that share their table of positions",
    "marian": "an encoder and a decoder with sinusoids",
    "switch": "an encoder and a decoder with experts of one choice",
    "vit": "patches of images",
    "swin": "shifted windows that are merged",
    "resnet": "convolutions with BatchNorm and ReLU",
    "segformer": "a label for each pixel",
    "wav2vec2": "speech of unlike lengths, aligned by CTC",
    "whisper": "speech into text",
    "detr": "boxes of objects, queries of its own, frozen BatchNorm",
    "clip": "two towers and a contrast within the batch",
    "patchtst": "patches of several series",
}
OTHERS = {
    "x_decoder": "x-transformers: a decoder with a mask, rotary positions",
    "quantized": "vector-quantize-pytorch: a codebook that is a moving average",
    "perceiver": "perceiver-pytorch: latents that look at the input again and again",
    "conformer": "conformer: attention and convolution over speech",
    "linformer": "linformer: keys and values projected along the sequence",
    "soft_moe": "soft-moe-pytorch: experts that all tokens are mixed for",
    "gated": "g-mlp-pytorch: no attention, gates along the sequence",
    "mamba_py": "mambapy: a scan of its own with an autograd function",
    "tcn": "pytorch-tcn: dilated causal convolutions with weight norm",
    "graphs": "torch-geometric: graphs of unlike sizes",
}
NUM_SAMPLES, LENGTH, TOKENS, KINDS, IGNORED = 24, 12, 40, 5, -100
Inputs = dict[str, Tensor]


# ---- data


def draws(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(length: int = LENGTH, seed: int = 11) -> Tensor:
    return torch.randint(3, TOKENS, (NUM_SAMPLES, length), generator=draws(seed))


def normal(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(NUM_SAMPLES, *shape, generator=draws(seed))


def there(length: int = LENGTH, at_least: int = 4) -> Tensor:
    """Which places of samples of unlike lengths are filled."""
    lengths = torch.arange(NUM_SAMPLES)[:, None] * 5 % (length - at_least + 1) + at_least
    return (torch.arange(length)[None] < lengths).long()


def padded(seed: int = 11) -> Inputs:
    return {"input_ids": text(seed=seed) * there(), "attention_mask": there()}


def with_labels(inputs: Inputs, labels: Tensor) -> Inputs:
    return {**inputs, "labels": labels}


def next_tokens() -> Inputs:
    """Padded text, whose labels leave the padding out; the model shifts them."""
    inputs = padded()
    return with_labels(inputs, inputs["input_ids"].masked_fill(there() == 0, IGNORED))


def classes() -> Tensor:
    return torch.arange(NUM_SAMPLES) % KINDS


def images(size: int = 32) -> Tensor:
    return normal(3, size, size)


# ---- runs


def own_loss(output: Any, target: Tensor) -> Tensor:
    """The one that the model made of its labels."""
    loss: Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def run_of(
    model: Callable[[], nn.Module],
    inputs: Any,
    target: Any = None,
    loss: Callable[[Any, Any], Any] = own_loss,
    rate: float = 2e-3,
) -> shoal.Run:
    return shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=rate),
        data=shoal.data.tensors(inputs, torch.arange(NUM_SAMPLES) if target is None else target),
        batch_size=8,
        steps=3,
        clip=1.0,
    )


def of_transformers(name: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A model by the names of its class and configuration, made when it is asked for."""

    def model() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**sizes))
        return made

    return model


SMALL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def decoder(family: str, **more: Any) -> shoal.Run:
    made = of_transformers(f"{family}ForCausalLM", f"{family}Config", **(SMALL | more))
    return run_of(made, next_tokens())


def gpt_neox() -> shoal.Run:
    return decoder("GPTNeoX")


def gemma2() -> shoal.Run:
    heads: Any = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5}
    return decoder("Gemma2", **heads, query_pre_attn_scalar=8)


EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}


def mixtral() -> shoal.Run:
    return decoder("Mixtral", **EXPERTS)


def gpt_oss() -> shoal.Run:
    return decoder("GptOss", **EXPERTS, head_dim=8, sliding_window=5)


def bloom() -> shoal.Run:
    sizes: Any = {"n_layer": 4, "n_head": 4, "hidden_dropout": 0.1}
    return decoder("Bloom", **sizes)


def mamba() -> shoal.Run:
    """Padded on the right, where a recurrence that runs from the left does not look."""
    return decoder("Mamba", state_size=4, time_step_rank=4)


def recurrent_gemma() -> shoal.Run:
    blocks = ("recurrent", "recurrent", "attention")
    sizes: Any = {"num_key_value_heads": 2, "attention_window_size": 6, "lru_width": 32}
    return decoder("RecurrentGemma", **sizes, block_types=blocks, num_hidden_layers=3)


def distilbert() -> shoal.Run:
    """A label for each token; those of the padding do not count."""
    sizes: Any = {"vocab_size": TOKENS, "dim": 32, "hidden_dim": 64, "n_layers": 4, "n_heads": 4}
    made = of_transformers(
        "DistilBertForTokenClassification", "DistilBertConfig", **sizes, num_labels=KINDS
    )
    labels = (padded()["input_ids"] % KINDS).masked_fill(there() == 0, IGNORED)
    return run_of(made, with_labels(padded(), labels))


def encoder(family: str, inputs: Inputs | None = None, **more: Any) -> shoal.Run:
    given = SMALL | DRY | {"num_labels": KINDS} | more
    made = of_transformers(f"{family}ForSequenceClassification", f"{family}Config", **given)
    return run_of(made, with_labels(padded() if inputs is None else inputs, classes()))


def albert() -> shoal.Run:
    return encoder("Albert", embedding_size=16)


def deberta() -> shoal.Run:
    relative: Any = {"relative_attention": True, "position_buckets": 4, "pos_att_type": "p2c|c2p"}
    more: Any = {"norm_rel_ebd": "layer_norm", "share_att_key": True, "max_relative_positions": 8}
    return encoder("DebertaV2", **relative, **more, pooler_hidden_size=32)


def modernbert() -> shoal.Run:
    more: Any = {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}
    return encoder("ModernBert", **more, global_attn_every_n_layers=2)


def xlnet() -> shoal.Run:
    sizes: Any = {"vocab_size": TOKENS, "d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 64}
    made = of_transformers(
        "XLNetForSequenceClassification", "XLNetConfig", **sizes, num_labels=KINDS
    )
    return run_of(made, with_labels(padded(), classes()))


def fnet() -> shoal.Run:
    """It knows no mask: its sentences are of one length."""
    given: Any = {"use_tpu_fourier_optimizations": False, "num_labels": KINDS}
    made = of_transformers("FNetForSequenceClassification", "FNetConfig", **(SMALL | given))
    return run_of(made, with_labels({"input_ids": text()}, classes()))


def two_texts() -> Inputs:
    """A padded text, and another for an answer, of other lengths."""
    answers = text(seed=12).masked_fill(there(at_least=3).flip(0) == 0, IGNORED)
    return with_labels(padded(), answers)


def t5() -> shoal.Run:
    sizes: Any = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    made = of_transformers(
        "T5ForConditionalGeneration", "T5Config", **sizes, num_layers=2, decoder_start_token_id=0
    )
    return run_of(made, two_texts())


def marian() -> shoal.Run:
    depth: Any = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32}
    heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide: Any = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32}
    ids: Any = {"vocab_size": TOKENS, "pad_token_id": 0, "decoder_start_token_id": 0}
    ids |= {"eos_token_id": 2, "forced_eos_token_id": 2}
    return run_of(
        of_transformers("MarianMTModel", "MarianConfig", **depth, **heads, **wide, **ids),
        two_texts(),
    )


def switch() -> shoal.Run:
    sizes: Any = {"vocab_size": TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
    sparse: Any = {"num_experts": 4, "expert_capacity": 16, "router_jitter_noise": 0.0}
    depth: Any = {"num_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    name = "SwitchTransformersForConditionalGeneration"
    made = of_transformers(
        name, "SwitchTransformersConfig", **sizes, **sparse, **depth, decoder_start_token_id=0
    )
    return run_of(made, two_texts())


def pictured(family: str, size: int = 32, **sizes: Any) -> shoal.Run:
    made = of_transformers(
        f"{family}ForImageClassification", f"{family}Config", **sizes, num_labels=KINDS
    )
    return run_of(made, {"pixel_values": images(size), "labels": classes()})


def vit() -> shoal.Run:
    sizes = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return pictured("ViT", **sizes, **DRY, num_attention_heads=4, image_size=32, patch_size=8)


def swin() -> shoal.Run:
    sizes: Any = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4}
    return pictured("Swin", **sizes, depths=[2, 2], num_heads=[2, 4])


def resnet() -> shoal.Run:
    sizes: Any = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
    return pictured("ResNet", **sizes, layer_type="basic", downsample_in_first_stage=False)


def segformer() -> shoal.Run:
    sizes: Any = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]}
    heads: Any = {"num_attention_heads": [2, 2, 2, 4], "decoder_hidden_size": 32}
    made = of_transformers(
        "SegformerForSemanticSegmentation", "SegformerConfig", **sizes, **heads, num_labels=KINDS
    )
    labels = (images()[:, 0] > 0).long() + (images()[:, 1] > 0).long()
    return run_of(made, {"pixel_values": images(), "labels": labels})


def sound(length: int = 800) -> Inputs:
    filled = there(length, length // 2)
    return {"input_values": normal(length) * filled, "attention_mask": filled}


def wav2vec2() -> shoal.Run:
    """What it leaves out of its input to learn from is drawn by numpy, so it leaves out nothing."""
    features: Any = {"conv_dim": (16, 16), "conv_stride": (8, 5), "conv_kernel": (16, 8)}
    more: Any = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    quiet: Any = {"mask_time_prob": 0.0, "layerdrop": 0.0, "ctc_loss_reduction": "mean"}
    sizes = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    made = of_transformers(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        **(sizes | features | more | quiet),
        num_hidden_layers=4,
        num_attention_heads=4,
        num_feat_extract_layers=2,
    )
    said = text(4).masked_fill(there(4, 2) == 0, IGNORED)
    return run_of(made, with_labels(sound(), said))


def whisper() -> shoal.Run:
    depth: Any = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "num_mel_bins": 8}
    heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    wide: Any = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": TOKENS}
    ends: Any = {"max_source_positions": 20, "max_target_positions": 16, "pad_token_id": 0}
    ends |= {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    made = of_transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", **depth, **heads, **wide, **ends
    )
    labels = text(8).masked_fill(there(8, 3) == 0, IGNORED)
    return run_of(made, with_labels({"input_features": normal(8, 40)}, labels))


def detr() -> shoal.Run:
    """Of each image two objects; which query finds which is settled, so that no search is needed
    for the loss. What lies outside of an image is masked."""

    def model() -> nn.Module:
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

        body: Any = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}
        backbone = ResNetConfig(**body, layer_type="basic", out_features=["stage2"])
        depth: Any = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "num_queries": 4}
        heads: Any = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        wide: Any = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_labels": KINDS}
        off: Any = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
        config = DetrConfig(backbone_config=backbone, **depth, **heads, **wide, **off)
        return DetrForObjectDetection(config)

    def loss(output: Any, target: dict[str, Tensor]) -> Tensor:
        named = F.cross_entropy(output.logits.flatten(0, 1), target["kinds"].flatten())
        return named + F.l1_loss(output.pred_boxes[:, :2], target["boxes"])

    seen = there(32, 16)[:, None, :].expand(-1, 32, -1).contiguous()
    kinds = torch.full((NUM_SAMPLES, 4), KINDS)  # nothing is there
    kinds[:, 0], kinds[:, 1] = classes(), classes().flip(0)
    target = {"kinds": kinds, "boxes": normal(2, 4).sigmoid()}
    return run_of(model, {"pixel_values": images(), "pixel_mask": seen}, target, loss)


def clip() -> shoal.Run:
    def model() -> nn.Module:
        from transformers import CLIPConfig, CLIPModel

        tower: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        tower |= {"num_attention_heads": 4, "projection_dim": 16}
        words: Any = {"vocab_size": TOKENS, "max_position_embeddings": LENGTH}
        words |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
        looks: Any = {"image_size": 32, "patch_size": 8}
        return CLIPModel(
            CLIPConfig(text_config=tower | words, vision_config=tower | looks, projection_dim=16)
        )

    def loss(output: Any, target: Tensor) -> Tensor:
        logits = output.logits_per_text
        same = torch.arange(len(logits))
        return F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)

    return run_of(model, {**padded(), "pixel_values": images()}, None, loss)


def patchtst() -> shoal.Run:
    sizes: Any = {"num_input_channels": 3, "context_length": 32, "patch_length": 8, "d_model": 32}
    more: Any = {"patch_stride": 8, "num_hidden_layers": 4, "num_attention_heads": 4}
    made = of_transformers(
        "PatchTSTForPrediction", "PatchTSTConfig", **sizes, **more, ffn_dim=64, prediction_length=4
    )
    seen = there(32, 20)[..., None].expand(-1, -1, 3).contiguous()
    inputs = {"past_values": normal(32, 3), "past_observed_mask": seen.bool()}
    return run_of(made, {**inputs, "future_values": normal(4, 3, seed=12)})


# ---- of other packages


def token_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over the tokens that count, and how many do."""
    flat, labels = logits.flatten(0, 1), target.flatten()
    return (
        F.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="sum"),
        (labels != IGNORED).sum(),
    )


def shifted() -> tuple[Tensor, Tensor]:
    """Text, and for each token the next; what is padding does not count."""
    read = text(LENGTH + 1)
    said = read[:, 1:].masked_fill(there() == 0, IGNORED)
    return read[:, :-1] * there(), said.contiguous()


def x_decoder() -> shoal.Run:
    def model() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=3, heads=2, attn_dim_head=32, rotary_pos_emb=True)
        made: nn.Module = TransformerWrapper(
            num_tokens=TOKENS, max_seq_len=LENGTH, attn_layers=layers
        )
        return made

    read, said = shifted()
    return run_of(model, {"x": read, "mask": there().bool()}, said, token_loss)


class Quantized(nn.Module):
    """An autoencoder through a codebook, which is a buffer that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize

        self.encode = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.codes = VectorQuantize(dim=8, codebook_size=16, decay=0.8, commitment_weight=0.5)
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 12))

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        found, _, kept = self.codes(self.encode(series))
        return self.decode(found), kept.sum()


def quantized() -> shoal.Run:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        made, kept = output
        return F.mse_loss(made, target) + kept

    return run_of(Quantized, normal(LENGTH, 12), normal(LENGTH, 12), loss)


def perceiver() -> shoal.Run:
    def model() -> nn.Module:
        from perceiver_pytorch import Perceiver

        sizes: Any = {"input_channels": 6, "input_axis": 1, "num_freq_bands": 2, "max_freq": 8.0}
        latent: Any = {"num_latents": 8, "latent_dim": 32, "latent_heads": 4, "latent_dim_head": 8}
        more: Any = {"depth": 2, "cross_dim_head": 8, "num_classes": KINDS}
        made: nn.Module = Perceiver(**sizes, **latent, **more)
        return made

    inputs = {"data": normal(LENGTH, 6), "mask": there().bool()}
    return run_of(model, inputs, classes(), F.cross_entropy)


class Hears(nn.Module):
    """Speech of unlike lengths: what is not there is left out of the mean at the end."""

    def __init__(self) -> None:
        super().__init__()
        from conformer import Conformer

        self.read = nn.Linear(6, 32)
        self.body = Conformer(32, depth=2, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=5)
        self.head = nn.Linear(32, KINDS)

    def forward(self, series: Tensor, filled: Tensor) -> Tensor:
        heard = self.body(self.read(series)) * filled[..., None]
        named: Tensor = self.head(heard.sum(1) / filled.sum(1, keepdim=True))
        return named


def conformer() -> shoal.Run:
    inputs = {"series": normal(LENGTH, 6), "filled": there().float()}
    return run_of(Hears, inputs, classes(), F.cross_entropy)


def linformer() -> shoal.Run:
    def model() -> nn.Module:
        from linformer import LinformerLM

        sizes: Any = {"num_tokens": TOKENS, "dim": 32, "seq_len": LENGTH, "depth": 3, "heads": 4}
        made: nn.Module = LinformerLM(**sizes, k=6, dim_head=8, share_kv=True)
        return made

    labels = text().masked_fill(there() == 0, IGNORED)
    return run_of(model, text() * there(), labels, token_loss)


class Softly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from soft_moe_pytorch import SoftMoE

        self.embed = nn.Embedding(TOKENS, 32)
        self.experts = nn.ModuleList(
            SoftMoE(dim=32, seq_len=LENGTH, num_experts=4) for _ in range(2)
        )
        self.head = nn.Linear(32, TOKENS)

    def forward(self, read: Tensor, filled: Tensor) -> Tensor:
        x = self.embed(read)
        for experts in self.experts:
            x = x + experts(x, mask=filled)
        logits: Tensor = self.head(x)
        return logits


def soft_moe() -> shoal.Run:
    labels = text().masked_fill(there() == 0, IGNORED)
    inputs = {"read": text() * there(), "filled": there().bool()}
    return run_of(Softly, inputs, labels, token_loss)


def gated() -> shoal.Run:
    def model() -> nn.Module:
        from g_mlp_pytorch import gMLP

        made: nn.Module = gMLP(
            num_tokens=TOKENS, dim=32, depth=4, seq_len=LENGTH, ff_mult=2, causal=True
        )
        return made

    read, said = shifted()
    return run_of(model, read, said, token_loss)


class Scans(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from mambapy.mamba import Mamba, MambaConfig

        self.embed = nn.Embedding(TOKENS, 32)
        self.body = Mamba(MambaConfig(d_model=32, n_layers=3, d_state=4))
        self.head = nn.Linear(32, TOKENS)

    def forward(self, read: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(read)))
        return logits


def mamba_py() -> shoal.Run:
    read, said = shifted()
    return run_of(Scans, read, said, token_loss)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from pytorch_tcn import TCN

        self.body = TCN(4, [16, 16, 16], kernel_size=3, dropout=0.1, input_shape="NLC")
        self.head = nn.Linear(16, 4)

    def forward(self, series: Tensor) -> Tensor:
        told: Tensor = self.head(self.body(series))
        return told


def tcn() -> shoal.Run:
    series = normal(LENGTH + 1, 4).cumsum(1) / 4
    return run_of(Causal, series[:, :-1].contiguous(), series[:, 1:].contiguous(), F.mse_loss)


class Graphs(nn.Module):
    """Graphs of unlike sizes as padded matrices, pooled by what is learnt to belong together."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import DenseGCNConv, DenseSAGEConv

        self.first, self.assign = DenseSAGEConv(6, 32), DenseSAGEConv(6, 4)
        self.second, self.head = DenseGCNConv(32, 32), nn.Linear(32, KINDS)

    def forward(self, nodes: Tensor, edges: Tensor, filled: Tensor) -> Tensor:
        from torch_geometric.nn import dense_diff_pool

        found, kinds = self.first(nodes, edges, filled).relu(), self.assign(nodes, edges, filled)
        pooled, between, _, _ = dense_diff_pool(found, edges, kinds, filled)
        named: Tensor = self.head(self.second(pooled, between).relu().mean(1))
        return named


def graphs() -> shoal.Run:
    linked = (normal(LENGTH, LENGTH) > 0.5).float()
    filled = there().float()
    edges = ((linked + linked.mT) > 0).float() * filled[:, :, None] * filled[:, None, :]
    inputs = {"nodes": normal(LENGTH, 6), "edges": edges, "filled": filled.bool()}
    return run_of(Graphs, inputs, classes(), F.cross_entropy)
