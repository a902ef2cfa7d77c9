"""`tiny`: a 2-layer Llama with a character tokenizer, built in code. It takes the code path of real models, no
download.
"""

from __future__ import annotations

import string
from typing import Any

from posttrain.models.model_paths import TINY_WINDOW

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>")
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = tuple(sorted(set(string.printable) - set("\t\r\x0b\x0c")))  # printable ASCII and newline

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>' + (messages[0].content + '\\n' if messages and messages[0].role == 'system' else '') -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>' -}}
{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function or call -%}
{{- '<tool_call>' + ({'name': f.name, 'arguments': f.arguments} | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- eos_token -}}
{%- elif message.role in ['system', 'user', 'tool'] -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- endif -%}
{%- else -%}{{- raise_exception('unknown role: ' + message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build(seed: int = 0) -> tuple[Any, Any]:
    """Return (model, tokenizer): float32 on the CPU, 0.11 M parameters. Equal seeds give equal weights; global RNG is
    unchanged.
    """
    import torch
    from transformers import GenerationConfig, LlamaForCausalLM

    tokenizer = build_tokenizer()
    config = build_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(**special_ids(tokenizer))
    return model, tokenizer


def build_config(tokenizer: Any) -> Any:
    """Return the LlamaConfig of the tiny language model, which tiny-vision also uses."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=192,
        max_position_embeddings=TINY_WINDOW,
        tie_word_embeddings=True,
        initializer_range=0.05,
        dtype="float32",
        **special_ids(tokenizer),
    )


def special_ids(tokenizer: Any) -> dict[str, Any]:
    """Return the tokenizer's special token ids, by their names in configurations."""
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(tokenizer, name) for name in names}


def build_tokenizer() -> Any:
    """Return a tokenizer with one token per character.

    Tags are ordinary tokens (decoding keeps them); roles and pad/bos/eos are special tokens. A character outside
    printable ASCII becomes `<unk>`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = (PAD, BOS, EOS, UNK, *ROLES)
    vocabulary = {token: i for i, token in enumerate((*special, *TAGS, *CHARACTERS))}
    # BPE without merges splits a text into characters.
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNK, fuse_unk=False))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    core.add_tokens([AddedToken(t, normalized=False, special=False) for t in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLES),
        model_max_length=TINY_WINDOW,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
