r"""What a judge says of parts of an answer: a checklist by turn, audits of a trace, statements about a persona.

rewards:
  - use: audits.checklist
    weight: 1.0
    params:
      endpoint: {url: http://127.0.0.1:8001/v1, model: Qwen/Qwen3-8B, budget: 20000}

The endpoint is that of `judge.rating`. Replies that cannot be read are no score. What was asked is kept on disk.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify import agents, audits, judging, qa
from posttrain.verify import endpoint as server
from posttrain.verify.asking import ask_all, reply_summary
from posttrain.verify.contract import judge, per_turn
from posttrain.verify.transcript import Message


@judge(timeout_s=900)
@per_turn
async def checklist(
    completion: str,
    parts: Sequence[str],
    checklist: Sequence[Any] | None,
    transcript: Sequence[Message] = (),
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: server.Settings,
    seed: int = 0,
    longest: int = 20_000,
    concurrency: int = 8,
) -> list[float | None] | None:
    """The weighted share of each turn's criteria that the judge sees met, one number a turn: CM2.

    checklist: a list by turn of criteria, each a list of texts or {"text", "weight"}; a turn beyond it earns nothing.
    The judge sees the task and the conversation up to the end of the turn, what tools returned included. None without a
    checklist, or where a reply cannot be read: no credit for the whole rollout. With `advantage: {use: per_turn}`.
    """
    del completion
    if not checklist:
        return None
    criteria = [judging.criteria_of(items) for items in checklist][: len(parts)]
    shown = audits.turns_so_far(transcript, parts)
    texts = [
        judging.fill_template(
            judging.RUBRIC,
            {
                "prompt": judging.question(messages),
                "completion": judging.mark_text(shown[turn], longest),
                "criteria": "\n".join(f"{number}. {text}" for number, (text, _) in enumerate(items, 1)),
            },
        )
        for turn, items in enumerate(criteria)
        if items
    ]
    replies = iter(await ask_all(endpoint, texts, [seed], concurrency) if texts else [])
    scores: list[float | None] = []
    for items in criteria:
        met = judging.read_checks(next(replies).text, len(items)) if items else []
        if met is None:
            return None
        scores.append(agents.turn_score([[float(yes)] for yes in met], [weight for _, weight in items]))
    return [*scores, *[0.0] * (len(parts) - len(scores))]


@judge(timeout_s=900)
async def craft_qa(
    completion: str,
    answer: str | Sequence[str] | None,
    gold_docs: Sequence[int] | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: server.Settings,
    components: Sequence[str] = ("plan", "gold_docs", "reason", "answer"),
    citation: Literal["f1", "exact"] = "f1",
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
    longest: int = 20_000,
    concurrency: int = 8,
) -> dict[str, float | None] | None:
    """`qa.craft_qa` with the paper's four audits by a judge: does the reason follow the plan, do the documents and the
    task carry it, does it lead to the answer? CRAFT (2602.01348).

    A text without the form is not audited and earns 0. An audit that cannot be read is left out of their mean. Logged
    parts: format, answer, citation, judge, unparsed, cached.
    """
    form = qa.traced_answer(completion, answer, gold_docs, components=components, citation=citation)
    if form["reward"] is None:
        return None
    if not form["format"]:
        return {**form, "unparsed": 0.0, "cached": 0.0}
    asked = [
        judging.fill_template(judging.RUBRIC, {"prompt": judging.question(messages),
                                        "completion": judging.mark_text(completion, longest), "criteria": f"1. {text}"})
        for text in audits.TRACE_AUDITS.values()
    ]  # fmt: skip
    replies = await ask_all(endpoint, asked, [seed], concurrency)
    said = [judging.read_checks(reply.text, 1) for reply in replies]
    scores = {name: None if met is None else float(met[0]) for name, met in zip(audits.TRACE_AUDITS, said, strict=True)}
    found = qa.traced_answer(
        completion, answer, gold_docs, components=components, citation=citation, judge=scores, weights=weights
    )
    return {**reply_summary(replies, list(scores.values())), **found}


@judge(timeout_s=900)
async def persona(
    completion: str,
    persona: Sequence[str] | str | None,
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    endpoint: server.Settings,
    average: bool = True,
    seed: int = 0,
    longest: int = 20_000,
    concurrency: int = 8,
) -> dict[str, float | None] | None:
    """How many statements about the persona a reply respects, as an expected number: APC.

    persona: the statements, a list or lines of a text. For each the judge gives the probabilities that it is relevant
    to the task, that the reply entails it, and that the reply contradicts it; the paper's small classifiers are not
    shipped. average: their share instead of their number (ours). None without statements or a readable reply.
    """
    statements = [text for text, _ in judging.criteria_of(persona)]
    if not statements:
        return None
    fields = {
        "prompt": judging.question(messages),
        "completion": judging.mark_text(completion, longest),
        "statements": "\n".join(f"{number}. {text}" for number, text in enumerate(statements, 1)),
    }
    replies = await ask_all(endpoint, [judging.fill_template(audits.PERSONA, fields)], [seed], concurrency)
    read = audits.read_probabilities(replies[0].text, len(statements))
    reward = None if read is None else agents.persona_faithfulness(*zip(*read, strict=True), average=average)["reward"]
    return reply_summary(replies, [reward])


def CHECK(function: str, params: Mapping[str, Any]) -> list[str]:
    """What is wrong with the parameters of a judge, told before anything runs."""
    if "endpoint" not in params:
        return ["`endpoint` is missing: write {url: http://HOST:PORT/v1, model: NAME} under params"]
    known = set(inspect.signature(globals()[function]).parameters)
    wrong = [server.problem_of(server.Endpoint(**params["endpoint"]))]
    wrong += [f"unknown parameter `{name}`; known: {', '.join(sorted(known))}" for name in sorted({*params} - known)]
    return [sentence for sentence in wrong if sentence]


def _says(text: str) -> dict[str, Any]:
    return {"endpoint": {"url": f"scripted:{text}", "model": "none"}}


_TRACE = "<plan>find A</plan>\n<gold_docs>[1]</gold_docs>\n<reason>doc 1 says</reason>\n<answer>Oslo</answer>"
_HI = {"parts": ["Hi."]}
_BRAVE = ["He is brave.", "He never lies."]

EXAMPLES = {
    "checklist": [
        ("Hi.", {"checklist": [["greets", {"text": "asks", "weight": 3}]], **_HI}, 0.25, _says("1: yes\n2: no")),
        ("Hi.", {"checklist": [["greets"], ["asks"]], **_HI}, 1.0, _says("1: yes")),  # a turn that was not reached
        ("Hi.", {"checklist": [["greets"]], **_HI}, None, _says("I cannot say.")),
        ("Hi.", {"checklist": None, **_HI}, None, _says("1: yes")),
        ("", {"checklist": [["greets"]], "parts": [""]}, 0.0, _says("1: no")),
    ],
    "craft_qa": [
        (_TRACE, {"answer": "Oslo", "gold_docs": [1]}, {"reward": 1.0, "judge": 1.0}, _says("1: yes")),
        (_TRACE, {"answer": "Oslo", "gold_docs": [1]}, {"reward": 0.75, "judge": 0.0}, _says("1: no")),
        (_TRACE, {"answer": "Oslo", "gold_docs": [1]}, {"reward": 1.0, "unparsed": 1.0}, _says("perhaps")),
        ("", {"answer": "Oslo"}, 0.0, _says("1: yes")),
        (_TRACE, {"answer": None}, None, _says("1: yes")),
    ],
    "persona": [
        ("I will go.", {"persona": _BRAVE}, 0.95, _says("1: 1.0 0.9 0\n2: 0 0 0")),
        ("I will go.", {"persona": _BRAVE}, 1.9, {**_says("1: 1.0 0.9 0\n2: 0 0 0"), "average": False}),
        ("I will go.", {"persona": _BRAVE}, {"reward": None, "unparsed": 1.0}, _says("1: 1.0 0.9 0")),
        ("I will go.", {"persona": _BRAVE}, None, _says("1: 7 0.9 0\n2: 0 0 0")),
        ("", {"persona": _BRAVE}, 0.5, _says("1: 1 0 0\n2: 0 0 0")),
        ("I will go.", {"persona": []}, None, _says("1: 1 1 0")),
    ],
}

_ROW = {"prompt": "Where?", "answer": "Oslo", "gold_docs": [1], "checklist": [["short"]], "persona": _BRAVE}

ROWS = {
    "checklist": {"rows": [_ROW], "params": _says("1: yes")},
    "craft_qa": {"rows": [_ROW], "params": _says("1: yes")},
    "persona": {"rows": [_ROW], "params": _says("1: 1 1 0\n2: 1 1 0")},
}

GOLD = {"craft_qa": lambda row: _TRACE.replace("Oslo", str(row["answer"]))}
