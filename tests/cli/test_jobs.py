"""Job files for clusters: their contents, and a Slurm file that trains, with a script in place of srun."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

RL = {
    "stage": "rl",
    "model": {"path": "tiny", "device": "cpu"},
    "data": {"source": "sums.jsonl"},
    "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8},
    "rewards": [{"use": "letters.py:letters"}],
    "scoring": {"workers": 1},
    "optim": {"lr": 1e-4},
    "run": {"steps": 2, "save_every": 1},
}
REWARD = """import os
def letters(completion):
    with open(__file__ + ".ranks", "a") as file:
        print(os.environ.get("RANK"), os.environ.get("WORLD_SIZE"), file=file)
    return sum(map(str.islower, completion)) / 8
"""
SRUN = f"""#!{sys.executable}
# Starts --ntasks copies of the command on this machine, each as a node of its own, and hands signals on.
import os, signal, subprocess, sys
words = sys.argv[1:]
options = {{}}
while words[0].startswith("--"):
    key, value = words.pop(0).split("=", 1)
    options[key] = value
with open(os.environ["ASKED"], "a") as file:
    print(*sys.argv[1:], file=file)
ids = range(int(options["--ntasks"]))
tasks = [subprocess.Popen(words, env=dict(os.environ, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))) for n in ids]
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [[ $1 == requeue ]]; then echo "$2" >> "$ASKED.requeued"; else tr , '\\n' <<< "$3"; fi
"""


@pytest.fixture(autouse=True)
def recipe(folder: Path) -> None:
    (folder / "sums.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    (folder / "letters.py").write_text(REWARD)
    (folder / "rl.yaml").write_text(json.dumps(RL))


def test_slurm_file_has_the_command_and_the_counts(call: Any, folder: Path) -> None:
    done = call("rl", "rl.yaml", "optim.lr=1e-5", "--slurm", "nodes=4,gpus=8,time=1:00:00,partition=gpu")
    assert done.exit_code == 0, done.output
    file = folder / "runs" / "rl.sbatch"
    assert "sbatch runs/rl.sbatch" in done.stderr and os.access(file, os.X_OK)
    text = file.read_text()
    for line in ("--nodes=4", "--gpus-per-node=8", "--time=1:00:00", "--partition=gpu", "--signal=B:USR1@600"):
        assert f"#SBATCH {line}\n" in text
    assert "-m posttrain rl rl.yaml optim.lr=1e-5 --output runs/rl --resume &\n" in text
    assert "--account" not in text and "vLLM" not in text
    assert not (folder / "runs" / "rl").exists(), "nothing is run"


@pytest.mark.parametrize("kind", ["slurm", "kubernetes", "skypilot"])
@pytest.mark.parametrize("servers", [0, 1])
def test_job_files_are_valid_shell_and_yaml(call: Any, folder: Path, kind: str, servers: int) -> None:
    """The shell reads the scripts, YAML the others; engines of two GPUs get two each."""
    count = f"nodes={2 + servers},gpus=4,servers={servers}"
    if servers:
        count = "nodes=3,gpus=2,servers=2"
    overrides = ["rollout.vllm.tensor_parallel=2"] if servers else []
    done = call("rl", "rl.yaml", *overrides, f"--{kind}", count)
    assert done.exit_code == 0, done.output
    (file,) = (folder / "runs").iterdir()
    scripts = [file.read_text()]
    if kind == "kubernetes":
        jobs = {job["name"]: job for job in yaml.safe_load(scripts[0])["spec"]["replicatedJobs"]}
        assert list(jobs) == ["train", *(["serve"] if servers else [])]
        pods = [job["template"]["spec"]["template"]["spec"] for job in jobs.values()]
        assert [pod["volumes"][0]["name"] for pod in pods] == ["work"] * len(pods)
        assert [job["template"]["spec"]["completions"] for job in jobs.values()] == [1, 2] if servers else [2]
        scripts = [pod["containers"][0]["args"][0] for pod in pods]
    if kind == "skypilot":
        task = yaml.safe_load(scripts[0])
        assert task["num_nodes"] == 2 + servers and task["resources"]["accelerators"] == f"H100:{2 if servers else 4}"
        scripts = [task["run"]]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert sum("posttrain serve" in script for script in scripts) == servers
    assert any('"rollout.vllm.server.urls=[$urls]"' in script for script in scripts) == bool(servers)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slurm", "nodes=2,gpu=8"], "`gpu=8` is not a setting"),
        (["--slurm", "nodes=2,gpus=8", "--skypilot", "nodes=1"], "exclude each other"),
        (["--slurm", "nodes=two"], "must be a whole number of at least 1"),
        (["--slurm", "nodes=2,servers=2"], "no node is left to train"),
        (["--slurm", "nodes=1,account=a;b"], "characters that cannot be written into the job file"),
        (["--submit"], "needs a job file to submit"),
    ],
)
def test_invalid_job_options_are_refused(call: Any, folder: Path, options: list[str], said: str) -> None:
    done = call("rl", "rl.yaml", *options)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())
    assert not (folder / "runs").exists()


def test_sft_has_no_servers(call: Any) -> None:
    done = call("sft", "r.yaml", "--slurm", "nodes=2,servers=1")
    assert done.exit_code == 2 and "`posttrain sft` generates nothing" in done.stderr


def test_submit_passes_the_file_to_sbatch(call: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("rl", "rl.yaml", "--slurm", "nodes=2", "--submit")
    assert done.exit_code == 1 and "`sbatch` is not on this machine; the job file is written" in done.stderr
    command(folder / "bin" / "sbatch", '#!/bin/bash\necho "Submitted batch job 7 $1"\n')
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    done = call("rl", "rl.yaml", "--slurm", "nodes=2", "--submit")
    assert done.exit_code == 0 and "Submitted batch job 7 runs/rl.sbatch" in done.stderr


def command(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """Environment of a job: two nodes, both this machine, and the commands of Slurm."""
    command(folder / "bin" / "srun", SRUN)
    command(folder / "bin" / "scontrol", SCONTROL)
    slurm = {"SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_JOB_ID": str(random.randrange(10**6))}
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "ASKED": str(folder / "asked")}
    return {**os.environ, **slurm, **path, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def job(call: Any, folder: Path) -> Iterator[Any]:
    """Start the file for two nodes with overrides; processes left by a failed test are ended."""
    started: list[subprocess.Popen[str]] = []

    def start(environment: dict[str, str], *overrides: str, job: str = "nodes=2,gpus=1") -> subprocess.Popen[str]:
        done = call("rl", "rl.yaml", *overrides, "--slurm", job)
        assert done.exit_code == 0, done.output
        script = ["bash", str(folder / "runs" / "rl.sbatch")]
        with (folder / "log").open("a") as log:
            started.append(subprocess.Popen(script, env=environment, stdout=log, stderr=log, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs" / "rl" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_job_file_trains_on_two_nodes(job: Any, environment: dict[str, str], folder: Path) -> None:
    """Two torchruns meet, each with one rank, and train the tiny model."""
    assert job(environment).wait(timeout=300) == 0, (folder / "log").read_text()
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert {"0 2", "1 2"} <= {*(folder / "letters.py.ranks").read_text().splitlines()}, "both have scored"
    assert (folder / "runs/rl/final/model.safetensors").exists()
    (asked,) = (folder / "asked").read_text().splitlines()
    assert shlex.split(asked)[:3] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_preempted_job_saves_and_is_requeued(
    job: Any, environment: dict[str, str], folder: Path, number: signal.Signals
) -> None:
    """Slurm signals only the batch shell; the run ends after its step, and a job with the same file resumes it."""
    first = job(environment, "run.steps=200", "run.save_every=200")
    deadline = time.monotonic() + 200
    while len(rows(folder)) < 2 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.2)
    os.kill(first.pid, number)
    assert first.wait(timeout=200) != 0
    reached = len(rows(folder))
    assert 2 <= reached < 200, (folder / "log").read_text()
    assert (folder / "asked.requeued").read_text().split() == [environment["SLURM_JOB_ID"]]
    assert (folder / f"runs/rl/checkpoints/step-{reached:08d}").is_dir()

    more = f"run.steps={reached + 1}"
    again = {**environment, "SLURM_JOB_ID": str(int(environment["SLURM_JOB_ID"]) + 1)}
    assert job(again, more, "run.save_every=200").wait(timeout=300) == 0, (folder / "log").read_text()
    assert [row["step"] for row in rows(folder)] == list(range(1, reached + 2))


@pytest.mark.slow
@pytest.mark.vllm
def test_one_node_generates_and_the_other_trains(job: Any, environment: dict[str, str], folder: Path) -> None:
    """vLLM on the last node, training on the first: weights reach the engine, and its end is the job's."""
    pytest.importorskip("vllm")
    (folder / "rl.yaml").write_text(json.dumps({**RL, "model": {"path": str(small_model(folder / "base"))}}))
    process = job(environment, "rollout.vllm.max_model_len=128", job="nodes=2,gpus=1,servers=1")
    assert process.wait(timeout=550) == 0, (folder / "log").read_text()
    assert [row["step"] for row in rows(folder)] == [1, 2]
    asked = (folder / "asked").read_text()
    assert "-m posttrain serve" in asked and "urls=[http://localhost:8100]" in asked
    assert "ready: a run connects with" in (folder / "log").read_text()


def small_model(folder: Path) -> Path:
    """A Llama with the tokenizer of `tiny`, and heads of a size that vLLM's kernel for CPUs has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.models import tiny

    tokenizer = tiny.build_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
