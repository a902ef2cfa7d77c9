"""Completion log-probs: equal to the model's own logits, packed or padded, in any micro-batches, with gradients."""

from __future__ import annotations

import math
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from posttrain.train.attention import Packed, use_packed_attention
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import Extras, completion_logprobs, completion_scores, micro_batches
from posttrain.train.pass_checks import check_head

SEQUENCES = Sequences(
    ids=((1, 5, 9, 3), (1, 7, 2, 8, 4, 6, 11, 12), (2, 3), (4, 4, 4, 5, 6)),
    prompt_lengths=(2, 3, 1, 5),  # the last completion is empty
)
SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def small(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
        "mistral with a sliding window of 3": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
    }
    return models[kind]().double().eval()


def reference(model: torch.nn.Module, temperature: float = 1.0) -> torch.Tensor:
    """Compute each row alone through the model's own logits: no padding, no packing."""
    out = torch.zeros(4, 5, dtype=torch.float64)
    for n, (row, start) in enumerate(zip(SEQUENCES.ids, SEQUENCES.prompt_lengths, strict=True)):
        logp = (model(input_ids=torch.tensor([row])).logits[0] / temperature).log_softmax(-1)
        for t, token in enumerate(row[start:]):
            out[n, t] = logp[start + t - 1, token]
    return out


KINDS = ["llama", "qwen2", "mistral with a sliding window of 3"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
def test_log_probs_equal_single_rows(kind: str, packed: bool) -> None:
    model = small(kind)
    with torch.no_grad():
        expected = reference(model, temperature=0.7)
        if packed:
            assert use_packed_attention(model)
        logp, entropy = completion_logprobs(model, SEQUENCES, 5, temperature=0.7, packed=packed)
    # our head works in float32, the reference in float64
    torch.testing.assert_close(logp.double(), expected, atol=2e-6, rtol=0)
    assert (entropy[0, :2] > 0).all() and (entropy[3] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_does_not_depend_on_packing_or_micro_batches(kind: str) -> None:
    weights = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)

    def gradient(packed: bool, parts: list[list[int]], fill: int = 1) -> torch.Tensor:
        model = small(kind)
        if packed:
            use_packed_attention(model)
        for rows in parts:
            logp = completion_scores(model, SEQUENCES.select(rows), 5, packed=packed, fill=fill)["logp"]
            (logp * weights[rows]).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient(packed=False, parts=[[0, 1, 2, 3]])
    assert whole.abs().max() > 0.1
    for packed, parts in ((True, [[0, 1, 2, 3]]), (True, [[1], [0, 3], [2]]), (False, [[3, 0], [2, 1]])):
        torch.testing.assert_close(gradient(packed, parts), whole, atol=1e-6, rtol=1e-5)
    filled = gradient(packed=True, parts=[[1], [0, 3], [2]], fill=7)  # lines of 8, 9 and 2 tokens
    torch.testing.assert_close(filled, whole, atol=1e-6, rtol=1e-5)


def test_packed_lines_are_padded_to_a_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    """19 tokens are 21 to the model, the filler in a row of its own; 14 stay 14."""
    model = small("llama")
    use_packed_attention(model)
    seen = []
    monkeypatch.setattr(
        Packed, "of", lambda lengths, device, of=Packed.of: seen.append(list(lengths)) or of(lengths, device)
    )
    for rows in ([0, 1, 2, 3], [0, 1, 2]):
        completion_scores(model, SEQUENCES.select(rows), 5, packed=True, fill=7)
    assert seen == [[4, 8, 2, 5, 2], [4, 8, 2]]


def test_vocabulary_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[torch.Tensor, torch.Tensor]:
        model = small("llama")
        long = Sequences((tuple(range(1, 30)) * 2,), (3,))
        logp, _ = completion_logprobs(model, long, 55)
        logp.sum().backward()
        return logp.detach(), model.lm_head.weight.grad

    whole = run()
    monkeypatch.setattr("posttrain.train.logprobs.CHUNK_CELLS", 16 * 32)  # 16 tokens a chunk: four chunks
    for chunked, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, expected, atol=1e-6, rtol=1e-5)


