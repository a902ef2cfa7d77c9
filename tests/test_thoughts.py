"""Thoughts of every model family are decoded as <think>...</think>, so that readers of texts can separate them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from posttrain import thoughts
from posttrain.batch import Prompt, Segment
from posttrain.data.render import example_texts
from posttrain.data.template_spans import adapt_messages
from posttrain.errors import DataError
from posttrain.models.load import load_tokenizer
from posttrain.models.tiny import build_tokenizer
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.rollout_sections import RolloutShape
from posttrain.recipe.sections import Data, Model
from posttrain.recipe.tool_sections import Tool
from posttrain.rollout.continuation import Shape
from posttrain.rollout.engine import Completion, as_rollouts
from posttrain.rollout.turns import TurnEngine
from posttrain.shapes.protocol import Asked, Sampled
from posttrain.thoughts import ends_in_thought
from posttrain.tools.call import Call
from posttrain.tools.calls import Caller
from posttrain.tools.formats import parse_calls
from posttrain.tools.load import load_tool
from posttrain.train.scoring import token_ends
from posttrain.verify.extract import after_think
from posttrain.verify.math import grade
from posttrain.verify.reward_inputs import Sample, built_in
from posttrain.verify.score import Scorer

THINK = "<think>5?</think>"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", "<|return|>")
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"
GRANITE = "Write your thoughts after 'Here is my thought process:' and your response after 'Here is my response:'."
# family -> (special tokens that its vocabulary has, text of its template, a completion, its text for rewards)
FAMILIES = {
    "qwen": ((), "{{ '</think>' }}", r"<think>5?</think>\boxed{4}", THINK + r"\boxed{4}"),
    "phi": (("<think>", "</think>"), "", r"<think>5?</think>\boxed{4}", THINK + r"\boxed{4}"),
    "magistral": (
        ("[THINK]", "[/THINK]"),
        "{{ '[THINK]...[/THINK]' }}",
        r"[THINK]5?[/THINK]\boxed{4}",
        THINK + r"\boxed{4}",
    ),
    "seed": (
        ("<seed:think>", "</seed:think>"),
        "{{ '<seed:think>' + '</seed:think>' }}",
        r"<seed:think>5?</seed:think>\boxed{4}",
        THINK + r"\boxed{4}",
    ),
    "apertus": (
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        "{{ '<|inner_prefix|><|inner_suffix|>' }}",
        r"<|inner_prefix|>5?<|inner_suffix|>\boxed{4}",
        THINK + r"\boxed{4}",
    ),
    "command": (
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        "{{ '<|START_THINKING|><|END_THINKING|>' }}",
        r"<|START_THINKING|>5?<|END_THINKING|><|START_RESPONSE|>\boxed{4}<|END_RESPONSE|>",
        THINK + r"\boxed{4}",
    ),
    "gemma": (
        ("<|channel>", "<channel|>"),
        "{{ '<|channel>thought\n' + '<channel|>' }}",
        "<|channel>thought\n5?<channel|>\\boxed{4}",
        THINK + r"\boxed{4}",
    ),
    "granite": (
        (),
        f'{{{{ "{GRANITE}" }}}}',
        "Here's my thought process:5?Here is my response:\\boxed{4}",
        THINK + r"\boxed{4}",
    ),
    "gpt-oss": (
        HARMONY,
        f"{{{{ '{ANALYSIS}<|end|>{FINAL}' }}}}",
        rf"{ANALYSIS}5?<|end|>{FINAL}\boxed{{4}}",
        THINK + r"\boxed{4}",
    ),
}


def make_tokenizer(family: str) -> Any:
    """Return the tiny tokenizer with the special tokens and the template of a family."""
    special, template, _, _ = FAMILIES[family]
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special], special_tokens=True)
    tokenizer.chat_template = template + str(tokenizer.chat_template)
    if family not in ("qwen", "phi"):  # the tiny template writes <think>, which most other templates do not
        tokenizer.chat_template = tokenizer.chat_template.replace("<think>", "").replace("</think>", "")
    return tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_is_decoded_with_standard_tags(family: str) -> None:
    _, _, written, shown = FAMILIES[family]
    tokenizer = make_tokenizer(family)
    ids = encode(tokenizer, written)
    assert thoughts.decode(tokenizer, [ids, ids[:0]]) == [shown, ""]
    (text,) = thoughts.decode(tokenizer, [ids])
    assert after_think(text) == r"\boxed{4}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_box_in_the_thought_is_no_answer(family: str) -> None:
    written = FAMILIES[family][2].replace("5?", r"\boxed{5}").replace(r"\boxed{4}", "nothing")
    (text,) = thoughts.decode(tokenizer := make_tokenizer(family), [encode(tokenizer, written)])
    assert text == r"<think>\boxed{5}</think>nothing"
    assert grade(text, "5")["reward"] == 0.0
    assert grade(text.replace("nothing", r"\boxed{5}"), "5")["reward"] == 1.0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_truncated_thought_is_open(family: str) -> None:
    written = FAMILIES[family][2].partition("?")[0]
    tokenizer = make_tokenizer(family)
    (text,) = thoughts.decode(tokenizer, [encode(tokenizer, written)])
    assert text == "<think>5"
    assert ends_in_thought("", text)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_thought_that_the_prompt_opened(family: str) -> None:
    tokenizer = make_tokenizer(family)
    form = thoughts.thought_format(tokenizer)
    prompt = f"2+2?<|assistant|>{form.opening}"
    assert thoughts.opening_mark(prompt) == form.opening.rstrip()
    (text,) = thoughts.decode(tokenizer, [encode(tokenizer, form.localize(r"5?</think>\boxed{4}"))])
    assert text == r"5?</think>\boxed{4}"
    assert ends_in_thought(prompt, "5?")
    assert not ends_in_thought(prompt, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ends_are_positions_in_the_decoded_text(family: str) -> None:
    tokenizer = make_tokenizer(family)
    ids = encode(tokenizer, FAMILIES[family][2])
    ends, (text,) = token_ends(ids, tokenizer), thoughts.decode(tokenizer, [ids])
    assert ends == sorted(ends)
    assert ends[-1] == len(text)
    for character in "5?4":  # its token ends right after it
        token = next(n for n, i in enumerate(ids) if i == tokenizer.convert_tokens_to_ids(character))
        assert text[ends[token] - 1] == character


def test_offsets_move_with_the_text_before_them() -> None:
    edits = [(0, 4, "<think>"), (6, 9, "")]
    assert thoughts.move_offsets([0, 2, 4, 5, 6, 7, 9, 12], edits) == [0, 2, 7, 8, 9, 9, 9, 12]


def test_the_template_decides_between_formats_of_the_vocabulary() -> None:
    tokenizer = make_tokenizer("magistral")
    assert thoughts.thought_format(tokenizer).closing == "[/THINK]"
    tokenizer.chat_template = "{{ '<think></think>' }}"
    assert thoughts.thought_format(tokenizer) is thoughts.STANDARD


def test_the_vocabulary_decides_without_a_template() -> None:
    core = Tokenizer(models.WordLevel({"[THINK]": 0, "[/THINK]": 1, "a": 2, "</s>": 3}))
    core.add_special_tokens(["[THINK]", "[/THINK]", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    assert thoughts.decode(tokenizer, [[0, 2, 1, 2, 3]]) == ["<think> a </think> a"]
    assert thoughts.written_format(tokenizer) is thoughts.STANDARD  # the model may have learned <think> as text


def test_thoughts_are_written_as_the_template_does() -> None:
    tokenizer = make_tokenizer("magistral")
    assert thoughts.written_format(tokenizer).localize("a</think>b") == "a[/THINK]b"
    assert thoughts.written_format(make_tokenizer("qwen")) is thoughts.STANDARD


def test_a_model_without_marks_is_decoded_as_before() -> None:
    tokenizer = build_tokenizer()
    ids = encode(tokenizer, "<|user|>[THINK]a[/THINK]<think>b")
    assert thoughts.decode(tokenizer, [ids]) == ["[THINK]a[/THINK]<think>b"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (f"{FINAL.removeprefix('<|start|>assistant')}4", "4"),  # an answer without a thought
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL}4", "<think>a</think><think>b</think>4"),
        (f"{ANALYSIS}a{FINAL}4", "<think>a</think>4"),  # the end of the thought is missing
        (f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>fin", "<think>a</think>"),
        (
            f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary<|message|>I look<|end|>",
            "<think>a</think>I look",
        ),
        (
            f"{ANALYSIS}a<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{{}}",
            "<think>a</think><|channel|>commentary to=functions.f json<|message|>{}",
        ),
        (
            f"{ANALYSIS}a<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{{}}",
            "<think>a</think><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
        ),
    ],
)
def test_channels_of_harmony(written: str, shown: str) -> None:
    tokenizer = make_tokenizer("gpt-oss")
    assert thoughts.decode(tokenizer, [encode(tokenizer, written)]) == [shown]


def test_a_delimiter_in_the_models_own_marks_is_found_in_decoded_texts() -> None:
    text = r"<think>\boxed{5}</think>\boxed{4}"
    assert grade(text, "4", require_think=True, think_delimiter="[/THINK]")["reward"] == 1.0
    assert grade(r"\boxed{4}", "4", require_think=True, think_delimiter="[/THINK]")["reward"] == 0.0
    assert after_think("a[/THINK]b</think>c", "[/THINK]") == "b</think>c"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_completion_has_the_same_text(family: str) -> None:
    tokenizer = make_tokenizer(family)
    _, _, written, shown = FAMILIES[family]
    stream = thoughts.ThoughtStream(thoughts.thought_format(tokenizer))
    (raw,) = thoughts.decode(tokenizer, [encode(tokenizer, written)], standard=False)
    pieces = [stream.add(character) for character in raw]
    assert "".join(pieces) + stream.end() == shown
    assert pieces[-1] == "}"


STREAMED = [
    "Here is my thought process", "<|channel>thoughx", "<|start|>assistant to=f.x<|channel|>commentary", "a<|chan",
    "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=f <|constrain|>json<|message|>{}",
    "5?<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>", "<|start|>assistant", "[THINK][/THINK]]",
]  # fmt: skip


@pytest.mark.parametrize("form", thoughts.FORMATS)
@pytest.mark.parametrize("text", STREAMED)
def test_a_stream_equals_the_whole_text_however_it_is_cut(form: thoughts.ThoughtFormat, text: str) -> None:
    for length in (1, 2, 7, 100):
        stream = thoughts.ThoughtStream(form)
        pieces = [stream.add(text[at : at + length]) for at in range(0, len(text), length)]
        assert "".join(pieces) + stream.end() == form.standardize(text)


@pytest.mark.parametrize("form", thoughts.FORMATS[1:])
def test_a_stream_keeps_no_text_that_it_has_shown(form: thoughts.ThoughtFormat) -> None:
    """Otherwise the time of a chat's answer is quadratic in its length."""
    stream = thoughts.ThoughtStream(form)
    for piece in ["five and four ", form.opening, *["five and four "] * 50, form.closing, *["nine "] * 50]:
        stream.add(piece)
        assert len(stream._held) < len(form.closing)


