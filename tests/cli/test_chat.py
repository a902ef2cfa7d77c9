"""`posttrain chat`: piped lines, commands, folded thoughts, Ctrl-C, escapes, tools by name or recipe."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.cli.chat import Chat, read_tool_sections
from posttrain.cli.thought_folding import ThoughtSplitter
from posttrain.data.rows import load_rows
from posttrain.errors import UserError
from posttrain.evaluate.conversation import Answer
from posttrain.recipe.sections import Data


class Talk:
    """A conversation that answers with given text chunks."""

    name = "model"
    opens_thought = False

    def __init__(self, *answers: list[Any]) -> None:
        import threading

        self.answers, self.stop, self.asked = list(answers), threading.Event(), list[str]()
        self.messages: list[Any] = []
        self.images: list[str] = []
        self.pending: list[str] = []

    def ask(self, text: str) -> Any:
        self.asked.append(text)
        self.stop.clear()
        for piece in self.answers.pop(0):
            yield piece() if callable(piece) else piece

    def reset(self) -> None:
        self.messages = []

    def set_system(self, text: str) -> None:
        self.messages = [{"role": "system", "content": text}]

    def prompt(self) -> str:
        return "<bos>"


def end(text: str = "", finish: str = "stop") -> Answer:
    return Answer(text, 1, finish)


def type_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_thoughts_are_split_off_at_any_chunk_boundary() -> None:
    text = "a<think>b<c</think>d<e"
    for size in range(1, len(text)):
        divided = ThoughtSplitter()
        parts = [p for i in range(0, len(text), size) for p in divided.add(text[i : i + size])] + list(divided.end())
        joined = {kind: "".join(t for k, t in parts if k == kind) for kind in ("answer", "thought")}
        assert joined == {"answer": "ad<e", "thought": "b<c"}
    assert list(ThoughtSplitter(inside=True).add("x</think>y")) == [("thought", "x"), ("answer", "y")]


def test_thoughts_are_folded_and_shown_on_request(monkeypatch, capsys) -> None:
    talk: Any = Talk(["<think>why", " not</think>", "42", end()], ["<think>so</think>1", end()])
    type_lines(monkeypatch, "q", "/think", "/think on", "again")
    Chat([talk]).run()
    out, err = capsys.readouterr()
    assert out == "[thinking ...] 42\n[thought] so\n1\n" and "why not" in err


def test_escape_sequences_of_the_model_are_printed_as_text(monkeypatch, capsys) -> None:
    talk: Any = Talk(["\x1b]0;pwned\x07\x1b[2J", end()])
    type_lines(monkeypatch, "q")
    Chat([talk]).run()
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\u001b]0;pwned\\u0007\\u001b[2J" in out


def test_ctrl_c_stops_only_the_answer(monkeypatch, capsys) -> None:
    before = signal.getsignal(signal.SIGINT)
    first: Any = Talk()

    def interrupt() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "beg"

    def rest() -> Any:
        return end("beg", "interrupted" if first.stop.is_set() else "stop")

    first.answers = [[interrupt, rest], ["fine", end()]]
    second: Any = Talk(["fine too", end()])
    type_lines(monkeypatch, "long", "short", "/exit", "never")
    Chat([first, second]).run()
    out, err = capsys.readouterr()
    assert first.asked == ["long", "short"] and second.asked == ["short"]
    assert "beg\n" in out and "fine\n[model]\nfine too\n" in out and "stopped" in err
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_commands(monkeypatch, capsys, tmp_path: Path) -> None:
    talk: Any = Talk(["1", end()])
    file = tmp_path / "talk.jsonl"
    lines = ("/help", "/nothing", "/prompt", "/system be good", f"/save {file}", "/save /no/such/place", "/save")
    type_lines(monkeypatch, *lines, " /etc/passwd is a file", "a\\", "b")
    talk.answers = [["1", end()], ["2", end(finish="length")]]
    Chat([talk]).run()
    err = capsys.readouterr().err
    assert all(text in err for text in ("/reset", "no command /nothing", "<bos>", "cannot be written", "needs a file"))
    assert json.loads(file.read_text()) == {"messages": [{"role": "system", "content": "be good"}], "model": "model"}
    assert talk.asked == [" /etc/passwd is a file", "a\nb"] and "cut after 1 token" in err


def test_tools_by_name_or_from_a_recipe() -> None:
    assert read_tool_sections("calculator, python")[0]["tools"] == [{"use": "calculator"}, {"use": "python"}]
    offered, folder = read_tool_sections("debug/tools")
    assert offered["tools"] and folder.name == "debug"
    with pytest.raises(UserError, match="has no `tools`"):
        read_tool_sections("debug/rl")


@pytest.mark.usefixtures("folder")
def test_image_is_sent_with_the_next_message() -> None:
    """The saved conversation is a row that sft trains on."""
    Pillow.new("RGB", (40, 24), "red").save("red one.png")
    typed = "/image red one.png\nwhat?\nand?\n/image red one.png\n/image\nnone?\n/save talk.jsonl\n/image none.png\n"
    arguments = ["chat", "tiny-vision", "--max-new-tokens", "4"]
    found = CliRunner().invoke(app, arguments, input=typed, prog_name="posttrain")
    assert found.exit_code == 0, found.stderr
    for text in ("red one.png is attached to the next message", "is not there", "the next message has no image"):
        assert text in found.stderr
    (row,) = load_rows(Data(source="talk.jsonl"), Path.cwd())
    assert [m["content"] for m in row["messages"][::2]] == ["<image>what?", "and?", "none?"]
    assert row["images"] == [str(Path("red one.png").resolve())]


@pytest.mark.usefixtures("folder")
def test_piped_lines_are_answered_by_two_models_side_by_side() -> None:
    arguments = ["chat", "tiny", "--against", "tiny", "--system", "s", "--max-new-tokens", "8", "--temperature", "0"]
    found = CliRunner().invoke(app, arguments, input="1+1=?\n/save talk.jsonl\n/exit\n", prog_name="posttrain")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.count("[tiny]\n") == 2
    one, other = map(json.loads, Path("talk.jsonl").read_text().splitlines())
    assert one == other and [m["role"] for m in one["messages"]] == ["system", "user", "assistant"]
    assert "tiny: greedy, at most 8 tokens per turn; chat template: '<bos><|user|>...<|assistant|>'" in found.stderr


def test_run_directory_of_a_model_with_a_short_window(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.models import tiny

    tokenizer = tiny.build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=64, eos_token_id=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "run" / "final")
    tokenizer.save_pretrained(tmp_path / "run" / "final")
    (tmp_path / "run" / "resolved.json").write_text('{"stage": "sft"}')
    found = CliRunner().invoke(app, ["chat", str(tmp_path / "run")], input="1+1=?\n", prog_name="posttrain")
    assert found.exit_code == 0, found.stderr
    assert "run/final: temperature 0.7, at most 32 tokens per turn" in found.stderr
    (tmp_path / "run" / "final").rename(tmp_path / "elsewhere")
    gone = CliRunner().invoke(app, ["chat", str(tmp_path / "run")], input="", prog_name="posttrain")
    assert gone.exit_code == 2 and "has no trained model" in gone.stderr


def test_errors_are_reported_before_a_model_is_loaded() -> None:
    for arguments, what in (
        (["chat", "no/such/folder/here"], "no/such/folder/here"),
        (["chat", "tiny", "--tools", "calculater"], "calculator"),
        (["chat", "tiny", "sampling.top_q=1"], "top_p"),
    ):
        found = CliRunner().invoke(app, arguments, input="", prog_name="posttrain")
        assert found.exit_code == 2 and what in found.stderr and "loading" not in found.stderr
