"""Secrets of a recipe are never shown or saved: in values, in texts, and in a run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.redact import is_variable, redacted_text, without_secrets

SECRET = "sk-aVerySecretKey123"


def test_values_of_secret_keys_are_hidden() -> None:
    given = {
        "api_key": SECRET,
        "max_new_tokens": 4,
        "pad_token": "<p>",
        "x": [{"hub_token": SECRET, "url": "http://a"}],
    }
    assert without_secrets(given) == {
        "api_key": "***", "max_new_tokens": 4, "pad_token": "<p>", "x": [{"hub_token": "***", "url": "http://a"}],
    }  # fmt: skip
    assert without_secrets({"key_env": SECRET}) == {"key_env": "***"} and is_variable("JUDGE_API_KEY")
    assert without_secrets({"key_env": "JUDGE_API_KEY"}) == {"key_env": "JUDGE_API_KEY"}
    assert without_secrets("http://me:word@host/v1") == "http://***@host/v1"


def test_only_secrets_are_hidden_in_a_recipes_text() -> None:
    text = f"""# api keys: see below
rewards:
  - {{use: a.py:b, params: {{api_key: {SECRET}, limit: 3, "password": "x y"}}}}  # a comment
    key_env: JUDGE_API_KEY
    url: http://me:{SECRET}@host/v1
"""
    assert (
        redacted_text(text)
        == """# api keys: see below
rewards:
  - {use: a.py:b, params: {api_key: '***', limit: 3, "password": '***'}}  # a comment
    key_env: JUDGE_API_KEY
    url: http://***@host/v1
"""
    )


def test_run_writes_no_api_key_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It also resumes, which compares the recipe with the saved one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTHER_API_KEY", SECRET)
    Path("own.py").write_text(
        "def own(completion, *, api_key):\n"
        "    assert api_key.startswith('sk-a')\n"
        "    return len(completion)\n"
    )  # fmt: skip
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(4)))
    Path("r.yaml").write_text(f"""
stage: rl
model: {{path: tiny}}
data: {{source: rows.jsonl}}
rollout: {{prompts_per_step: 2, group_size: 2, max_new_tokens: 4}}
rewards: [{{use: "own.py:own", params: {{api_key: {SECRET}}}}}]
scoring: {{workers: 1}}
optim: {{lr: 1e-3}}
run: {{steps: 1}}
""")
    calls = [
        ["recipe", "show", "r.yaml"],
        ["recipe", "show", "r.yaml", "--json"],
        ["rl", "r.yaml", "--dry-run"],
        ["rl", "r.yaml", "--output", "out"],
        ["rl", "r.yaml", "--output", "out", "--resume", "run.steps=2"],
    ]
    for arguments in calls:
        result = CliRunner().invoke(app, arguments, prog_name="posttrain")
        assert result.exit_code == 0, result.stderr
        assert SECRET not in result.stdout + result.stderr, arguments
    written = [path for path in Path("out").rglob("*") if path.is_file()]
    assert any(path.name == "report.html" for path in written)
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert "api_key: '***'" in Path("out/recipe.yaml").read_text()


def test_key_given_instead_of_its_variable_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reward = (
        "{use: judge.rating, params: {endpoint: {url: 'http://127.0.0.1:9/v1', model: m, key_env: " + SECRET + "}}}"
    )
    result = CliRunner().invoke(app, ["recipe", "validate", "debug/rl", f"rewards=[{reward}]"], prog_name="posttrain")
    assert result.exit_code == 2 and "key_env names an environment variable" in result.stderr
    assert SECRET not in result.stderr
