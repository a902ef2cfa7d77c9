"""Rendering of rows to tokens with a mask of the trained tokens.

The rule: train on exactly what the model must write itself at inference, after exactly the tokens that it is given
there. The text is therefore rendered twice, once as the prompt of the assistant turn and once with the turn; the second
rendering must begin with the first, in text and in tokens. The end-of-turn token belongs to the turn and is trained on,
even if it is also the padding token: masks are by position, never by id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import TYPE_CHECKING, Any

from posttrain import chat, source_locations
from posttrain.data import images, turns
from posttrain.data.row_formats import template_fields
from posttrain.data.template_spans import adapt_messages
from posttrain.data.turns import Piece, Text
from posttrain.errors import DataError
from posttrain.images import Image
from posttrain.recipe.sections import Data

if TYPE_CHECKING:
    from posttrain.batch import Prompt

Row = Mapping[str, Any]

# Columns that hold parts of a conversation in row formats of other tools
_CONVERSATION_COLUMNS = (
    *("system", "system_prompt", "history", "reasoning", "reasoning_content", "thinking", "thought", "rationale"),
    *("tool_calls", "function_call", "functions"),
)
TRAILING_MESSAGES = "messages after the last trained turn are left out"
OPENING_TURN = "an assistant turn that begins the conversation (system messages aside) answers nothing: not trained on"
OTHERS_MARKED = "`train: true` of messages that the model does not write is not followed"
LONGEST_TEXT = 2_000_000  # characters of one sequence; tokenizers need about 500 bytes per character
TEMPLATE_VARIABLES = (
    "LOOK: the chat template gets no variables from the column `chat_template_kwargs`; `model.chat_template_kwargs`"
    " sets them for all rows"
)
PLAIN_TOOLS = "LOOK: `chat: false` does not write the row's `tools`"


@dataclass(frozen=True)
class Example:
    """A training sequence. `trained[i]`: whether the model is trained to write `ids[i]`."""

    uid: str
    ids: tuple[int, ...]
    trained: tuple[bool, ...]
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.trained), (self.uid, len(self.ids), len(self.trained))


@dataclass(frozen=True)
class Pair:
    """A prompt and two completions of it, each including its end token."""

    uid: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    images: tuple[Image, ...] = ()  # of the prompt


def render_prompt(row: Row, tokenizer: Any, section: Data) -> Prompt:
    """Return the prompt to sample from: the row's conversation up to the turn that the model has to write."""
    from posttrain.batch import Prompt

    text = prompt_text(row, tokenizer, section).pieces[0].text
    return Prompt(str(row["uid"]), row, text, encode_prompts([text], tokenizer, section)[0])


def render_example(row: Row, tokenizer: Any, section: Data, reader: images.Reader | None = None) -> Example:
    """Return the row as one training sequence, with its images if a reader is given.

    Raises DataError if the row yields several sequences; see `render_examples`.
    """
    found = render_examples(row, tokenizer, section, reader)
    if len(found) > 1:
        raise DataError(
            "the chat template rewrites earlier turns: this row makes several sequences",
            where=source_locations.describe_row(found[0].uid),
        )
    return found[0]


def render_examples(row: Row, tokenizer: Any, section: Data, reader: images.Reader | None = None) -> list[Example]:
    """Return the row as training sequences, usually one.

    If the template rewrites earlier turns (removes their thinking), there is one sequence per assistant turn, so that
    every turn is trained on in the form in which it is generated.
    """
    texts = example_texts(row, tokenizer, section)
    return encode(images.expand_placeholders([row] * len(texts), texts, section, reader) or texts, tokenizer, section)


def join_pair(uid: str, chosen: Example, rejected: Example) -> Pair:
    """Return two sequences with the same prompt as a pair. Raises DataError if their prompt tokens differ."""
    prompts = {tuple(compress(e.ids, map(not_, e.trained))) for e in (chosen, rejected)}
    if len(prompts) != 1:
        raise DataError("the sides begin with different prompt tokens", where=source_locations.describe_row(uid))
    sides = [tuple(compress(e.ids, e.trained)) for e in (chosen, rejected)]
    return Pair(uid, prompts.pop(), sides[0], sides[1], chosen.images)


# --- text


