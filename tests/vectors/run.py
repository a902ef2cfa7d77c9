"""Check the product's formulas against exact small cases.

    python tests/vectors/run.py DIR [--ids grpo,dapo] [--json FILE]

DIR holds one JSON file an id: {"method": id, "cases": [{"name", "params", "inputs", "expected"}]}. Prints one line an
id, `ID passed|failed|unknown`, and the counts; reasons go to stderr. Unknown: no file in DIR, or no function of the
product under that id. Exit 0 if nothing failed and no id that was asked for is unknown, 1 if not, 2 if DIR holds no
vectors.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from compare import case_differences, plain  # noqa: E402  the folder of this script is no package
from tables import read_table  # noqa: E402

Adapter = Callable[[Mapping[str, Any]], dict[str, Any]]
Verdict = Literal["passed", "failed", "unknown"]


def load_adapters() -> dict[str, Adapter]:
    """Load id -> adapter from all tables in adapters/. An id in two tables is an error."""
    adapters: dict[str, Adapter] = {}
    for path in sorted((HERE / "adapters").glob("*.yaml")):
        table = read_table(path)
        if twice := adapters.keys() & table.keys():
            raise ValueError(f"{path.name} names ids that another table names too: {', '.join(sorted(twice))}")
        adapters.update(table)
    return adapters


def load_vectors(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Load id -> cases from every JSON file except interface.json.

    A file without valid vectors gives [] (and fails).
    """
    vectors: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == "interface.json":
            continue
        try:
            content = json.loads(path.read_text())
            name, cases = content["method"], list(content["cases"])
        except (ValueError, KeyError, TypeError) as error:
            print(f"{path.name}: not a vector file: {error!r}", file=sys.stderr)
            name, cases = path.stem, []
        vectors.setdefault(name, []).extend(cases)
    return vectors


def compute(adapters: Mapping[str, Adapter], method: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the product's outputs for one case as JSON values. A case with an `op` tests the function `METHOD.OP`."""
    name = f"{method}.{case['op']}" if case.get("op") else method
    return plain(adapters[name](case))


def check(
    adapters: Mapping[str, Adapter], method: str, cases: Sequence[Mapping[str, Any]]
) -> tuple[Verdict, list[dict[str, Any]]]:
    """Return the verdict on an id and its outputs, [{"name", "output"}]; an exception is a reported failure."""
    if method not in adapters:
        return "unknown", []
    computed: list[dict[str, Any]] = []
    failed = not cases
    for number, case in enumerate(cases):
        name = case.get("name", str(number))
        try:
            output = compute(adapters, method, case)
            problems = case_differences(case, output)
        except Exception as error:
            output, problems = {}, [f"{type(error).__name__}: {error}"]
        computed.append({"name": name, "output": output})
        failed = failed or bool(problems)
        for problem in problems[:5]:
            print(f"{method} / {name}: {problem}", file=sys.stderr)
    return ("failed" if failed else "passed"), computed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of vector files")
    parser.add_argument("--ids", help="only these, comma-separated; each must be known")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every computed output")
    options = parser.parse_args(arguments)
    vectors = load_vectors(options.dir)
    if not vectors:
        print(f"no vector files in {options.dir}", file=sys.stderr)
        return 2
    adapters = load_adapters()
    wanted = list(dict.fromkeys(i.strip() for i in options.ids.split(",") if i.strip())) if options.ids else None
    counts = {"passed": 0, "failed": 0, "unknown": 0}
    computed: dict[str, list[dict[str, Any]]] = {}
    for method in vectors if wanted is None else wanted:
        verdict: Verdict = "unknown"
        if method in vectors:
            verdict, computed[method] = check(adapters, method, vectors[method])
        counts[verdict] += 1
        print(method, verdict)
    if options.json:
        options.json.write_text(json.dumps(computed, indent=1) + "\n")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 1 if counts["failed"] or (wanted is not None and counts["unknown"]) else 0


if __name__ == "__main__":
    sys.exit(main())
