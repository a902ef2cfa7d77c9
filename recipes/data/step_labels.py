"""Process Reward Agents (2604.09482): a teacher says of each step of a solution whether it is right, and whether
evidence mattered to say so. Rows for an agent that scores steps.

Used as `source: ../data/step_labels.py:label_steps` with `params: {run: RUN, teacher: MODEL}`: the run directory of a
`posttrain generate` or `eval` whose data have a column with evidence (`document`). The teacher reads the question and
the solution up to each step, once without and once with the evidence, and the log-probs of `1` and `0` as its next
token are its answer. Used by recipes/pra_tiny.yaml.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from posttrain.errors import DataError
from posttrain.evaluate.search import step_labels
from posttrain.models.model_paths import TINY
from posttrain.path_resolution import PathText
from posttrain.workflows.documents import find_passages

ASK = "{question}\n\nThe solution so far:\n{steps}\n\nIs its last step right? Answer 1 for yes or 0 for no."
EVIDENCE = "Evidence:\n{document}\n\n"
BATCH = 16


class Step(NamedTuple):
    """A solution up to and with one of its steps."""

    question: str
    steps: str
    document: str


def label_steps(
    size: int | None = None,
    seed: int = 0,
    *,
    run: Path,
    teacher: Annotated[str, PathText(words=TINY)],
    document: str = "document",
    ends: str = "\n\n",
    ask: str = ASK,
    evidence: str = EVIDENCE,
    corpus: Path | None = None,
    top: int = 3,
    shown: bool = False,
) -> Iterator[dict[str, Any]]:
    """The first `size` rows (None: all) {prompt, completion, reasoning, search}, one a step, with labels 0 and 1.

    reasoning: the teacher calls the step right, given the evidence. search: the evidence moved its margin by more, in
    size, than the median step's. document: the column with the evidence; or corpus: a file with a text a line, of which
    each step is shown the `top` that share the most words with the question and the step, by their rarity. ends: what a
    step ends with. ask, evidence: what the teacher is asked, and what stands before it. shown: two rows a step, one
    with `search` for the plain question, one with `reasoning` behind its evidence, for an agent that reads evidence."""
    del seed
    steps = list(_steps(run, None if corpus else document, ends))
    if corpus:
        texts = [line for line in corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
        steps = [s._replace(document=retrieve(s, texts, top, ends)) for s in steps]
    bare = [ask.format(question=s.question, steps=s.steps) for s in steps]
    informed = [evidence.format(document=s.document) + text for s, text in zip(steps, bare, strict=True)]
    answers = ask_teacher(teacher, [*bare, *informed])
    ones, zeros = [one for one, _ in answers], [zero for _, zero in answers]
    count = len(steps)
    found = step_labels(ones[:count], zeros[:count], ones[count:], zeros[count:])
    labels = zip(steps, found.reasoning, found.search, strict=True)
    if not shown:
        rows = (
            {"prompt": s.question, "completion": s.steps, "reasoning": reasoning, "search": search}
            for s, reasoning, search in labels
        )
        return itertools.islice(rows, size)
    pairs = (
        row
        for s, reasoning, search in labels
        for row in (
            {"prompt": s.question, "completion": s.steps, "reasoning": None, "search": search},
            {"prompt": put_before(evidence.format(document=s.document), s.question), "completion": s.steps,
             "reasoning": reasoning, "search": None},
        )
    )  # fmt: skip
    return itertools.islice(pairs, size)


def retrieve(step: Step, texts: Sequence[str], top: int, ends: str) -> str:
    """What a search for the question and the last step finds, a text a line."""
    last = step.steps.removesuffix(ends).rpartition(ends)[2]
    return "\n".join(find_passages(f"{step.question} {last}", texts, top))


def put_before(text: str, question: Any) -> Any:
    """The question, a text or messages, with a text before what the user says last."""
    if isinstance(question, str):
        return text + question
    messages = [dict(message) for message in question]
    asked = next(message for message in reversed(messages) if message["role"] == "user")
    asked["content"] = text + asked["content"]
    return messages


def ask_teacher(teacher: str, texts: Sequence[str]) -> list[tuple[float, float]]:
    """(log-prob of `1`, log-prob of `0`) as the first token of the model's answer to each text. Raises DataError for a
    tokenizer that writes one of them with several tokens."""
    import torch

    from posttrain.models.load import load
    from posttrain.models.scorer import pad_rows
    from posttrain.recipe.sections import Model

    loaded = load(Model(path=teacher), Path.cwd())
    tokenizer = loaded.tokenizer
    one, zero = (tokenizer.encode(text, add_special_tokens=False) for text in "10")
    if len(one) != 1 or len(zero) != 1:
        raise DataError("the teacher writes 1 or 0 with several tokens", where=teacher, hint="take another teacher")
    rows = [_tokens(tokenizer, text) for text in texts]
    found: list[tuple[float, float]] = []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        batch = {name: value.to(loaded.device) for name, value in pad_rows(part, loaded.pad_id).items()}
        with torch.no_grad(), loaded.autocast():
            logits = loaded.model(**batch).logits
        last = torch.tensor([len(row) - 1 for row in part], device=logits.device)
        logps = logits[torch.arange(len(part), device=logits.device), last].float().log_softmax(-1)
        found += [(row[one[0]].item(), row[zero[0]].item()) for row in logps]
    return found


def _tokens(tokenizer: Any, text: str) -> list[int]:
    if not tokenizer.chat_template:
        return list(tokenizer(text)["input_ids"])
    messages = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(written, add_special_tokens=False)["input_ids"])


def _steps(run: Path, document: str | None, ends: str) -> Iterator[Step]:
    folder = run.parent if run.is_file() else run
    asked = {row["uid"]: row for row in _lines(folder / "problems.jsonl")}
    for record in _lines(folder / "completions.jsonl"):
        problem = asked[record["uid"]]
        text = "" if document is None else problem["row"].get(document)
        if text is None:
            raise DataError(f"a row without the column `{document}`", where=str(folder), hint="name it by `document`")
        pieces = record["completion"].split(ends)
        for number, piece in enumerate(pieces, 1):
            if piece.strip():
                mark = ends if number < len(pieces) else ""
                yield Step(problem["prompt"], ends.join(pieces[:number]) + mark, str(text))


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DataError(f"no finished run: {path.name} is missing", where=str(path.parent))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