def prompt_text(row: Row, tokenizer: Any, section: Data) -> Text:
    """Return the prompt as the engine receives it, with the generation prompt if there is a chat template."""
    uid = str(row["uid"])
    if not section.chat:
        text = Text(uid, (Piece(plain_text(row, "prompt", section), False),), notes=_tools_unused(row))
    else:
        messages = images.use_template_marks(prompt_messages(row, section), row)
        text = turns.render_context(uid, adapt_messages(tokenizer, messages, tools(row)), tokenizer, tools(row))
    return _find_lost_columns([text], row, section)[0]


def example_texts(row: Row, tokenizer: Any, section: Data) -> list[Text]:
    """Return the row's sequences as text pieces, before tokenization."""
    return _find_lost_columns(_examples(row, tokenizer, section), row, section, beside=("prompt", "completion"))


def _examples(row: Row, tokenizer: Any, section: Data) -> list[Text]:
    """Return the row's sequences as text pieces, without notes on lost columns."""
    uid = str(row["uid"])
    if row.get("messages") is None and row.get("prompt") is None:
        return [_text_only(uid, row, tokenizer, section)]
    if not section.chat:
        text = _plain_text(row, plain_text(row, "prompt", section), plain_text(row, "completion", section), tokenizer)
        return [_train_on_all(text) if section.train_on == "all" else text]
    messages = images.use_template_marks(conversation(row, section), row)
    notes = [OTHERS_MARKED] if any(m["role"] != "assistant" and m.get("train") for m in messages) else []
    # `train: false` on a message: the turn is context only
    wanted = [bool(m.pop("train", True)) for m in messages]
    messages = adapt_messages(tokenizer, messages, tools(row))
    own = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not any(own):
        roles = ", ".join(dict.fromkeys(m["role"] for m in messages)) or "none"
        cause = "no message before the assistant turn" if own else f"no assistant turn (roles: {roles})"
        return [Text(uid, (Piece("", False),), drop_cause=cause)]
    targets = _target_turns(row, len(messages), own, section)
    if section.train_on == "assistant" and _is_greeting(messages, own):
        wanted[own[0]] = False
        notes.append(OPENING_TURN)
    if len(targets) > 1:
        examples = turns.render_all_turns(uid, messages, targets, [wanted[i] for i in targets], tokenizer, tools(row))
        last = max((i for i in targets if wanted[i]), default=own[-1])
    else:
        last, text = own[-1], turns.render_last_turn(uid, messages[: own[-1] + 1], tokenizer, tools(row))
        text = text if wanted[last] else turns.as_untrained(text)
        examples = [_train_on_all(text) if section.train_on == "all" else text]
    if last < len(messages) - 1:
        notes.append(TRAILING_MESSAGES)
    return _add_notes(examples, notes) if notes else examples


def _is_greeting(messages: Sequence[Mapping[str, Any]], own: list[int]) -> bool:
    """Return whether the first assistant turn, of the turns at `own`, begins the conversation, before any user's turn.

    Not if only a system message is before it and only assistant turns follow: they answer the system message.
    """
    before, after = messages[: own[0]], messages[own[0] : own[-1]]
    if any(message["role"] not in ("system", "developer") for message in before):
        return False
    return not before or any(message["role"] != "assistant" for message in after)


def _target_turns(row: Row, count: int, own: list[int], section: Data) -> list[int]:
    """Return the assistant turns that `train_on` selects, of the `own` ones among `count` messages.

    completion: the last one; of a row with a completion of several messages, every one in the completion.
    """
    if section.train_on == "assistant":
        return own
    answer = row.get("completion") if row.get("messages") is None or section.prompt_template else None
    if section.train_on == "completion" and isinstance(answer, list):
        return [i for i in own if i >= count - len(answer)] or own[-1:]
    return own[-1:]


def pair_texts(row: Row, tokenizer: Any, section: Data) -> list[Text]:
    """Return [chosen, rejected] as text pieces."""
    check_sides(row)
    return _find_lost_columns(_sides(row, tokenizer, section), row, section)


def _sides(row: Row, tokenizer: Any, section: Data) -> list[Text]:
    """Render both sides of a pair."""
    uid = str(row["uid"])
    if not section.chat:
        prompt = plain_text(row, "prompt", section)
        return [_plain_text(row, prompt, plain_text(row, side, section), tokenizer) for side in ("chosen", "rejected")]
    before = images.use_template_marks(prompt_messages(row, section), row)
    contexts: dict[str, Text] = {}  # keyed by prompt: the message format may differ between the sides
    sides = []
    for side in ("chosen", "rejected"):
        messages = adapt_messages(tokenizer, [*before, *answer_messages(row[side])], tools(row))
        for message in messages:
            message.pop("train", None)
        key = repr(messages[:-1])
        contexts[key] = contexts.get(key) or turns.render_context(uid, messages[:-1], tokenizer, tools(row))
        sides.append(turns.render_last_turn(uid, messages, tokenizer, tools(row), contexts[key]))
    return sides


