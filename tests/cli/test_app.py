"""The command line as a whole: help, start-up, lazy groups."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from posttrain import __version__
from posttrain.cli.app import LAZY, PANELS, app

HEAVY = {"torch", "transformers", "trl", "datasets", "peft", "vllm"}
FIVE = "stage: sft\nmodel: {path: tiny, lora: {rank: 4.5}}\nrun: {seed: 4.7, steps: 1}\noptim: {lrr: 1}\nfoo: 1\n"


def modules_after(*commands: Sequence[str]) -> list[tuple[int, set[str]]]:
    """Return the exit code of a command in a fresh process, and all modules that it loaded."""
    code = "import sys, json\nfrom posttrain.cli.app import app\ndone = []\n"
    for words in commands:
        code += (
            f"try:\n    app({list(words)!r}, prog_name='posttrain')\nexcept SystemExit as end:\n    code = end.code\n"
        )
        code += "done.append([code, list(sys.modules)])\n"
    code += "print(); print(json.dumps(done))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [(exit_code, set(names)) for exit_code, names in json.loads(done.stdout.splitlines()[-1])]


def test_help_imports_only_typer() -> None:
    """Neither torch nor modules that only commands need: --help must take a third of a second."""
    ((code, loaded),) = modules_after(["--help"])
    assert code == 0
    assert not loaded & (HEAVY | {"pydantic", "yaml", "rich", "posttrain.recipe.load", "posttrain.cli.reward"})


def test_recipe_error_does_not_load_torch() -> None:
    Path("five.yaml").write_text(FIVE, encoding="utf-8")
    ((code, loaded),) = modules_after(["sft", "five.yaml"])
    assert code == 2
    assert "posttrain.recipe.load" in loaded
    assert not loaded & HEAVY


def test_light_commands_do_not_load_torch() -> None:
    """Nor transformers, although rows are rendered with the chat template."""
    shown = ["recipe", "show", "r.yaml"], ["methods", "show", "dapo"]
    checked = ["recipe", "validate", "r.yaml"], ["sft", "r.yaml", "--dry-run"], ["recipe", "validate", "debug/dpo"]
    done = modules_after(*shown, *checked)
    assert [(code, loaded & HEAVY) for code, loaded in done] == [(0, set())] * 5
    assert "jinja2" in done[-1][1] and "jinja2" not in done[1][1]


def test_help_shows_every_command_under_a_heading(call: Callable[..., Any]) -> None:
    shown = [name for names in PANELS.values() for name in names]
    commands = typer.main.get_command(app).commands
    assert sorted(shown) == sorted(name for name, command in commands.items() if not command.hidden)
    told = call("--help").stdout
    for heading, names in PANELS.items():
        assert f"{heading}:" in told
        assert all(f"\n  {name} " in told for name in names)


def test_lazy_groups_exist(call: Callable[..., Any]) -> None:
    for name, (module, _) in LAZY.items():
        assert isinstance(importlib.import_module(module).app, typer.Typer)
        result = call(name, "--help")
        assert result.exit_code == 0
        assert "Commands:" in result.stdout


def test_version(call: Callable[..., Any]) -> None:
    assert call("--version").stdout.strip() == __version__


def test_mistyped_command_gets_a_suggestion(call: Callable[..., Any]) -> None:
    result = call("evl", "r.yaml")
    assert result.exit_code == 2
    assert "did you mean `posttrain eval`?" in result.stderr


def test_python_m_posttrain_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "posttrain", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_closed_pipe_is_no_error() -> None:
    """`posttrain methods list | head -1`: the reader exits, and no traceback is printed."""
    command = f"{shlex.quote(sys.executable)} -m posttrain recipe schema | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "{\n"
    assert done.stderr == ""


def pages(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """Return every command of the command line, groups before their commands."""
    yield path
    for name in getattr(command, "commands", {}):
        inner = command.commands[name] if name not in LAZY else typer.main.get_group(lazy(name))
        yield from pages(inner, *path, name)


def lazy(name: str) -> typer.Typer:
    app: typer.Typer = importlib.import_module(LAZY[name][0]).app
    return app


def test_help_pages_are_complete_and_uniform(call: Callable[..., Any]) -> None:
    """Whole sentences, no Python types (`<str>`, `<int range>`), no braces; each argument and option has a sentence."""
    for page in pages(typer.main.get_command(app)):
        told = call(*page, "--help").stdout
        head, _, table = told.partition("\n\n")
        assert not re.search(r"<\w+( range)?>|<list|[{}]|\[\[", told), page
        assert head.startswith(" ".join(("Usage: posttrain", *page, "[OPTIONS]"))), page
        entries = re.findall(r"^  (-?\S.*?)(?:  +|\n {10,})(.*)$", table.partition("Options:")[2], re.MULTILINE)
        assert entries, page
        assert all(name and text for name, text in entries), page
        assert "..." not in table.partition("Commands:")[2], page


def test_argument_of_the_wrong_kind_gets_a_hint(call: Callable[..., Any]) -> None:
    """A model without a prompt, a mistyped reward, invalid completions, a recipe that does not train."""
    Path("rows.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    for arguments, what, hint in (
        (("generate", "tiny"), "`tiny` is a model, and no prompt is given", '--prompt "..."'),
        (("reward", "test", "mathh"), "no reward script `mathh`", "did you mean `math`?"),
        (("data", "pairs", "debug/eval", "rows.jsonl", "--max-pairs", "1"), "by `posttrain pairs`", "`stage: pairs`"),
        (("data", "inspect", "quickstart"), "a recipe for `posttrain run` has no data", "a stage of the pipeline"),
        (("recipe", "validate", "debug/rl", "algorithm=dapoo"), "unknown algorithm `dapoo`", "did you mean `dapo`?"),
        (
            ("recipe", "vaildate", "debug/rl"),
            "`posttrain recipe` has no command `vaildate`",
            "posttrain recipe validate",
        ),
        (
            ("reward", "tset", "math"),
            "`posttrain reward` has no command `tset`",
            "did you mean `posttrain reward test`?",
        ),
        (
            ("rl",),
            "Missing argument 'RECIPE'. A recipe file, or the name of a shipped recipe.\n  usage: posttrain rl",
            "posttrain rl --help",
        ),
        (
            ("export", "runs/a"),
            "Missing option '--to'. --to merged|gguf|ollama|hub:OWNER/NAME: Export format, or repository on the hub.\n",
            "posttrain export --help",
        ),
    ):
        result = call(*arguments)
        assert result.exit_code == 2, arguments
        assert what in result.stderr, arguments
        assert hint in result.stderr.partition("hint: ")[2], arguments
    known = call("recipe", "validate", "debug/rl", "algorithm=simp0").stderr
    assert "simpo" not in known and "`posttrain methods list --kind preset` lists all" in known  # simpo is for dpo


def test_a_path_with_blanks_is_to_be_quoted(call: Callable[..., Any]) -> None:
    Path("my runs").mkdir()
    Path("my runs/my rl.yaml").write_text("stage: sft\n")
    for words in (
        ("rl", "my", "runs/my", "rl.yaml", "run.steps=3"),
        ("recipe", "validate", "my", "runs/my", "rl.yaml"),
    ):
        result = call(*words)
        assert result.exit_code == 2
        assert result.stderr.startswith("no recipe `my`: the path has blanks, at which the shell splits it\n")
        assert "hint: write it in quotes: 'my runs/my rl.yaml'" in result.stderr


def test_missing_layers_of_a_model_are_reported_with_their_line(call: Callable[..., Any]) -> None:
    Path("m.yaml").write_text(
        "stage: merge\nmerge_method: passthrough\nslices:\n  - sources: [{model: tiny, layer_range: [0, 99]}]\n"
    )
    result = call("merge", "m.yaml", "--output", "out")
    assert result.exit_code == 2 and not Path("out").exists()
    assert "m.yaml:4:23  slices.0: layer_range [0, 99] of tiny, which has 2 layers" in result.stderr


def test_runs_of_a_sweep_are_listed_if_its_folder_is_named(call: Callable[..., Any]) -> None:
    for place, values in {
        "runs/sweep": {"stage": "sft"},
        "runs/sweep/optim.lr=1/seed-0": {"stage": "sft", "optim": {"lr": 1}},
        "runs/sweep/optim.lr=2/seed-0": {"stage": "sft", "optim": {"lr": 2}},
    }.items():
        Path(place).mkdir(parents=True)
        Path(place, "resolved.json").write_text(json.dumps(values))
    named = json.loads(call("runs", "runs/sweep", "--json").stdout)
    assert {Path(row["path"]).parent.name for row in named} == {"runs", "optim.lr=1", "optim.lr=2"}
    assert len(json.loads(call("runs", "--json").stdout)) == 1
