"""YAML reader: types of scalars, positions, and refused syntax."""

from __future__ import annotations

import pytest
import yaml

from posttrain.errors import RecipeError
from posttrain.path_resolution import shipped_folder
from posttrain.recipe import presets
from posttrain.recipe import yaml as reader
from posttrain.recipe.tree import Origin, follow, plain
from posttrain.recipe.yaml import parse, parse_value, scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("1.0", 1.0),
        ("7", 7),
        ("-7", -7),
        ("10_000", 10000),
        ("0x1f", 31),
        ("0o17", 15),
        ("007", "007"),
        ("1:30", "1:30"),
        ("1.2.3", "1.2.3"),
        ("2026-01-02", "2026-01-02"),
        ("e5", "e5"),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("-.inf", float("-inf")),
    ],
)
def test_scalar_types(text: str, value: object) -> None:
    """Numbers in common notations; YAML 1.1's pitfalls (octal 007, 1:30 = 90, no = false) are text."""
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


def test_quoted_scalars_are_text() -> None:
    tree = parse("a: '1e-6'\nb: \"true\"\nc: !!str 5\nd: |\n  1\n", "x").tree
    assert plain(tree) == {"a": "1e-6", "b": "true", "c": "5", "d": "1\n"}


def test_positions_of_keys_and_values() -> None:
    tree = parse("a:\n  b: [1, 2]\n  cc:   x\n", "x.yaml").tree
    entry, _ = follow(tree, ("a", "b", 1))
    value, _ = follow(tree, ("a", "cc"))
    assert entry.origin.where == "x.yaml:2:10"
    assert (value.at_key.where, value.origin.where) == ("x.yaml:3:3", "x.yaml:3:9")
    assert str(value.origin) == "x.yaml:3"


def test_aliases_and_merge_key_precedence() -> None:
    """`<<` has lower precedence than the keys beside it, and the first of several mappings has the highest."""
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: *a\nd: {<<: *a, y: 9}\ne:\n  <<: [*a, *b]\n"
    values = plain(parse(text, "x").tree)
    assert values["c"] == {"x": 1, "y": 2}
    assert values["d"] == {"x": 1, "y": 9}
    assert values["e"] == {"x": 1, "y": 2, "z": 4}


def test_environment_variables_are_substituted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole scalar is typed after substitution, unless it is quoted; `$${` is a literal `${`.

    Double quotes around nothing but a variable do not make it a text: inside braces it could be no number otherwise.
    """
    monkeypatch.setenv("STEPS", "12")
    monkeypatch.delenv("NOPE", raising=False)
    text = (
        "a: ${STEPS}\nb: '${STEPS}'\nc: x/${STEPS}/y\nd: ${NOPE:-1e-3}\ne: ${NOPE:-}\nf: $${STEPS}\ng: ${NOPE:-a:b}\n"
    )
    text += 'h: {i: "${STEPS}", j: "${NOPE:-1e-3}", k: "${STEPS} steps", l: "$${STEPS}"}\n'
    document = parse(text, "x")
    assert plain(document.tree) == {
        "h": {"i": 12, "j": 1e-3, "k": "12 steps", "l": "${STEPS}"},
        "a": 12, "b": "12", "c": "x/12/y", "d": 1e-3, "e": "", "f": "${STEPS}", "g": "a:b",
    }  # fmt: skip
    assert not document.problems


def test_all_syntax_errors_are_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    text = "a: 1\nb:\na: 2\nc: ${NOPE}\nd:\n  -\n  - !odd 1\ne: &x [*x]\n"
    told = [str(problem) for problem in parse(text, "x.yaml").problems]
    assert told == [
        "x.yaml:2:1  `b` has no value\n"
        "  hint: write the value, `b: {}` for a section with its defaults, `b: null` for none, or remove the line",
        "x.yaml:3:1  `a` is given twice; first at x.yaml:1:1",
        "x.yaml:4:4  the environment variable NOPE is not set\n"
        "  hint: set it, write a default `${NOPE:-value}`, or `$${NOPE}` for this text itself",
        "x.yaml:6:4  a list entry without a value\n  hint: remove the `-` or write null",
        "x.yaml:7:5  the tag !odd is not used in recipes\n  hint: remove it",
        "x.yaml:8:4  an alias inside its own anchor",
    ]


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("a: 1\nb:\n\tc: 1\n", "x.yaml:3:1", "a tab; YAML is indented with spaces"),
        ("a:\n  b: 1\n c: 2\n", "x.yaml:3:2", "the indentation does not fit"),
        ("a: b: c\n", "x.yaml:1:5", "a `:` that is not allowed here"),
        ("a: [1, 2\n", "x.yaml:2:1", "a bracket is opened and not closed"),
        ("a: 'x\n", "x.yaml:2:1", "opened and not closed"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:1", "a recipe is one document"),
        ("a: *b\n", "x.yaml:1:4", "an alias (`*name`) without its anchor"),
        ("a: {b: ${C}}\n", "x.yaml:1:", 'write "${NAME}", in double quotes'),
        ("a: 1\nb: \x07\n", "x.yaml:2:1", "special characters"),
        ("- 1\n", "x.yaml:1:1", "a recipe is a mapping"),
    ],
)
def test_invalid_yaml_raises_with_its_position(text: str, where: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text, "x.yaml")
    assert str(caught.value).startswith(where)
    assert words in str(caught.value)


def test_empty_file_is_an_empty_mapping() -> None:
    assert plain(parse("# nothing yet\n", "x").tree) == {}


def test_command_line_values_are_typed() -> None:
    origin = Origin("command line", "a=1")
    assert plain(parse_value("{a: 1e-3, b: [x, null]}", origin)) == {"a": 1e-3, "b": ["x", None]}
    with pytest.raises(RecipeError, match=r"^command line  not readable as YAML"):
        parse_value("[1,", origin)


def test_both_parsers_read_the_same_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """libyaml, and PyYAML's own parser: values and positions of all presets and shipped recipes are equal."""
    found = [*presets.FOLDER.glob("*.yaml"), *shipped_folder("recipes").rglob("*.yaml")]
    assert len(found) > 200
    fast = [reader.read(path) for path in found]
    monkeypatch.setattr(reader, "_compose", lambda text: yaml.compose(text, Loader=reader._Loader))
    assert fast == [reader.read(path) for path in found]


@pytest.mark.parametrize("text", ["{a: b?}", "a\t: 1\n", "{a: c? d}"])
def test_text_that_libyaml_accepts_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match="not readable as YAML"):
        parse(text, "x.yaml")
