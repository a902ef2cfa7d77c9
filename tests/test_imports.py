"""Allowed imports between packages: the arrows of the architecture, checked on the syntax tree of every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import posttrain

ROOT = Path(posttrain.__file__).parent
FOUNDATION = {"errors", "path_resolution", "recipe", "redact", "registry", "terminal", "typed_json", "source_locations"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "batch": {"images"},
    "chat": {"errors", "images"},
    "images": {"errors"},
    "hub": set(),
    "thoughts": set(),
    "path_resolution": {"errors"},
    "early_interrupt": set(),
    "garbage_collection": set(),
    "options": set(),
    "renamed_keys": set(),
    "typed_json": set(),
    "scratch": set(),
    "terminal": set(),
    "source_locations": set(),
    "seeds": {"errors"},
    "redact": set(),
    "registry": {"errors", "path_resolution", "redact"},
    "recipe": {"errors", "path_resolution", "registry", "options", "renamed_keys"},
    "run": {"errors", "path_resolution", "redact", "renamed_keys", "seeds", "terminal"},
    "report": {"errors", "terminal", "run"},
    "track": {"errors", "redact", "terminal", "run"},
    "verify": FOUNDATION | {"scratch", "thoughts"},
    "loss": {"batch", "registry", "errors", "options"},
    "advantage": {"batch", "registry", "errors", "options", "curriculum"},
    "control": {"registry", "errors"},
    "variants": {"batch", "registry", "errors", "options"},
    "shapes": {"batch", "registry", "errors"},
    "workflows": {"batch", "registry", "errors", "shapes", "verify"},
    "replay": {"registry", "errors", "curriculum", "control"},
    "curriculum": {"registry", "errors", "options", "seeds", "source_locations"},
    "models": FOUNDATION | {"run", "chat", "hub", "images", "scratch", "thoughts"},
    "data": FOUNDATION | {"batch", "chat", "curriculum", "hub", "images", "options", "seeds", "thoughts"},
    "tools": FOUNDATION | {"batch", "chat", "images", "verify"},
    "rollout": FOUNDATION
    | {
        "batch",
        "garbage_collection",
        "images",
        "models",
        "run",
        "chat",
        "tools",
        "scratch",
        "seeds",
        "shapes",
        "thoughts",
    },
    "export": FOUNDATION | {"callable_module", "chat", "hub", "models", "run", "scratch"},
    "merge": FOUNDATION | {"models", "run", "seeds", "callable_module"},
    "evaluate": FOUNDATION
    | {
        "callable_module",
        "chat",
        "batch",
        "data",
        "models",
        "rollout",
        "verify",
        "run",
        "loss",
        "tools",
        "seeds",
        "shapes",
        "workflows",
        "hub",
        "images",
        "thoughts",
    },
    "train": FOUNDATION
    | {"batch", "curriculum", "data", "models", "rollout", "verify", "run", "advantage", "loss", "evaluate", "tools"}
    | {"replay", "seeds", "shapes", "variants", "workflows", "callable_module", "images", "thoughts"},
    "callable_module": set(),
    "api": FOUNDATION | {"cli", "pipeline", "run", "train"},
    "pipeline": FOUNDATION | {"garbage_collection", "run", "report", "track", "evaluate", "rollout"},
}
AT_MODULE_LEVEL_ONLY_LIGHT = {
    "cli": {"early_interrupt", "errors", "path_resolution", "terminal"},
    "__main__": {"early_interrupt"},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(node: ast.AST) -> set[str]:
    """Return the first-level packages of posttrain named by an import statement."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [a.name for a in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "posttrain" else [node.module]
    return {n.split(".")[1] for n in names if n.startswith("posttrain.")}


def test_map_names_every_package() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    parts = {f"{p.name}/" for p in ROOT.iterdir() if (p / "__init__.py").is_file()}
    parts |= {p.name for p in ROOT.glob("*.py") if not p.name.startswith("__")}
    assert {part for part in parts if part not in text} == set()


def test_the_table_of_train_names_its_modules() -> None:
    text = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## The modules of `train/`")[2].partition("\n## ")[0]
    modules = {p.stem for p in (ROOT / "train").glob("*.py") if not p.name.startswith("__")}
    assert set(re.findall(r"`(\w+)`", table)) == modules


def test_every_import_is_allowed_by_the_map() -> None:
    files = sorted(p for p in ROOT.rglob("*.py") if "shipped" not in p.parts)
    assert len(files) > 40
    wrong = []
    for path in files:
        part = part_of(path)
        if part not in ALLOWED:
            assert part in AT_MODULE_LEVEL_ONLY_LIGHT or part == "__init__", f"{path}: a part without a rule"
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            strange = imported_parts(node) - ALLOWED[part] - {part, "__version__"}
            wrong += [f"{path.relative_to(ROOT)}:{node.lineno} imports {s}" for s in strange]  # type: ignore[attr-defined]
    assert wrong == []


def test_command_line_imports_no_heavy_library_at_module_level() -> None:
    files = sorted((ROOT / "cli").glob("*.py"))
    assert files
    wrong = []
    for path in [*files, ROOT / "__main__.py"]:
        allowed = AT_MODULE_LEVEL_ONLY_LIGHT[part_of(path)] | {"cli", "__version__"}
        for node in ast.parse(path.read_text()).body:
            wrong += [f"{path.name}:{node.lineno} imports {s}" for s in imported_parts(node) - allowed]
    assert wrong == []


def at_module_level(name: str) -> set[str]:
    """Return all modules imported by one of our modules; other packages by their first part."""
    found, left = set[str](), [name]
    while left:
        path = ROOT.parent / left.pop().replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        nodes = ast.parse(file.read_text()).body if file.is_file() else []  # not a file but a name in a module
        names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        ours = {n for n in names if n.split(".")[0] == "posttrain"}
        left += ours - found
        found |= ours | {n.split(".")[0] for n in names}
    return found


def test_rl_does_not_import_unused_libraries() -> None:
    """`datasets` imports pandas, TRL imports its trainers: seconds at every start."""
    slow = {"datasets", "pandas", "trl", "accelerate"}
    assert {"posttrain.train.update", "torch", "transformers"} <= at_module_level("posttrain.train.rl")
    assert not at_module_level("posttrain.train.rl") & slow
    assert {"datasets", "trl"} <= at_module_level("posttrain.train.sft")


def test_check_finds_a_forbidden_import() -> None:
    node = ast.parse("from posttrain.recipe.rl_sections import Loss").body[0]
    assert imported_parts(node) - ALLOWED["loss"] == {"recipe"}
    node = ast.parse("from posttrain import pipeline").body[0]
    assert imported_parts(node) - ALLOWED["train"] == {"pipeline"}
