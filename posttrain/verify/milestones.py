"""Milestone reward: run a program with marks printed after matching statements (arXiv 2509.01684)."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence

from posttrain.verify.agents import submission_reward
from posttrain.verify.code import program_in
from posttrain.verify.sandbox import Limits, run_python

# Runs in the sandbox, because a program can crash the parser: reads {program, patterns, marks}, prints the marked
# program.
_MARKER = r"""
import ast, json, re, sys
given = json.load(sys.stdin)
tree = ast.parse(given["program"])
left = dict(zip(given["marks"], given["patterns"]))
def insert_marks(body):
    out = []
    for node in body:
        inner = [getattr(node, part, None) for part in ("body", "orelse", "finalbody")]
        for part, statements in zip(("body", "orelse", "finalbody"), inner):
            if isinstance(statements, list):
                setattr(node, part, insert_marks(statements))
        for handler in getattr(node, "handlers", []):
            handler.body = insert_marks(handler.body)
        out.append(node)
        if any(isinstance(statements, list) for statements in inner):
            continue
        source = ast.unparse(node)
        for mark, pattern in list(left.items()):
            if re.search(pattern, source) and not isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
                del left[mark]
                out += ast.parse(f"print({mark!r}, flush=True)").body
    return out
tree.body = insert_marks(tree.body)
print(ast.unparse(ast.fix_missing_locations(tree)))
"""


def milestone_reward(
    completion: str,
    milestones: Sequence[str],
    score_pattern: str | None = None,
    *,
    stdin: str = "",
    base: float = -10.0,
    credit: float = 0.1,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> dict[str, float]:
    """Run the completion's program in the sandbox with a mark after each milestone; return {"reward", "matched"}.

    score_pattern: regular expression with one group for the number that a program prints as its result; the last match
    counts, if the program exits with 0. The reward is `base` without a program that parses. Raises SandboxError.
    """
    program = program_in(completion)
    if program is None:
        return submission_reward("", [], base=base, credit=credit)
    limits = Limits(seconds=timeout_s, memory_mb=memory_mb)
    marks = [f"<milestone {number} {secrets.token_hex(8)}>" for number in range(len(milestones))]
    given = json.dumps({"program": program, "patterns": list(milestones), "marks": marks})
    marked = run_python(_MARKER, given, limits=limits, allow_unsandboxed=allow_unsandboxed)
    if not marked.ok:
        return submission_reward("", marks, base=base, credit=credit)
    done = run_python(marked.stdout, stdin, limits=limits, allow_unsandboxed=allow_unsandboxed)
    found = re.findall(score_pattern, done.stdout, re.MULTILINE) if score_pattern and done.ok else []
    score = float(found[-1]) if found else None
    return submission_reward(done.stdout, marks, score, base=base, credit=credit)
