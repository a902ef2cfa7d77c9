"""No control character of a text reaches the terminal; texts in files are unchanged."""

from __future__ import annotations

import ast
import io
import json
import unicodedata
from pathlib import Path

import pytest

import posttrain
from posttrain import terminal
from posttrain.terminal import escape_control_characters

HOSTILE = {
    "colour": "\x1b[31mred\x1b[0m",
    "cleared screen": "\x1b[2J\x1b[H",
    "hidden text": "\x1b[8mhidden\x1b[28m",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;https://example.com\x1b\\text\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "device control": "\x1bP+q544e\x1b\\",
    "C1": "\x9b31m and \x9d0;title\x9c",
    "rewritten line": "wrong\rright",
    "backspaces": "wrong\b\b\b\b\bright",
    "bell and null": "\x07\x00",
    "deleted": "a\x7fb",
    "reversed text": "\u202egnp.exe\u202c",
    "isolated text": "\u2066a\u2069\u2067b\u2069\u200f\u200e\u061c",
    "vertical moves": "a\x0bb\x0cc",
    "half of a character": "\ud800",
    "no width": "pass\u200bword\ufeff\u2060\u00ad\u180e\u206f",
    "notes": "\ufff9a\ufffab\ufffb",
    "tags": "a\U000e0068\U000e0069\U000e007f",
}


def raw(text: str) -> list[str]:
    """Return the characters that would act on a terminal."""
    bidi = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    return [
        c
        for c in text
        if (ord(c) < 32 and c not in "\n\t")
        or 127 <= ord(c) < 160
        or c in bidi
        or 0xD800 <= ord(c) < 0xE000
        or (unicodedata.category(c) == "Cf" and c not in "\u200c\u200d")  # those join letters and emoji
    ]


@pytest.mark.parametrize("name", HOSTILE)
def test_control_characters_are_escaped_everywhere(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE[name]
    assert raw(text)
    shown = io.StringIO()
    console = terminal.console(file=shown, force_terminal=True, width=200, highlight=False)
    from rich.table import Table

    table = Table(text, title=text)
    table.add_row(text)
    console.print(text, markup=False, style="bold")
    console.print(table)
    plain = shown.getvalue()
    for own in ("\x1b[1m", "\x1b[0m", "\x1b[3m", "\x1b[1;3m"):  # the console's own styles
        plain = plain.replace(own, "")
    terminal.say(text)
    terminal.note(text)
    printed = capsys.readouterr()
    assert raw(plain) == [], plain  # rich itself drops some of them
    first = ord(raw(text)[0])
    for output in (printed.out, printed.err, terminal.bold(text)):
        assert raw(output) == [], output
        assert (f"\\u{first:04x}" if first < 1 << 16 else json.dumps(chr(first))[1:-1]) in output


@pytest.mark.parametrize("text", ["plain", "two\nlines\tand a tab", "Zürich 東京 🦊 e\u0301 👩\u200d🚀", "שלום", ""])
def test_other_text_is_unchanged(text: str) -> None:
    assert escape_control_characters(text) == text


@pytest.mark.parametrize("name", HOSTILE)
def test_json_is_unchanged(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    terminal.say(json.dumps({"text": HOSTILE[name]}, ensure_ascii=False))
    assert json.loads(capsys.readouterr().out) == {"text": HOSTILE[name]}


def test_all_output_goes_through_the_terminal_module() -> None:
    """Except prints of programs that run elsewhere."""
    root, found = Path(posttrain.__file__).parent, []
    elsewhere = {"terminal.py", "registry.py", "recipe/schema.py", "verify/jail.py", "run/watchdog.py"}
    elsewhere |= {"verify/function_calls.py"}  # runs in the sandbox, which reads its output
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            call = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if call in ("print", "Console", "typer.echo", "typer.secho", "click.echo", "traceback.print_exc",
                        "sys.stdout.write", "sys.stderr.write", "rich.print") and name not in elsewhere:  # fmt: skip
                found.append(f"{name}:{node.lineno} {call}")
    assert found == []


TOOL = '''
def speak(a: int = 1) -> str:
    """Say \x1b]0;x\x07 something."""
    print("printed \\x1b[31m")
    if a == 2:
        raise ValueError("raised \\x1b[2J")
    return "result \\x1b]52;c;eA==\\x07 \\u202e"


EXAMPLES = [({"a": 1}, "other \\x9b1m"), ({"a": 2}, ValueError)]
'''
REWARD = """
def score(completion: str, answer: str) -> float:
    print(completion)
    if "raise" in completion:
        raise ValueError(completion)
    return float(completion == answer)


EXAMPLES = [("\\x1b[31mone\\r", {"answer": "1"}, 1.0), ("\\x1b[2J raise", {"answer": "1"}, 0.0)]
"""


@pytest.mark.parametrize(
    "words",
    [
        ("tool", "test", "speak.py", "a=1"),
        ("tool", "test", "speak.py", "a=2"),
        ("reward", "test", "score.py"),
        ("recipe", "validate", "no\x1b[31msuch.yaml"),
        ("generate", "no\x1b]0;x\x07such", "--prompt", "x"),
        ("rl", "debug/rl", 'data.source="a\\x1b[2J\\rb.jsonl"'),
        ("recipe", "validate", "debug/rl", "tools=[{use: 'x\u202ey'}]"),
    ],
)
def test_commands_show_no_control_characters(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import typer.testing

    from posttrain.cli.app import app

    (tmp_path / "speak.py").write_text(TOOL, encoding="utf-8")
    (tmp_path / "score.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    done = typer.testing.CliRunner().invoke(app, list(words))
    beside = capfd.readouterr()
    for output in (done.stdout, done.stderr, beside.out, beside.err):
        assert raw(output) == [], output
    assert "\\u" in done.stdout + done.stderr


@pytest.mark.parametrize("text", ["\U0001f468‍\U0001f469‍\U0001f467", "می‌خواهم", "❤️", "日本語 é ﷽"])
def test_characters_for_scripts_and_emoji_are_kept(text: str) -> None:
    assert escape_control_characters(text) == text


def test_escapes_equal_json_escapes() -> None:
    text = "\x1b\u200b\U000e0041\ud800"
    assert escape_control_characters(text) == "\\u001b\\u200b\\udb40\\udc41\\ud800"
    assert json.loads(f'"{escape_control_characters(text)}"') == text