def test_engines_return_decoded_thoughts_and_the_sampled_tokens() -> None:
    tokenizer = make_tokenizer("magistral")
    ids = tuple(encode(tokenizer, "[THINK]5?[/THINK]4"))
    prompt = Prompt("p", {}, "2+2?", (1,))
    (rollout,) = as_rollouts([prompt], 1, [Completion(ids, None, "stop")], tokenizer, first_group=0, version=0)
    assert (rollout.text, rollout.ids) == ("<think>5?</think>4", ids)


def test_shapes_write_the_models_own_marks() -> None:
    """A thought is cut before `[/THINK]`, and the text after a cut closes it with `[/THINK]`."""
    tokenizer = make_tokenizer("magistral")
    prompts: list[str] = []

    async def draw(asked: Sequence[tuple[int, ...]], _: Sequence[int], **__: Any) -> list[Sampled]:
        prompts.extend(map(shape.decode, asked))
        text = "[THINK]abc[/THINK]4" if len(prompts) == 1 else "5"
        return [Sampled(Segment("model", tuple(encode(tokenizer, text))), "stop") for _ in asked]

    section = RolloutShape.model_validate({"use": "serial_exit", "num_exits": 50, "inducer": "so</think>"})
    shape = Shape.from_recipe(section, None, tokenizer)
    asked = Asked((1,), {}, 500, 1000, 0, draw, None, shape.encode, shape.decode, shape.text, shape.localize)  # type: ignore[arg-type]
    rows = asyncio.run(shape.function(asked))
    cuts = ["[THINK]abc"[:length] for length in (7, 8, 9, 10)]
    assert [text.removeprefix("<bos>") for text in prompts[1:]] == [f"{cut}so[/THINK]" for cut in cuts]
    assert [shape.text([i for s in row.segments for i in s.ids]) for row in rows] == [
        *(f"{cut.replace('[THINK]', '<think>')}so</think>5" for cut in cuts),
        "<think>abc</think>4",
    ]


