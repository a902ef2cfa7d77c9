"""Job files that start a run on a cluster: for Slurm, for Kubernetes (JobSet), for SkyPilot.

They are written from templates, to be read and changed. A job runs torchrun with the command that the user typed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from posttrain.cli.guard import say
from posttrain.errors import RunError, UserError, did_you_mean

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded


class Kind(NamedTuple):
    """One kind of job file: its template, file suffix, submit command, and further settings of its cluster with
    defaults.
    """

    template: str
    suffix: str
    submit: tuple[str, ...]
    settings: Mapping[str, str]  # name -> default


KINDS = {
    "slurm": Kind("slurm.sbatch.j2", ".sbatch", ("sbatch",), {"time": "24:00:00", "partition": "", "account": ""}),
    "kubernetes": Kind(
        "jobset.yaml.j2", ".jobset.yaml", ("kubectl", "apply", "-f"), {"image": "posttrain:cuda", "claim": "posttrain"}
    ),
    "skypilot": Kind("skypilot.yaml.j2", ".sky.yaml", ("sky", "jobs", "launch"), {"accelerator": "H100"}),
}
COUNTS = {"nodes": 1, "gpus": 8, "servers": 0}
SETTING_VALUE = re.compile(r"[\w.:/@-]*")  # value of a setting: no characters special to a shell or YAML

_ABOUT = "Write a job file that starts this run {}, e.g. nodes=8,gpus=8,servers=2; {}."
Slurm = Annotated[
    str | None,
    typer.Option("--slurm", metavar="nodes=N,...", help=_ABOUT.format("with Slurm", "also: time, partition, account")),
]
Kubernetes = Annotated[
    str | None,
    typer.Option(
        "--kubernetes",
        metavar="nodes=N,...",
        help=_ABOUT.format("on Kubernetes (JobSet)", "also: image, claim"),
    ),
]
Skypilot = Annotated[
    str | None,
    typer.Option("--skypilot", metavar="nodes=N,...", help=_ABOUT.format("with SkyPilot", "also: accelerator")),
]
Submit = Annotated[bool, typer.Option("--submit", help="Also submit the job file to the cluster.")]


@dataclass(frozen=True)
class Job:
    """A run on a cluster. `servers` of the `nodes` generate with vLLM; the others train, with a rank on each GPU."""

    kind: str
    nodes: int
    gpus: int
    servers: int
    more: Mapping[str, str]


def choose_job(slurm: str | None, kubernetes: str | None, skypilot: str | None, *, submit: bool) -> Job | None:
    """Return the job that the options ask for, or None. Raises UserError for more than one kind."""
    given = {kind: text for kind, text in zip(KINDS, (slurm, kubernetes, skypilot), strict=True) if text is not None}
    if len(given) > 1:
        raise UserError(f"--{' and --'.join(given)} exclude each other", hint="write one file after the other")
    if submit and not given:
        raise UserError("--submit needs a job file to submit", hint="add --slurm nodes=2,gpus=8")
    return read_job(*next(iter(given.items()))) if given else None


def read_job(kind: str, text: str) -> Job:
    """Parse `nodes=8,gpus=8,servers=2`. Raises UserError for an unknown setting or a wrong value."""
    settings: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        known = [*COUNTS, *KINDS[kind].settings]
        if key not in known or not equals:
            raise UserError(
                f"--{kind} {text}: `{part}` is not a setting",
                allowed=f"KEY=VALUE separated by commas; keys: {', '.join(known)}",
                hint=did_you_mean(key, known),
            )
        if not SETTING_VALUE.fullmatch(value):
            raise UserError(
                f"--{kind}: {key}={value} has characters that cannot be written into the job file",
                allowed="letters, digits and _ . : / @ -",
            )
        settings[key] = value
    counts = {key: _parse_count(kind, key, settings.pop(key, str(default))) for key, default in COUNTS.items()}
    if counts["servers"] >= counts["nodes"]:
        raise UserError(
            f"--{kind}: {counts['servers']} of {counts['nodes']} nodes generate, and no node is left to train",
            hint="`nodes` counts all nodes, including those of `servers`",
        )
    return Job(kind, **counts, more={**KINDS[kind].settings, **settings})


def _parse_count(kind: str, key: str, value: str) -> int:
    least = COUNTS[key] if key == "servers" else 1
    if not value.isdecimal() or int(value) < least:
        raise UserError(f"--{kind}: {key}={value} must be a whole number of at least {least}")
    return int(value)


def server_overrides(job: Job, verb: str) -> list[str]:
    """Return the overrides that the job file adds to the recipe, with a placeholder for hosts that are known when it
    runs.

    Raises UserError if the verb generates nothing.
    """
    if job.servers and verb != "rl":
        raise UserError(
            f"--{job.kind}: servers={job.servers}, but `posttrain {verb}` generates nothing", hint="leave servers out"
        )
    return ["rollout.engine=vllm", "rollout.vllm.server.urls=[http://node:8100]"] if job.servers else []


def gpus_per_engine(job: Job, loaded: Loaded) -> int:
    """Return the number of GPUs of one engine, 1 without servers. Raises UserError if it does not divide the GPUs of a
    node.
    """
    if not job.servers:
        return 1
    recipe: Any = loaded.recipe
    size = int(recipe.rollout.vllm.tensor_parallel)
    if job.gpus % size:
        raise UserError(
            f"--{job.kind}: a node of {job.gpus} GPUs cannot be divided into engines of {size} "
            "(rollout.vllm.tensor_parallel)"
        )
    return size


def write_job(
    job: Job, loaded: Loaded, recipe: str, overrides: list[str], output: Path | None, *, allow_changed: bool = False
) -> Path:
    """Write the job file beside the run directory (`--output`, the recipe's, or `runs/NAME`); return its path."""
    import jinja2

    size = gpus_per_engine(job, loaded)
    wanted = output or (Path(loaded.recipe.run.output) if loaded.recipe.run.output else Path("runs") / loaded.name)
    file = wanted.with_name(wanted.name + KINDS[job.kind].suffix)
    verb = loaded.recipe.verb
    flags = ["--output", str(wanted), "--resume", *(["--allow-changed"] if allow_changed else [])]
    settings = ",".join(f"{key}={getattr(job, key)}" for key in COUNTS)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("posttrain.cli", "job_templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    text = environment.get_template(KINDS[job.kind].template).render(
        typed=shlex.join(["posttrain", verb, recipe, *overrides, f"--{job.kind}", settings]).replace("\n", " "),
        file=file,
        name=_kubernetes_name(wanted.name),
        log=f"{wanted}.%j.log",
        python=shlex.quote(sys.executable),
        train=shlex.join([verb, recipe, *overrides, *flags]),
        serve=shlex.join([recipe, *overrides]),
        nodes=job.nodes,
        gpus=job.gpus,
        servers=job.servers,
        tensor_parallel=size,
        engines_a_node=job.gpus // size,
        **job.more,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    if job.kind == "slurm":
        file.chmod(0o755)
    return file


def _kubernetes_name(name: str) -> str:
    """Return a name valid in Kubernetes: lower-case letters, digits and dashes, at most 40 characters."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "run"


def submit_job(job: Job, file: Path, *, submit: bool) -> None:
    """Submit the job file, or print the command that does. Raises RunError if the cluster's command is missing or
    fails.
    """
    words = [*KINDS[job.kind].submit, str(file)]
    if not submit:
        say(f"written: {file}\nto start it: {shlex.join(words)}")
        return
    if shutil.which(words[0]) is None:
        raise RunError(
            f"`{words[0]}` is not on this machine; the job file is written",
            hint=f"run on a machine that has it: {shlex.join(words)}",
        )
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"{shlex.join(words)} failed with exit code {done.returncode}: {(done.stderr or done.stdout).strip()}"
        )
    say(done.stdout.strip())