def test_check_head_detects_scaled_logits() -> None:
    model = small("llama")
    probe = Sequences(((1, 2, 3, 4, 5),), (1,))
    assert check_head(model, probe) < 1e-5
    original = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        out = original(*args, **kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = scaled
    assert check_head(model, probe) > 0.05


def test_micro_batches_contain_every_row_once_within_the_budget() -> None:
    lengths = [5, 9, 2, 7, 7, 1, 30]
    padded = micro_batches(lengths, 18, packed=False)
    assert padded == [[6], [1, 3], [4, 0], [2, 5]]  # 30 alone; 9*2; 7*2; 2*2
    packed = micro_batches(lengths, 18, packed=True)
    assert packed == [[6], [1, 0, 2], [3, 4, 5]]  # 30; 9+5+2; 7+7+1
    for parts in (padded, packed):
        assert sorted(r for rows in parts for r in rows) == list(range(7))


def test_packed_micro_batches_are_balanced_and_as_few_as_possible() -> None:
    """A short micro-batch is slower per token, and compiled layers have no graph for it."""
    draw = random.Random(0)
    lengths = [60 + int(draw.triangular(32, 512, 170)) for _ in range(512)]
    parts = micro_batches(lengths, 6144, packed=True)
    sizes = [sum(lengths[r] for r in rows) for rows in parts]
    assert len(parts) == math.ceil(sum(lengths) / 6144)
    assert min(sizes) > 0.97 * max(sizes) and max(sizes) <= 6144
    tight = [6, 6, 4, 4, 4, 4, 4]  # 16 and 16 of 16; the emptiest first would be 6+4+4 and 6+4+4, and no room for 4
    assert micro_batches(tight, 16, packed=True) == [[0, 1, 2], [3, 4, 5, 6]]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_extras_equal_those_of_the_models_logits(packed: bool, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabulary means (with gradient), the most likely tokens, hidden states, values; a temperature for each row."""
    model = small("llama")
    if chunked:  # 3 positions at a time
        monkeypatch.setattr("posttrain.train.logprobs.MIN_CHUNK", 3)
        monkeypatch.setattr("posttrain.train.logprobs.CHUNK_CELLS", 3 * 32)
    if packed:
        assert use_packed_attention(model)
    head = torch.nn.Linear(16, 1)
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0])
    extras = Extras(vocab_mean=True, top_k=3, hidden=True, value_head=head)
    found = completion_scores(model, SEQUENCES, 5, temperature, packed=packed, extras=extras)
    plain = small("llama")
    for n, (row, start) in enumerate(zip(SEQUENCES.ids, SEQUENCES.prompt_lengths, strict=True)):
        out = plain(input_ids=torch.tensor([row]), output_hidden_states=True)
        logp = (out.logits[0].float() / temperature[n]).log_softmax(-1)
        for t, token in enumerate(row[start:]):
            at = logp[start + t - 1]
            state = out.hidden_states[-1][0, start + t - 1].float()
            close = {"rtol": 1e-4, "atol": 1e-4}
            torch.testing.assert_close(found["vocab_mean_logp"][n, t], at.mean(), **close)
            torch.testing.assert_close(found["topk_logp"][n, t], at.topk(3).values, **close)
            assert found["topk_chosen"][n, t].tolist() == (at.topk(3).indices == token).tolist()
            torch.testing.assert_close(found["hidden"][n, t], state, **close)
            torch.testing.assert_close(found["values"][n, t], head(state)[0], **close)
        assert not found["values"][n, len(row) - start :].any()
    found["vocab_mean_logp"].sum().backward(retain_graph=True)
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
    for parameter in model.parameters():
        parameter.grad = None
    found["values"].sum().backward()
    assert all(p.grad is None for p in model.parameters()), "a critic leaves the policy alone"
    assert head.weight.grad is not None and bool(head.weight.grad.any())