def test_calls_in_a_thought_are_not_run() -> None:
    turn = '[THINK]<tool_call>{"name": "f", "arguments": {}}</tool_call>[/THINK]4'
    engine = TurnEngine.__new__(TurnEngine)
    engine.tokenizer, engine.eos_ids = make_tokenizer("magistral"), ()
    assert parse_calls(engine._decode_turn(encode(engine.tokenizer, turn)[:-1]), "json") == []
    call = f"{ANALYSIS}f<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{{}}"
    engine.tokenizer = make_tokenizer("gpt-oss")
    (found,) = parse_calls(engine._decode_turn(encode(engine.tokenizer, call)[:-1]), "harmony")
    assert (found.name, found.arguments, found.problem) == ("f", {}, "")


def test_a_prompt_that_opens_a_thought_is_reported_to_rewards() -> None:
    assert built_in("prefilled_think", Sample("a", {}, prompt="<|assistant|>[THINK]\n"), 0, None) is True
    assert built_in("prefilled_think", Sample("a", {}, prompt="[THINK]a[/THINK]"), 0, None) is False


def test_sft_refuses_an_answer_that_leaves_an_opened_thought_open() -> None:
    tokenizer = make_tokenizer("magistral")
    tokenizer.chat_template = str(tokenizer.chat_template).replace(
        "if add_generation_prompt -%}{{- '<|assistant|>'", "if add_generation_prompt -%}{{- '<|assistant|>[THINK]'"
    )
    row = {"uid": "r", "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}
    with pytest.raises(DataError, match=r"opens \[THINK\] before the model's turn"):
        example_texts(row, tokenizer, Data(source="x"))


# Writes thoughts as Magistral's template does: as parts of a content, and not from a key of the message.
PARTS_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message.role + '|>' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{{- '[THINK]' + part['thinking'] + '[/THINK]' if part['type'] == 'thinking' else part['text'] -}}
{%- endfor -%}{%- endif -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "4", "reasoning_content": "2 and 2"},
        {"content": "4", "thinking": "2 and 2"},
        {"content": "<think>\n2 and 2\n</think>\n\n4"},  # as completions are recorded
    ],
)
def test_a_thought_that_the_template_reads_from_no_key_is_trained_on_in_the_models_marks(answer: Any) -> None:
    tokenizer = make_tokenizer("magistral")
    tokenizer.chat_template = PARTS_TEMPLATE
    row = {"uid": "r", "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", **answer}]}
    (text,) = example_texts(row, tokenizer, Data(source="x"))
    assert [(piece.text, piece.trained) for piece in text.pieces] == [
        ("<|user|>2+2?<|assistant|>", False),
        ("[THINK]2 and 2[/THINK]4<eos>", True),
    ]