def _find_lost_columns(texts: list[Text], row: Row, section: Data, *, beside: Sequence[str] = ()) -> list[Text]:
    """Return the texts with a note for each column that looks like part of a conversation but is in no message.

    beside: columns that nothing reads if the row has messages. Raises DataError for a text that is too long to
    tokenize.
    """
    longest = max((sum(len(piece.text) for piece in text.pieces) for text in texts), default=0)
    if longest > LONGEST_TEXT:
        raise DataError(
            f"the text has {longest:,} characters",
            where=source_locations.describe_row(str(row["uid"])),
            allowed=f"up to {LONGEST_TEXT:,}, more than any model is trained on in one row",
            hint="divide the row, or leave it out",
        )
    used = [
        *template_fields(section.prompt_template or ""),
        *template_fields(section.completion_template or "", "completion_template"),
    ]
    talk = next((row[c] for c in ("prompt", "messages") if row.get(c)), None)
    if talk and (isinstance(talk, str) or talk[0]["role"] != "system"):
        used.append("system")  # `system_message` reads it
    names = [
        *_CONVERSATION_COLUMNS,
        *(beside if row.get("messages") is not None and not section.prompt_template else ()),
    ]
    if section.chat and row.get("chat_template_kwargs"):
        texts = _add_notes(texts, (TEMPLATE_VARIABLES,))
    given = [c for c in names if row.get(c) and isinstance(row[c], str | list | Mapping) and c not in used]
    if not given:
        return texts
    contents = [t for c in ("messages", "prompt", "completion", "chosen", "rejected") if c not in given
            for t in _contents(row.get(c))]  # fmt: skip
    lost = [c for c in given if not _is_in_messages(row[c], contents)]
    return _add_notes(texts, tuple(f"LOOK: the column `{c}` is in no message" for c in lost))


def _contents(value: Any) -> list[str]:
    """Return the texts of a column: the text itself, or the contents of its messages."""
    if isinstance(value, str):
        return [value]
    return [str(m.get("content")) for m in value if isinstance(m, Mapping)] if isinstance(value, list) else []


def _is_in_messages(value: Any, contents: Sequence[str]) -> bool:
    """Return whether a text equals one of the contents, or is part of one and long enough to exclude chance; of a list,
    whether every item does."""
    if isinstance(value, list) and value:
        return all(_is_in_messages(item, contents) for item in value)
    if not isinstance(value, str):
        return False
    text = value.strip()
    return any(text == content.strip() or (len(text) >= 12 and text in content) for content in contents)


def _add_notes(texts: list[Text], notes: Sequence[str]) -> list[Text]:
    """Return the texts with further notes."""
    return [replace(text, notes=(*text.notes, *notes)) for text in texts]


def check_sides(row: Row) -> None:
    """Raise DataError for a row without two answers."""
    if row.get("chosen") is None:
        hint = "name the columns of both answers: data.columns: {chosen: THEIR_NAME, rejected: THEIR_NAME}"
        if row.get("label") is not None:
            hint = "rows with a `label` of each answer are for `algorithm: kto` and other losses on single answers"
        known = ", ".join(sorted(name for name in row if name != "uid"))
        raise DataError(
            "no `chosen` and `rejected`, the two answers of a pair",
            where=source_locations.describe_row(row["uid"]),
            allowed=f"columns: {known}",
            hint=hint,
        )


_ANSWERS = ("response", "output", "solution")  # columns that hold the completion in some data sets


def conversation(row: Row, section: Data) -> list[dict[str, Any]]:
    """Return the whole conversation of a training row, with the recipe's system message if it has none."""
    if row.get("messages") is not None and not section.prompt_template:
        return _with_system(chat.clean_messages(row["messages"]), system_message(row, section))
    completion = row.get("completion")
    if completion is None and "completion" in row:
        raise _null_error("completion", row)
    if completion is None:
        raise DataError(
            "no `completion` to train on",
            where=source_locations.describe_row(row["uid"]),
            hint=f"write e.g. columns: {{completion: {next((name for name in _ANSWERS if row.get(name)), 'answer')}}}",
        )
    return [*prompt_messages(row, section), *answer_messages(completion)]


