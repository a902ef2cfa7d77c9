"""Shipped reward scripts."""

from mechanics import both, call, cells, reward

from posttrain.verify import math

PARTS = {"reward": "reward", "format": "format", "correctness": "correctness", "length": "length"}
LIMITS = {
    "format_max": "format_max",
    "format_min": "format_min",
    "correct_max": "correct_max",
    "correct_min": "correct_min",
}

ADAPTERS = {
    "soft_overlong": cells(reward("length.soft_overlong"), output="rewards", names={"lengths": "token_count"}),
    "cosine_length": cells(reward("length.cosine"), output="rewards", names={"lengths": "token_count"}),
    "format_reward": call(reward("format.structure"), outputs="reward"),
    "math_verify": both(
        call(reward("math.accuracy"), outputs="reward"),
        call(math.grade, outputs={"extracted": "extracted"}),
    ),
    "toolrl": call(reward("tools.toolrl"), outputs=PARTS),
    "toolrl_scale": call(reward("tools.toolrl_scale"), outputs=LIMITS),
}
