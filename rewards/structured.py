r"""Is the answer a JSON object with the right keys and values, and nothing else?

rewards:
  - use: structured.rl_struct     # `answer`: the gold object, or its JSON text
    params: {required: [title, minutes], weights: {content: 2}}

After the description of "RL-Struct", 2512.00319; it states no formula, so all of them and the weights are guesses.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify.structured import from_json, json_reward


def rl_struct(
    completion: str,
    answer: Mapping[str, Any] | str | None,
    token_count: int = 0,
    *,
    required: Sequence[str] | None = None,
    schema: Mapping[str, Any] | None = None,
    weights: Mapping[str, float] | None = None,
    decimals: int = 6,
    budget: int | None = None,
) -> dict[str, float] | None:
    """Weighted mean of validity, format, structure and content in [0, 1]; None without a gold.

    required: the keys that must be there and no others (default: the gold's); schema: a JSON schema that decides
    instead (needs the package jsonschema). decimals: numbers are equal after rounding. budget: tokens, for a part
    `length` that has weight 0 unless `weights` gives it one.
    """
    if answer is None:
        return None
    return json_reward(
        completion,
        from_json(answer, Mapping, "an object"),
        required=required,
        weights=weights,
        decimals=decimals,
        schema=schema,
        tokens=token_count,
        budget=budget,
    )


_GOLD = {"title": "Soup", "minutes": 20, "vegan": True}

EXAMPLES = [
    ('{"title": "Soup", "minutes": 20, "vegan": true}', {"answer": _GOLD}, 1.0),
    ('<think>{}</think>{"title": " Soup", "minutes": 20.0, "vegan": true}', {"answer": _GOLD}, 1.0),
    ('```json\n{"title": "Soup", "minutes": 25, "vegan": true}\n```', {"answer": _GOLD}, 9.5 / 12),
    ('Here:\n```json\n{"title": "Soup", "minutes": 20, "vegan": true}\n```', {"answer": _GOLD}, 0.75),
    ('{"title": "Soup", "minutes": 20, "vegan": 1}', {"answer": _GOLD}, {"reward": 11 / 12, "content": 2 / 3}),
    ('{"title": "Soup", "minutes": 20', {"answer": _GOLD}, 0.0),
    ('{"title": "Soup", "title": "Stew"}', {"answer": _GOLD}, 0.0),
    ('{"title": null, "minutes": null, "vegan": null}', {"answer": _GOLD}, {"reward": 0.5, "structure": 0.0}),
    ("{}", {"answer": _GOLD}, 0.5),
    ("[1]", {"answer": _GOLD}, 0.0),
    ("", {"answer": _GOLD}, 0.0),
    ("{}", {"answer": None}, None),
]

ROWS = [
    {"prompt": "Write the recipe as JSON.", "answer": _GOLD},
    {"prompt": "And this one.", "answer": '{"title": "Tea"}'},
]
