"""Files and functions of posttrain that one step of RL enters, on the tiny model in one process.

    python benchmarks/step_calls.py [RECIPE] [--list] [KEY=VALUE ...]

These are the files that a reader of one step must open. Comprehensions and lambdas are not counted, properties are; a
generator or context manager counts once. The second step is counted, because the first one also fills caches.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import posttrain
from posttrain import api
from posttrain.train import rl

PACKAGE = str(Path(posttrain.__file__).parent)


def record_calls(seen: collections.Counter[tuple[str, str]]) -> Any:
    """Return a profile function that counts the functions of posttrain by (file, qualified name)."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            seen[code.co_filename[len(PACKAGE) + 1 :], code.co_qualname] += 1

    return profile


def count_step(recipe: str, overrides: dict[str, str], output: str) -> collections.Counter[tuple[str, str]]:
    """Train with the recipe; return the calls of its second step by (file, function)."""
    seen, step, steps = collections.Counter[tuple[str, str]](), rl.step, 0

    def counted(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps != 2:
            return step(*given)
        profile = record_calls(seen)
        sys.setprofile(profile)
        threading.setprofile(profile)  # for threads that the step starts
        try:
            return step(*given)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    rl.step = counted  # type: ignore[assignment]
    try:
        api.rl(recipe, output, **overrides)
    finally:
        rl.step = step
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="debug/rl")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE")
    parser.add_argument("--list", action="store_true", help="print the functions, by file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = count_step(args.recipe, dict(pair.split("=", 1) for pair in args.overrides), f"{folder}/run")
    by_file = collections.Counter(file for file, _ in seen)
    for file, count in by_file.most_common():
        print(f"{count:4}  {file}")
        if args.list:
            for name in sorted(name for where, name in seen if where == file):
                print(f"        {name}")
    print(f"{len(by_file)} files, {len(seen)} functions, {sum(seen.values())} calls in one step")


if __name__ == "__main__":
    main()