def _null_error(column: str, row: Row) -> DataError:
    """Return the error for a column that is null."""
    hint = "give it a value, or leave the row out"
    return DataError(f"`{column}` is null", where=source_locations.describe_row(row["uid"]), hint=hint)


def answer_messages(answer: Any) -> list[dict[str, Any]]:
    """Return a completion or one side of a pair as messages; a text becomes one assistant message."""
    return chat.clean_messages([{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer)


def prompt_value(row: Row, text: str, section: Data) -> Any:
    """Return the prompt as stored in a data row: messages, or plain text if no chat template is used."""
    return prompt_messages(row, section) if section.chat else text


def prompt_messages(row: Row, section: Data) -> list[dict[str, Any]]:
    """Return the conversation before the model's turn: the prompt, or the messages without trailing assistant turns."""
    prompt = row.get("prompt")
    if prompt is None:
        prompt = list(row.get("messages") or ())
        while prompt and prompt[-1]["role"] == "assistant":
            prompt.pop()
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else chat.clean_messages(prompt)
    if not messages:
        raise DataError("the prompt is empty", where=source_locations.describe_row(row["uid"]))
    return _with_system(messages, system_message(row, section))


def system_message(row: Row, section: Data) -> str | None:
    """Return the system message of a conversation that has none: the row's column `system`, else the recipe's."""
    own = row.get("system")
    if isinstance(own, str) and own.strip() and "system" not in template_fields(section.prompt_template or ""):
        return own
    return section.system


def tools(row: Row) -> list[Any] | None:
    """Return the row's tools for the template, from a list or its JSON text (JSON text avoids nulls added by Arrow)."""
    value = row.get("tools")
    if not value:
        return None
    where = source_locations.describe_row(row.get("uid", ""))
    try:
        found = json.loads(value) if isinstance(value, str) and value.strip() else value or None
    except ValueError as cause:
        raise DataError(f"`tools` is text and no JSON: {cause}", where=where) from cause
    if found and not (isinstance(found, list) and all(isinstance(tool, Mapping) for tool in found)):
        raise DataError(
            f"`tools` is {str(found)[:60]}",
            where=where,
            allowed="a list of JSON schemas of functions, or JSON text of one",
        )
    return [_parse_parameters(tool, where) for tool in found] if found else None


def _parse_parameters(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a tool with its parameters as an object: data sets store them as JSON text if their types differ."""
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": _parse_parameters(function, where)}
    if not isinstance(tool.get("parameters"), str):
        return tool
    try:
        return {**tool, "parameters": json.loads(tool["parameters"])}
    except ValueError as cause:
        name = tool.get("name")
        raise DataError(f"`tools`: the parameters of {name} are text and no JSON: {cause}", where=where) from cause


def _with_system(messages: list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    """Return the messages with the system message first, unless they already have one."""
    if system is None or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _text_only(uid: str, row: Row, tokenizer: Any, section: Data) -> Text:
    """Return a row of plain text as one fully trained sequence."""
    if section.train_on != "all":
        raise DataError(
            "a row of plain `text` has no prompt to leave out",
            where=source_locations.describe_row(uid),
            hint="write `train_on: all`",
        )
    return Text(uid, (Piece(row["text"], True),), turns.eos(tokenizer))


def plain_text(row: Row, column: str, section: Data) -> str:
    """Return a column as plain text (`chat: false`). Raises DataError if it is missing or holds messages."""
    value = row.get(column)
    if value is None and column in row:
        raise _null_error(column, row)
    if value is None:
        raise DataError(
            f"no `{column}`",
            where=source_locations.describe_row(row["uid"]),
            hint="`chat: false` needs prompt (and completion) texts",
        )
    if not isinstance(value, str):
        what, hint = f"`{column}` is messages", ""
        if column == "prompt" and row.get("history"):  # `normalize_row` put its turns before the prompt
            what = "`history` holds earlier turns"
            hint = "use a chat template (`chat: true`), or leave them out with `data.prompt_template: '{prompt}'`"
        where = source_locations.describe_row(row["uid"])
        raise DataError(f"{what}, which `chat: false` cannot write", where=where, hint=hint)
    system = system_message(row, section) if column == "prompt" else None
    return f"{system}\n\n{value}" if system else value


def _plain_text(row: Row, prompt: str, completion: str, tokenizer: Any) -> Text:
    """Return prompt and completion as text pieces without a template; an empty completion is not trained on."""
    uid, notes = str(row["uid"]), _tools_unused(row)
    if not completion.strip():
        return Text(uid, (Piece(prompt, False),), notes=notes)
    return Text(uid, (Piece(prompt, False), Piece(completion, True)), turns.eos(tokenizer), notes=notes)


def _tools_unused(row: Row) -> tuple[str, ...]:
    """Return a note if the row has tools, which plain text cannot contain."""
    return (PLAIN_TOOLS,) if tools(row) else ()


def _train_on_all(text: Text) -> Text:
    """Return the text with all pieces trained on, unless it has no answer."""
    if not any(p.trained for p in text.pieces):
        return text
    return replace(text, pieces=tuple(Piece(p.text, True) for p in text.pieces))


# --- tokens


def encode_prompts(texts: Sequence[str], tokenizer: Any, section: Data) -> list[tuple[int, ...]]:
    """Tokenize prompts. Templates write their special tokens themselves; plain text gets the tokenizer's BOS."""
    bos = _bos(tokenizer, section)
    return [(*bos.before(text), *ids) for text, ids in zip(texts, _ids(tokenizer, list(texts)), strict=True)]


def encode(texts: Sequence[Text], tokenizer: Any, section: Data) -> list[Example]:
    """Tokenize sequences, all in one call of the tokenizer.

    A sequence is tokenized as a whole if each piece then ends on a token boundary. Otherwise it is tokenized piece by
    piece: at inference the prompt is tokenized alone, so no token can span prompt and answer.
    """
    prefixes = list(dict.fromkeys(prefix for t in texts for prefix in _prefixes(t)))
    ids = dict(zip(prefixes, _ids(tokenizer, prefixes), strict=True))
    bos = _bos(tokenizer, section)
    return [_encode_one(t, ids, tokenizer, bos, trained_start=section.train_on == "all") for t in texts]


def _prefixes(text: Text) -> Iterator[str]:
    """Yield the text up to the end of each piece."""
    so_far = ""
    for piece in text.pieces:
        so_far += piece.text
        yield so_far


def _encode_one(
    text: Text, ids: Mapping[str, tuple[int, ...]], tokenizer: Any, bos: _Bos, *, trained_start: bool
) -> Example:
    """Return one sequence as tokens. ids: prefix of the text -> its tokens."""
    whole = ids["".join(p.text for p in text.pieces)]
    tokens: list[int] = []
    trained: list[bool] = []
    for piece, prefix in zip(text.pieces, _prefixes(text), strict=True):
        if whole[: len(ids[prefix])] != ids[prefix]:
            tokens, trained = _encode_pieces(text, whole, tokenizer)
            break
        trained += [piece.trained] * (len(ids[prefix]) - len(tokens))
        tokens = list(ids[prefix])
    start = bos.before(text.pieces[0].text)
    return Example(
        text.uid,
        (*start, *tokens, *text.ids_after),
        (*(trained_start for _ in start), *trained, *(True for _ in text.ids_after)),
        text.images,
    )


def _encode_pieces(text: Text, whole: tuple[int, ...], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokenize each piece alone. Raises DataError if the pieces do not decode to the same text as the whole."""
    parts = _ids(tokenizer, [p.text for p in text.pieces])
    tokens = [i for part in parts for i in part]
    if tokenizer.decode(tokens) != tokenizer.decode(list(whole)):
        raise DataError(
            "this tokenizer decodes a text differently in parts than as a whole, and no token boundary lies between "
            "prompt and answer, so the trained tokens would differ from those at inference",
            where=text.uid,
        )
    return tokens, [p.trained for p, part in zip(text.pieces, parts, strict=True) for _ in part]


def _ids(tokenizer: Any, texts: list[str]) -> list[tuple[int, ...]]:
    """Tokenize texts without special tokens."""
    if not texts:
        return []
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return [tuple(ids) for ids in tokenizer(texts, **options)["input_ids"]]


@dataclass(frozen=True)
class _Bos:
    """BOS before plain text: `always` if the tokenizer adds one; `empty` is used before an empty prompt."""

    always: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()

    def before(self, text: str) -> tuple[int, ...]:
        return self.always if text else self.empty


def _bos(tokenizer: Any, section: Data) -> _Bos:
    """Return the BOS tokens for plain text; none with a chat template, which writes its own."""
    if section.chat or tokenizer.bos_token_id is None:
        return _Bos()
    bos = (int(tokenizer.bos_token_id),)
    return _Bos(bos if tuple(tokenizer("a")["input_ids"][:1]) == bos else (), bos)
