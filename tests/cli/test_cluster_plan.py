"""`posttrain plan` for a cluster: predictions for large models given only as configurations, and the page's tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.cli.plan import MEANING
from posttrain.train import cluster_plan, memory_plan
from posttrain.train.step_time import Rates

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "cluster.md"
RECIPE = str(ROOT / "docs" / "examples" / "cluster" / "large.yaml")
MODELS = {
    "Qwen2.5-32B": (["model.path=qwen2.5-32b"], [(48, "8x2"), (40, "12x2"), (40, "6x4"), (32, "8x4")]),
    "Qwen3-30B-A3B": (["model.path=qwen3-30b-a3b", "batch.micro_tokens=8192"], [(8, "8x1"), (8, "4x2"), (8, "2x4")]),
}


def read_plan(call: Any, *words: str) -> dict[str, Any]:
    done = call("plan", RECIPE, *words, "--gpu-gib", "80", "--json")
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


def row(name: str, gpus: int, servers: str, found: dict[str, Any]) -> str:
    """A line of the page's table."""
    cluster = found["cluster"]
    seconds = [f"{cluster['seconds'][part]:.0f}" for part in ("generate", "update", "network", "step")]
    memory = f"{found['peak_gib']:.1f}"
    cells = (
        name,
        str(gpus),
        servers,
        memory,
        *seconds,
        f"{cluster['tokens_a_second']:,}",
        f"{cluster['network_gib_a_rank']:,.0f}",
    )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", MODELS)
def test_tables_of_the_page_equal_the_predictions(call: Any, name: str) -> None:
    """64 and 16 GPUs, split in several ways between training and engines."""
    overrides, splits = MODELS[name]
    page = PAGE.read_text(encoding="utf-8")
    for gpus, servers in splits:
        engines, size = map(int, servers.split("x"))
        assert gpus + engines * size == (64 if name == "Qwen2.5-32B" else 16)
        found = read_plan(call, *overrides, "--gpus", str(gpus), "--servers", servers)
        assert found["fits"] and found["cluster"]["engine_holds_weights"]
        assert (line := row(name, gpus, servers, found)) in page, line


def test_assumptions_of_the_page_equal_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for key, value in cluster_plan.asdict(Rates(launch=cluster_plan.EAGER_LAUNCH)).items():
        assert (line := f"| `{key}` | {value:g} | {MEANING[key]} |") in page, line
    assert MEANING.keys() == cluster_plan.asdict(Rates()).keys()


def test_printed_cluster_plan(call: Any) -> None:
    done = call("plan", RECIPE, "--gpus", "48", "--servers", "8x2", "--gpu-gib", "80")
    assert done.exit_code == 0, done.stderr
    text = done.stdout
    for part in (
        "32763.9M parameters",
        "tokens of a prompt (no tokenizer: assumed)",
        "weights (float32)",
        "on 48 training GPUs, 8 engines of 2 GPUs",
        "<- the longest part",
        "above 128 GPUs, doubling their number is less than 1.3 times as fast",
        "--gpus 40 --servers 12x2",
        "share of `flops` that an update reaches",
    ):
        assert part in text, part


def test_rates_can_be_given(call: Any) -> None:
    """Engines of 2,048 / 8 rows of 4,096 tokens, at 10,000 tokens/s: 104.9 s; twice the FLOP/s halve the update."""
    words = ("--gpus", "48", "--servers", "8x2")
    before = read_plan(call, *words)["cluster"]["seconds"]
    after = read_plan(
        call, *words, "--assume", "engine_tokens=10000", "--assume", "flops=1978e12", "--assume", "launch=0"
    )
    assert after["cluster"]["seconds"]["generate"] == pytest.approx(104.86, abs=0.01)
    assert after["cluster"]["seconds"]["update"] == pytest.approx(before["update"] / 2, rel=0.05)
    assert read_plan(call, *words, "--card", "h200")["cluster"]["assumed"]["memory"] == 4.8e12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--assume", "speed=3"], "not KEY=NUMBER"),
        (["--assume", "used=fast"], "not KEY=NUMBER"),
        (["--card", "h1000"], "not known"),
        (["--servers", "8*2"], "not servers x GPUs of each"),
    ],
)
def test_unparsable_options_are_refused(call: Any, words: list[str], said: str) -> None:
    done = call("plan", RECIPE, *words)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())


def test_sft_plan_has_no_engines(call: Any, folder: Path) -> None:
    (folder / "sft.yaml").write_text(
        f"stage: sft\nmodel: {{path: {Path(RECIPE).parent / 'qwen2.5-32b'}, shard: true}}\ndata: {{source: rows.jsonl, "
        "max_length: 4096}\nbatch: {size: 64, micro_size: 1}\nrun: {steps: 1}\n"
    )
    found = json.loads(call("plan", "sft.yaml", "--gpus", "64", "--card", "h100", "--json").stdout)["cluster"]
    assert set(found["seconds"]) == {"update", "network", "step"} and found["network_gib_to_engines"] == 0
    done = call("plan", "sft.yaml", "--servers", "8")
    assert done.exit_code == 2 and "generates nothing" in done.stderr


def test_plan_of_a_mixture_of_experts_counts_active_parameters() -> None:
    """30.5B parameters, of which a token's eight of 128 experts leave 3.3B; outside of the layers' matrices stand
    embeddings, head, routers and norms."""
    from posttrain.recipe.load import load

    recipe: Any = load(RECIPE, ["model.path=qwen3-30b-a3b"]).recipe
    shape = memory_plan.shape_of(memory_plan.skeleton(recipe), None)
    assert shape.parameters == 30_532_122_624 and shape.active == pytest.approx(3.35e9, rel=0.01)
    assert shape.experts == 48 * 128 * 3 * 2048 * 768
    assert shape.parameters - shape.linear < 2 * 151_936 * 2048 + 48 * 128 * 2048 + 10**6
    assert shape.intermediate == 8 * 768 + 8 * 1024