def test_a_recorded_thought_without_end_stays_as_it_is() -> None:
    """A model that repeats line breaks: a pattern with three runs of white space took hours."""
    answer = {"role": "assistant", "content": "<think>" + "\n" * 20_000}
    assert adapt_messages(make_tokenizer("magistral"), [answer], None) == [answer]


def test_recorded_completions_are_trained_on_in_the_channels_of_harmony() -> None:
    tokenizer = make_tokenizer("gpt-oss")
    tokenizer.chat_template = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}{%- else -%}
{%- if message.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""
    answer = {"role": "assistant", "content": "<think>2 and 2</think>4"}
    row = {"uid": "r", "messages": [{"role": "user", "content": "2+2?"}, answer]}
    (text,) = example_texts(row, tokenizer, Data(source="x"))
    assert text.pieces[-1].text == f"{ANALYSIS}2 and 2<|end|>{FINAL}4<|return|>"
    assert thoughts.decode(tokenizer, [encode(tokenizer, text.pieces[-1].text)]) == ["<think>2 and 2</think>4"]


REASON = ("<reason>", "</reason>")


@pytest.fixture
def declared() -> Iterator[Any]:
    """The tokenizer of a recipe with `model.thoughts`; its template has no marks."""
    tokenizer = load_tokenizer(Model(path="tiny", thoughts=list(REASON)), Path())
    tokenizer.chat_template = str(tokenizer.chat_template).replace("<think>", "").replace("</think>", "")
    yield tokenizer
    del thoughts.KNOWN_FORMATS[len(thoughts.FORMATS) :]


def test_marks_of_a_recipe_are_read_and_written(declared: Any) -> None:
    form = thoughts.thought_format(declared)
    assert (form.opening, form.closing) == REASON
    (text,) = thoughts.decode(declared, [encode(declared, r"<reason>\boxed{5}</reason>\boxed{4}")])
    assert text == r"<think>\boxed{5}</think>\boxed{4}" and grade(text, "4")["reward"] == 1.0
    assert thoughts.written_format(declared).localize("so</think>") == "so</reason>"
    stream = thoughts.ThoughtStream(form)
    assert [stream.add(piece) for piece in ("<rea", "son>5", "?</reason>", "4")] == ["", "<think>5", "?</think>", "4"]
    ids = encode(declared, "<reason>5</reason>4")
    assert token_ends(ids, declared)[-1] == len("<think>5</think>4")


def test_marks_of_a_recipe_are_recognized_in_prompts(declared: Any) -> None:
    assert declared.thought_format is not None
    assert thoughts.opening_mark("2+2?<reason>\n") == "<reason>" and thoughts.closing_mark("<reason></reason>")
    assert ends_in_thought("2+2?<reason>", "5?") and not ends_in_thought("2+2?", "5?")
    sample = Sample("4", {}, "2+2?<reason>")
    assert built_in("prefilled_think", sample, 0, None) is True
    assert thoughts.find_empty_thoughts("a<reason>\n</reason>") and not thoughts.find_empty_thoughts(
        "<reason>a</reason>"
    )
    assert after_think("<think>5</think>4", "</reason>") == "4"


@pytest.mark.usefixtures("declared")
def test_processes_of_rewards_and_tools_recognize_the_marks_of_a_recipe(tmp_path: Path) -> None:
    """Each is a fresh process, which has loaded no tokenizer."""
    assert thoughts.list_declared() == [REASON]
    reward = Reward(use="math.accuracy", params={"think_delimiter": "</reason>", "require_think": True})
    texts = [r"<think>\boxed{5}</think>\boxed{4}", r"\boxed{4}"]
    with Scorer([reward], Scoring(workers=1), tmp_path) as scorer:
        scores = scorer.score([Sample(text, {"answer": "4"}, "2+2?") for text in texts])
    assert scores.components["accuracy"] == [1.0, 0.0]
    (tmp_path / "own.py").write_text(
        "from posttrain.thoughts import opening_mark\n\n"
        'def look(text: str) -> str:\n    """Look.\n\n    text: a text\n    """\n    return opening_mark(text)\n'
    )
    with Caller([load_tool(Tool(use="own.py:look"), tmp_path)], workers=1) as caller:
        assert caller.run([Call("look", {"text": "2+2?<reason>"})])[0].result == "<reason>"


def test_rows_get_the_marks_of_a_recipe(declared: Any) -> None:
    """A thought of a row, in its own key or as `<think>`, is trained on with the model's marks."""
    for turn in ({"content": "4", "reasoning_content": "5?"}, {"content": "<think>5?</think>4"}):
        row = {"uid": "u", "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", **turn}]}
        (text,) = example_texts(row, declared, Data(source="r.jsonl"))
        trained = "".join(piece.text for piece in text.pieces if piece.trained)
        assert trained.startswith("<reason>5?</reason>4")


def test_standard_marks_may_be_declared(declared: Any) -> None:
    """For a model with other marks in its vocabulary, or a template that shows none."""
    thoughts.declare_format(declared, *("<think>", "</think>"))
    assert thoughts.written_format(declared) is thoughts.STANDARD
    row = {"role": "assistant", "content": "4", "reasoning_content": "5?"}
    (_, turn) = adapt_messages(declared, [{"role": "user", "content": "2+2?"}, row], None)
    assert turn["content"] == "<think>\n5?\n</think>\n\n4"
    magistral = make_tokenizer("magistral")
    thoughts.declare_format(magistral, *("<think>", "</think>"))
    assert thoughts.decode(magistral, [encode(magistral, "[THINK]5[/THINK]4")]) == ["54"]


@pytest.mark.parametrize("marks", [["<a>"], ["<a>", "<a>"], ["", "</a>"], ["a", " "], ["<a>", "x<a>"]])
def test_marks_that_cannot_be_told_apart_are_refused(marks: list[str]) -> None:
    with pytest.raises(ValidationError):
        Model(path="tiny", thoughts=marks)
