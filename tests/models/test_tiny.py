"""The model that is built in code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from posttrain.models import tiny

EVERY = "".join(tiny.CHARACTERS)


def test_tiny_has_the_requested_shape() -> None:
    """Per layer 4 x 64 x 64 (attention) + 3 x 64 x 192 (MLP) + 2 x 64 (norms) = 53,376; two of them, 64 for the last
    norm, 64 x 110 for the tied embedding: 113,856."""
    model, tokenizer = tiny.build(0)
    assert len(tokenizer) == 110
    assert sum(p.numel() for p in model.parameters()) == 113_856
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert next(model.parameters()).dtype == torch.float32
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3


def test_equal_seeds_give_equal_weights_without_touching_the_global_generator() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, again, other = (tiny.build(seed)[0].model.embed_tokens.weight for seed in (0, 0, 1))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.045 < float(first.detach().std()) < 0.055


def test_characters_tags_and_roles_are_single_tokens() -> None:
    tokenizer = tiny.build_tokenizer()
    assert tokenizer.decode(tokenizer(EVERY)["input_ids"]) == EVERY
    assert len(tokenizer(EVERY)["input_ids"]) == len(EVERY) == 96
    for text in (*tiny.TAGS, *tiny.ROLES):
        assert len(tokenizer(text)["input_ids"]) == 1
    text = "<think>8+7</think><answer>15</answer>"
    assert tokenizer.decode([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_character_without_a_token_is_unknown() -> None:
    tokenizer = tiny.build_tokenizer()
    assert tokenizer.decode(tokenizer("a日\tß")["input_ids"]) == "a<unk><unk><unk>"


def test_template_supports_all_roles_and_refuses_others() -> None:
    tokenizer = tiny.build_tokenizer()
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "<think>t</think>A"},
        {"role": "tool", "content": "T"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<bos><|system|>S<|user|>U<|assistant|><think>t</think>A<eos><|tool|>T<|assistant|>"
    with pytest.raises(Exception, match="unknown role: judge"):
        tokenizer.apply_chat_template([{"role": "judge", "content": "x"}], tokenize=False)


def test_plain_transformers_loads_the_saved_model(tmp_path: Path) -> None:
    model, tokenizer = tiny.build(3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model_again, again = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "<think>a b</think>\n~" + tiny.ROLES[1]
    ids = again(text, return_tensors="pt")["input_ids"]
    assert ids.tolist() == tokenizer(text, return_tensors="pt")["input_ids"].tolist()
    assert again.chat_template == tokenizer.chat_template
    assert torch.equal(model_again(ids).logits, model(ids).logits)
    assert (again.pad_token, again.eos_token, again.decode(ids[0])) == (tiny.PAD, tiny.EOS, text)
