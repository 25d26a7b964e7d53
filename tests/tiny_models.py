"""Tiny random models of each attention flavour, made on the spot, with a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

END, IM_START, IM_END = 256, 257, 258
VOCAB = 260
SLIDING_WINDOW = 12

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def _config(name: str) -> transformers.PreTrainedConfig:
    if name == "llama":
        return transformers.LlamaConfig(**_COMMON)
    if name == "qwen2":
        return transformers.Qwen2Config(**_COMMON)
    if name == "qwen3":
        return transformers.Qwen3Config(**_COMMON, head_dim=16)
    if name == "gemma3":
        return transformers.Gemma3TextConfig(
            **_COMMON, head_dim=16, sliding_window=SLIDING_WINDOW, layer_types=_LAYERS
        )
    if name == "gemma2":  # softcaps that bite, in attention and in the logits
        return transformers.Gemma2Config(
            **_COMMON,
            head_dim=16,
            sliding_window=SLIDING_WINDOW,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=20.0,
        )
    if name == "mistral":  # every layer has a sliding window
        return transformers.MistralConfig(**_COMMON, head_dim=16, sliding_window=SLIDING_WINDOW)
    if name == "phi3":
        return transformers.Phi3Config(**_COMMON)
    assert name == "gpt2"
    return transformers.GPT2Config(
        n_embd=64,
        n_layer=3,
        n_head=4,
        vocab_size=VOCAB,
        n_positions=512,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
    )


NAMES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "phi3", "gpt2")


def make_model(name: str) -> Any:
    """A random model on f16 values, so that an fp16 export holds the very same weights.

    Its matrices are larger than usual, so that the best token leads by more than rounding.
    """
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        _config(name),
        attn_implementation="eager",  # torch's own attention leaves out softcaps
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data *= 6.0
    return model.half().float()


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a byte, and three special ones."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_tiny(name: str, folder: Path, *, tokenizer: bool = True) -> Any:
    """Save a tiny model as a Hugging Face folder; return the torch model."""
    model = make_model(name)
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return model
