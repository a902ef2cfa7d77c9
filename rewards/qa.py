r"""Questions answered by search: the answer, the order of the blocks, and what was retrieved.

rewards:
  - use: qa.search_r1             # `answer`: a text or a list of texts that are all right
    params: {metric: em, structure: 0.2, final_format: 0.1}

`ansf1` wants few answers and all right ones; `search_r2`, `reseek` and `craft_qa` also pay for what was retrieved,
judged or cited. Retrieved is what the recipe's tools or its environment returned (`transcript`); an `<information>`
block that the policy wrote itself is none, and breaks the form. For stored transcripts of other trainers, in which
these blocks are the tool's, set `params: {stored: true}`; never for texts that the trained policy writes. A tool that
repeats the query in what it returns lets a guess count as found.

Exact match is SQuAD's and drops all marks (`-5` equals `5`, `C++` equals `C`), and `subem` is any occurrence (`no` in
`I know`): both are the papers' rules, for words. Numbers are for math.accuracy.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify import qa
from posttrain.verify.extract import tag_contents
from posttrain.verify.text import Metric, contains, golds_of
from posttrain.verify.transcript import Message


def search_r1(
    completion: str,
    answer: str | Sequence[str] | None,
    transcript: Sequence[Message] = (),
    *,
    metric: Metric = "em",
    structure: float = 0.0,
    final_format: float = 0.0,
    retrieval: float = 0.0,
    stored: bool = False,
) -> dict[str, Any] | None:
    """Search-R1 (2503.09516), after its code: the last answer by em, subem or f1; None without a gold.

    structure: what a right answer loses, and a wrong one earns, by the form (think, then search, information, think any
    number of times, then answer). retrieval: for a wrong answer of that form that had retrieved a gold. final_format:
    for a wrong one without the form that has an answer block. All 0: the plain score. Logged parts: score, valid,
    retrieved.
    """
    text = _read(completion, transcript, stored)
    found = qa.search_r1(
        text, answer, metric=metric, structure=structure, final_format=final_format, retrieval=retrieval
    )
    return None if found["reward"] is None else found


def _read(completion: str, transcript: Sequence[Message], stored: bool) -> str:
    """The text in which `<information>` is what a tool returned."""
    return completion if stored else qa.searched_text(transcript or [Message("model", completion)])


def search_r2(
    completion: str,
    answer: str | Sequence[str] | None,
    transcript: Sequence[Message] = (),
    *,
    metric: Metric = "em",
    stored: bool = False,
) -> float | None:
    """The answer's score * (1 + share of what the tools returned that holds a gold): Search-R2 (2602.03647).

    The paper's judge of usefulness is replaced by the occurrence of a gold string.
    """
    text = _read(completion, transcript, stored)
    score, golds = qa.search_r1(text, answer, metric=metric)["score"], golds_of(answer)
    return qa.density_reward(score, [float(contains(b, golds)) for b in tag_contents(text, "information")])


def reseek(
    completion: str,
    answer: str | Sequence[str] | None,
    transcript: Sequence[Message] = (),
    *,
    positive: float = 0.1,
    negative: float = -0.05,
    threshold: float = 0.5,
    max_answer_tags: int = 10,
    max_judged: int = 4,
    stored: bool = False,
) -> dict[str, float | None] | None:
    """The answer, and whether the agent judged its evidence well (`<judge>Yes|No</judge>` after information).

    ReSeek (2510.00568), after its code: `positive` for Yes under a right answer, a fifth of it for No to useless
    evidence, `negative` for the reverse. Useful means that a gold occurs in the text; the authors have a reranker.
    max_judged: the first so many judgements count (the paper has 4 turns), or repeating one would pay without end.
    """
    found = qa.reseek(
        _read(completion, transcript, stored),
        answer,
        positive=positive,
        negative=negative,
        threshold=threshold,
        max_answer_tags=max_answer_tags,
        max_judged=max_judged,
    )
    return None if found["reward"] is None else found


def ansf1(
    completion: str,
    answer: Sequence[str | Sequence[str]] | str | None,
    transcript: Sequence[Message] = (),
    *,
    require_format: bool = False,
    stored: bool = False,
) -> dict[str, float | None] | None:
    """F1 of the items of the last answer block against all right answers: A^2Search (2510.07958).

    `answer`: one entry a right answer, a text or a list of its aliases. Items are a JSON list, or stand between `;` and
    line ends (a guess). require_format: a transcript without search_r1's form earns 0 (a guess too).
    """
    text = _read(completion, transcript, stored)
    form = qa.well_formed_search(text) if require_format else None
    found = qa.answer_f1(text, answer, format_ok=form)
    return None if found["reward"] is None else found


def asearcher(
    completion: str,
    answer: str | Sequence[str] | None,
    transcript: Sequence[Message] = (),
    *,
    tags: Sequence[str] = ("think", "search", "access", "answer"),
    actions: Sequence[str] = ("search", "access", "answer"),
    scale: float = 1.0,
    shift: float = 0.0,
) -> dict[str, float | None] | None:
    """F1 of the sets of words of the last answer, 0 if a turn breaks the form: ASearcher (2508.07976).

    The form, in each turn of the model: `tags` open as often as they close, and at most one of `actions` opens. The
    paper's trainer takes scale * (score - shift) with 10 and 0.5. Logged parts: f1, format.
    """
    turns = [message.text for message in transcript if message.role == "model"] or [completion]
    found = qa.asearcher_reward(turns, answer, tags=tags, actions=actions)
    reward = found["reward"]
    return None if reward is None else {**found, "reward": scale * (reward - shift)}


def craft_qa(
    completion: str,
    answer: str | Sequence[str] | None,
    gold_docs: Sequence[int] | None = None,
    *,
    components: Sequence[str] = ("plan", "gold_docs", "reason", "answer"),
    citation: Literal["f1", "exact"] = "f1",
    weights: Mapping[str, float] | None = None,
) -> dict[str, float | None] | None:
    """Mean of form, answer and citations of an answer with its trace: CRAFT (2602.01348).

    The text is exactly the components, in order; if not, it earns 0. The paper's four audits need a judge and are left
    out. Weights are guesses.
    """
    found = qa.traced_answer(completion, answer, gold_docs, components=components, citation=citation, weights=weights)
    return None if found["reward"] is None else found


_TRACE = (
    "<think>who</think><search>capital of Norway</search>\n<information>Oslo is the capital</information>\n"
    "<think>ok</think>\n<answer>%s</answer>"
)
_PLAIN = "<think>so</think>\n<answer>%s</answer>"
_FORM = {"structure": 0.2, "final_format": 0.1, "retrieval": 0.1}
_STORED = {"stored": True}
_CITED = "<plan>find A</plan>\n<gold_docs>[1, %d]</gold_docs>\n<reason>doc 1 says</reason>\n<answer>Oslo</answer>"
_JUDGED = "<search>q</search><information>%s</information><judge>%s</judge><answer>Oslo</answer>"


def _search_rollout(found: str, last: str, kind: str = "ok") -> tuple[str, dict[str, Any]]:
    """(completion, columns) of a rollout that searched once, and then wrote `last`."""
    first = "<think>who</think><search>capital of Norway</search>"
    told = [Message("model", first), Message("tool", found, "search", kind), Message("model", last)]
    return f"{first}\n{last}", {"answer": "Oslo", "transcript": told}


_SHOWN = {
    "answer": "Oslo",
    "transcript": [
        {"role": "prompt", "text": "The capital? <information>Oslo</information>"},
        {"role": "model", "text": "<think>who</think><search>capital of Norway</search>"},
        {"role": "environment", "text": "Oslo is the capital"},
        {"role": "model", "text": _PLAIN % "Rome"},
    ],
}

EXAMPLES = {
    "search_r1": [
        (_TRACE % "the Oslo!", {"answer": ["Oslo"]}, {"reward": 1.0, "valid": 1.0, "retrieved": 1.0}, _STORED),
        (_TRACE % "the Oslo!", {"answer": ["Oslo"]}, {"reward": 1.0, "valid": 0.0, "retrieved": 0.0}),  # written itself
        (*_search_rollout("Oslo is the capital", _PLAIN % "Oslo"), {"reward": 1.0, "valid": 1.0, "retrieved": 1.0}),
        (*_search_rollout("Oslo is the capital", _PLAIN % "Rome"), 0.3, _FORM),
        (*_search_rollout("cats", _PLAIN % "Rome" + "<information>Oslo</information>"), 0.1, _FORM),
        (*_search_rollout("Oslo, but late", _PLAIN % "Rome", "error"), 0.2, _FORM),
        (_PLAIN % "Rome", _SHOWN, 0.3, _FORM),  # by an environment
        (*_search_rollout("<answer>Oslo</answer>", "I do not know"), 0.0),
        (_TRACE % "Rome", {"answer": "Oslo"}, 0.0),
        (_TRACE % "Rome", {"answer": "Oslo"}, 0.1, _FORM),
        (_TRACE % "Rome", {"answer": "Oslo"}, 0.3, {**_FORM, **_STORED}),
        ("<answer>Oslo</answer>", {"answer": "Oslo"}, 0.8, _FORM),
        ("<answer>Rome</answer>", {"answer": "Oslo"}, 0.1, _FORM),
        (_TRACE % "it is Oslo", {"answer": "Oslo"}, 0.5, {"metric": "f1"}),
        ("", {"answer": "Oslo"}, 0.0, _FORM),
        (_TRACE % "Oslo", {"answer": []}, None),
        (_TRACE % "nan", {"answer": float("nan")}, None),
    ],
    "search_r2": [
        (_TRACE % "Oslo", {"answer": "Oslo"}, 2.0, _STORED),
        (_TRACE % "Oslo", {"answer": "Oslo"}, 1.0),
        ("<information>Oslo</information><answer>Oslo</answer>", {"answer": "Oslo"}, 1.0),
        (*_search_rollout("Oslo is the capital", "<answer>Oslo</answer>"), 2.0),
        (*_search_rollout("cats", "<information>Oslo</information><answer>Oslo</answer>"), 1.0),
        (_TRACE % "Rome", {"answer": "Oslo"}, 0.0),
        ("<answer>Oslo</answer>", {"answer": "Oslo"}, 1.0),
        ("", {"answer": "Oslo"}, 0.0),
        ("", {"answer": None}, None),
    ],
    "reseek": [
        (_JUDGED % ("Oslo is in Norway", "Yes"), {"answer": "Oslo"}, 1.1, _STORED),
        (_JUDGED % ("cats", "No"), {"answer": "Oslo"}, 1.02, _STORED),
        (_JUDGED % ("Oslo is in Norway", "No"), {"answer": "Oslo"}, 0.95, _STORED),
        (_JUDGED % ("cats", "Yes"), {"answer": "Rome"}, -0.05, _STORED),
        (_JUDGED % ("Oslo", "Yes") * 4, {"answer": "Oslo"}, 1.0),
        (_JUDGED % ("cats", "No") * 4, {"answer": "Rome"}, 0.0),
        (*_search_rollout("Oslo is in Norway", "<judge>Yes</judge><answer>Oslo</answer>"), 1.1),
        ("", {"answer": "Oslo"}, 0.0),
    ],
    "ansf1": [
        ("<answer>Paris; the Rome; Oslo</answer>", {"answer": ["Paris", "Rome"]}, 0.8),
        ('<answer>["NYC"]</answer>', {"answer": [["New York City", "NYC"], "Boston"]}, 2 / 3),
        ("<answer>Paris</answer>", {"answer": "Paris"}, 0.0, {"require_format": True}),
        (*_search_rollout("Oslo", _PLAIN % "Oslo"), 1.0, {"require_format": True}),
        ("Paris", {"answer": "Paris"}, 0.0),
        ("", {"answer": "Paris"}, 0.0),
        ("<answer>Paris</answer>", {"answer": []}, None),
    ],
    "asearcher": [
        (*_search_rollout("Oslo is it", "<think>b</think><answer>Oslo Norway</answer>"), 2 / 3),
        ("<search>q</search><search>r</search><answer>Oslo</answer>", {"answer": "Oslo"}, 0.0),
        ("<answer>Oslo</answer>", {"answer": ["Rome", "Oslo"]}, 5.0, {"scale": 10.0, "shift": 0.5}),
        ("<answer>Oslo</answer><think>", {"answer": "Oslo"}, 0.0),
        ("<think>is it <answer>Oslo</answer></think>", {"answer": "Oslo"}, 0.0),
        ("", {"answer": "Oslo"}, 0.0),
        ("<answer>Oslo</answer>", {"answer": None}, None),
    ],
    "craft_qa": [
        (_CITED % 3, {"answer": "Oslo", "gold_docs": [1, 3]}, 1.0),
        (_CITED % 2, {"answer": "Oslo", "gold_docs": [1, 3]}, 2.5 / 3),
        ((_CITED % 3).replace("</plan>", ""), {"answer": "Oslo", "gold_docs": [1, 3]}, 0.0),
        ("", {"answer": "Oslo", "gold_docs": [1, 3]}, 0.0),
    ],
}


def _gold_answer(row: Mapping[str, Any]) -> str | None:
    golds = golds_of(row.get("answer"))
    return _PLAIN % golds[0] if golds else None


def _every_answer(row: Mapping[str, Any]) -> str | None:
    """All right answers, of each its first alias."""
    listed = row.get("answer")
    firsts = [golds_of(one)[:1] for one in (listed if isinstance(listed, list | tuple) else [listed])]
    golds = [first[0] for first in firsts if first]
    return _PLAIN % json.dumps(golds, ensure_ascii=False) if golds else None


def _gold_citation(row: Mapping[str, Any]) -> str | None:
    golds = golds_of(row.get("answer"))
    cited = f"[{', '.join(map(str, row.get('gold_docs') or (1, 3)))}]"
    return (_CITED % 3).replace("[1, 3]", cited).replace("Oslo", golds[0]) if golds else None


GOLD = {
    "search_r1": _gold_answer,
    "search_r2": _gold_answer,
    "reseek": _gold_answer,
    "ansf1": _every_answer,
    "asearcher": _gold_answer,
    "craft_qa": _gold_citation,
}

_CITIES = [
    {"prompt": "Which city is the capital?", "answer": city, "gold_docs": [1, 3]}
    for city in ("Paris", "Lisbon", "Nairobi", "Ottawa")
]
ROWS = dict.fromkeys(("search_r1", "search_r2", "reseek", "ansf1", "asearcher", "craft_qa"), _CITIES)
