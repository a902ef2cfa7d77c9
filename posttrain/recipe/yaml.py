"""YAML parser that records file, line and column of every key and value.

Differences from PyYAML, each of which has ruined a run: `1e-6` is a number; only `true` and `false` are booleans (`no`,
`on`, `yes`, `off` are text); a key that is repeated or has no value is refused; `${NAME}` and `${NAME:-default}` are
read from the environment (`$${` stands for a literal `${`).

ruamel.yaml records positions too, but only for documents that it loads completely: it stops at the first repeated key,
takes 2.5 times as long, and all of the type conversion below would still be needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from yaml.composer import Composer

from posttrain.errors import Problem, RecipeError
from posttrain.path_resolution import check_not_special
from posttrain.recipe.limits import MAX_DIGITS
from posttrain.recipe.tree import Node, Origin, Scalar

MAX_BYTES = 100_000  # of a recipe file
MAX_VALUES = 10_000
MAX_DEPTH = 50
_NULL = {"~", "null", "Null", "NULL"}
_BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)$")
_OTHER_BASE = re.compile(r"0(x[0-9a-fA-F]+|o[0-7]+)$")
_FLOAT = re.compile(r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$")
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$")
_VARIABLE = re.compile(r"(\$?)\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_STANDARD = "tag:yaml.org,2002:"
_TAGS = {f"{_STANDARD}{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq", "merge")}


class _Loader(yaml.SafeLoader):
    """SafeLoader that resolves only the merge key `<<`; scalars are converted below."""

    yaml_implicit_resolvers = {"<": [(f"{_STANDARD}merge", re.compile(r"<<$"))]}  # noqa: RUF012 (PyYAML's own shape)


if yaml.__with_libyaml__:

    class _FastLoader(Composer, yaml.CSafeLoader):
        """_Loader with the parser of libyaml, which takes a tenth of the time. The composer is PyYAML's: that of
        libyaml has no limit on its recursion."""

        yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

        def __init__(self, text: str) -> None:
            yaml.CSafeLoader.__init__(self, text)
            Composer.__init__(self)


def _compose(text: str) -> yaml.Node | None:
    """Compose the nodes of a text. PyYAML's parser reads what libyaml may accept in its stead (tabs, `?` and marks of
    byte order), and reads again what libyaml refuses, for its error."""
    if yaml.__with_libyaml__ and not re.search("[\t?\ufeff]", text):
        with contextlib.suppress(yaml.YAMLError):
            return _FastLoader(text).get_single_node()
    return yaml.compose(text, Loader=_Loader)


def display_path(path: Path) -> str:
    """Return a path for messages: relative if it is below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass
class Document:
    """A YAML text as a tree, with its problems. `bad`: locations that need no second problem; `notes`: valid settings
    with an outdated name."""

    text: str
    tree: Node
    problems: list[Problem]
    bad: set[str]
    notes: list[Problem] = field(default_factory=list)


def not_utf8_error(cause: UnicodeDecodeError, path: Path) -> RecipeError:
    """Return the error that names the line of the first invalid byte of a file and the command that converts it."""
    content, start = cause.object, cause.start
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        what, place, hint, encoding = "it begins like UTF-16", "", "", "UTF-16"
    else:
        what, place = f"byte 0x{content[start]:02x}", f":{len(content[: start + 1].splitlines())}"
        hint, encoding = "if it is Latin-1: ", "LATIN1"
    hint += f"iconv -f {encoding} -t UTF-8 {shlex.quote(path.name)} > {shlex.quote(f'utf8-{path.name}')}"
    return RecipeError(f"not UTF-8: {what}", where=f"{display_path(path)}{place}", hint=hint)


def read(path: Path) -> Document:
    """Read a YAML file. Raises RecipeError with the line if it cannot be parsed; other faults are in `problems`."""
    name = display_path(path)
    try:
        check_not_special(path, "recipe", RecipeError)
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8_error(error, path) from None
    except OSError as error:
        raise RecipeError(f"the file cannot be read: {error.strerror}", where=name) from None
    if len(content) > MAX_BYTES:
        raise RecipeError(f"the file has more than {MAX_BYTES:,} bytes, too many for a recipe", where=name)
    return parse(text, name)


def parse(text: str, name: str) -> Document:
    """Parse a YAML text; `name` stands for the file in origins. An empty text is an empty mapping."""
    return _Builder(text, name).document()


def parse_value(text: str, origin: Origin) -> Node:
    """Parse a single value in flow style, given outside a file. Raises RecipeError if it is not YAML."""
    builder = _Builder(text, "", origin)
    root = builder.compose()
    node = builder.node(root) if root is not None else Node(None, origin)
    if builder.problems:
        raise RecipeError.of(builder.problems)
    return node


def scalar(text: str) -> Scalar:
    """Convert an unquoted YAML scalar to a Python value."""
    if text in _NULL:
        return None
    if text in _BOOLEAN:
        return _BOOLEAN[text]
    if len(text) > MAX_DIGITS:
        return text  # too long to be a usable number; _Builder reports it
    if _INTEGER.match(text):
        return int(text)
    if _OTHER_BASE.match(text):
        return int(text, 0)
    if _FLOAT.match(text):
        return float(text)
    if special := _SPECIAL.match(text):
        return float(f"{special[1] or ''}inf") if special[2] else float("nan")
    return text


class _Builder:
    """Converts PyYAML's nodes to Node and collects all problems of the text."""

    def __init__(self, text: str, name: str, fixed: Origin | None = None) -> None:
        self.text, self.name, self.fixed = text, name, fixed
        self.problems: list[Problem] = []
        self.bad: set[str] = set()
        self.open: set[int] = set()  # ids of the nodes being built, to detect an alias inside its own anchor
        self.built: dict[int, Node] = {}
        self.sizes: dict[int, int] = {}  # number of values in each built node; values of aliases count every time

    def compose(self) -> yaml.Node | None:
        where = self.fixed.mark if self.fixed else self.name
        try:
            return _compose(self.text)
        except yaml.YAMLError as error:
            raise _syntax_error(error, self.text, where, self.fixed) from None
        except RecursionError:
            raise RecipeError(f"nested more than {MAX_DEPTH} deep", where=where) from None

    def document(self) -> Document:
        root = self.compose()
        tree = Node({}, Origin("file", f"{self.name}:1:1")) if root is None else self.node(root)
        if not isinstance(tree.value, dict):
            raise RecipeError("a recipe is a mapping of `key: value` lines", where=tree.origin.where)
        return Document(self.text, tree, self.problems, self.bad)

    def problem(self, node: yaml.Node, what: str, allowed: str = "", hint: str = "") -> None:
        self.problems.append(Problem(self.origin(node).mark, what, allowed, hint))
        self.bad.add(self.origin(node).mark)

    def origin(self, node: yaml.Node) -> Origin:
        if self.fixed:
            return self.fixed
        mark = node.start_mark
        return Origin("file", f"{self.name}:{mark.line + 1}:{mark.column + 1}")

    def node(self, node: yaml.Node) -> Node:
        """Convert a node and everything below it; limits depth and number of values."""
        if id(node) in self.built:
            return self.built[id(node)]
        if id(node) in self.open:
            self.problem(node, "an alias inside its own anchor")
            return Node(None, self.origin(node))
        if node.tag not in _TAGS:
            self.problem(node, f"the tag {node.tag} is not used in recipes", hint="remove it")
        self.open.add(id(node))
        if len(self.open) > MAX_DEPTH:
            raise RecipeError(f"nested more than {MAX_DEPTH} deep", where=self.origin(node).mark)
        if isinstance(node, yaml.MappingNode):
            built = Node(self.mapping(node), self.origin(node))
        elif isinstance(node, yaml.SequenceNode):
            built = Node([self.entry(item) for item in node.value], self.origin(node))
        else:
            built = self.scalar(node)
        self.open.discard(id(node))
        self.built[id(node)] = built
        self.sizes[id(node)] = size = 1 + sum(self.sizes.get(id(inner), 0) for inner in _inside(node))
        if size > MAX_VALUES:
            what = f"more than {MAX_VALUES:,} values, counting those of aliases every time"
            raise RecipeError(what, where=self.origin(node).mark, hint="a recipe is a page of text")
        return built

    def entry(self, node: yaml.Node) -> Node:
        if _is_empty(node):
            self.problem(node, "a list entry without a value", hint="remove the `-` or write null")
        return self.node(node)

    def mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        """Convert a mapping: merge keys are expanded, repeated and empty keys are problems."""
        entries: dict[str, Node] = {}
        inherited: dict[str, Node] = {}
        for key, value in node.value:
            if key.tag == f"{_STANDARD}merge":
                for source in self.merged_mappings(value):
                    inherited = {**source, **inherited}
                continue
            if not isinstance(key, yaml.ScalarNode) or not key.value:
                self.problem(key, "a key must be one word")
                continue
            if key.value in entries:
                self.problem(key, f"`{key.value}` is given twice; first at {entries[key.value].at_key.mark}")
                continue
            if _is_empty(value):
                section = f"`{key.value}: {{}}` for a section with its defaults"
                hint = f"write the value, {section}, `{key.value}: null` for none, or remove the line"
                if joined := re.fullmatch(r"([\w.]+):([^\s:]+)", key.value):
                    hint = f"a space is missing after the colon: `{joined[1]}: {joined[2]}`"
                self.problem(key, f"`{key.value}` has no value", hint=hint)
                self.bad.add(self.origin(value).mark)
            below = self.node(value)
            entries[key.value] = Node(below.value, below.origin, self.origin(key), below.quoted)
        return {**inherited, **entries}

    def merged_mappings(self, value: yaml.Node) -> list[dict[str, Node]]:
        """Return the mappings of `<<`, in order of precedence."""
        sources = [self.node(item) for item in (value.value if isinstance(value, yaml.SequenceNode) else [value])]
        if not all(isinstance(source.value, dict) for source in sources):
            self.problem(value, "`<<` needs a mapping or a list of mappings", hint="such as `<<: *anchor`")
        return [source.mapping for source in sources]

    def scalar(self, node: yaml.Node) -> Node:
        """Convert a scalar, with environment variables substituted."""
        assert isinstance(node, yaml.ScalarNode)
        quoted = bool(node.style) or (node.tag == f"{_STANDARD}str" and not self.is_untagged(node))
        text = self.substitute_variables(node)
        if (
            not quoted
            and len(text) > MAX_DIGITS
            and (_INTEGER.match(text) or _FLOAT.match(text) or _OTHER_BASE.match(text))
        ):
            self.problem(node, f"a number of {len(text)} digits", hint="write it in quotes if it is text")
            text = "0"
        if node.style == '"' and (variable := _VARIABLE.fullmatch(node.value)) and not variable[1]:
            quoted = False  # inside braces YAML needs these quotes, even for a variable that holds a number
        return Node(text if quoted else scalar(text), self.origin(node), None, quoted)

    def is_untagged(self, node: yaml.Node) -> bool:
        """Return whether no tag was written. PyYAML tags every untyped plain scalar `str`; only the text shows an
        explicit `!!str`."""
        return not self.text[node.start_mark.index :].startswith("!")

    def substitute_variables(self, node: yaml.Node) -> str:
        """Replace `${NAME}` and `${NAME:-default}` by environment variables."""

        def value_of(match: re.Match[str]) -> str:
            escaped, name, default = match.groups()
            if escaped:
                return match[0][1:]
            if name in os.environ:
                return os.environ[name]
            if default is None:
                hint = f"set it, write a default `${{{name}:-value}}`, or `$${{{name}}}` for this text itself"
                self.problem(node, f"the environment variable {name} is not set", hint=hint)
            return default or ""

        return _VARIABLE.sub(value_of, node.value)


def _inside(node: yaml.Node) -> list[yaml.Node]:
    """Return the nodes directly below a node."""
    if isinstance(node, yaml.MappingNode):
        return [value for _, value in node.value]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _is_empty(node: yaml.Node) -> bool:
    """Return whether a value is missing after `key:` (an explicit `null` is not empty)."""
    return isinstance(node, yaml.ScalarNode) and node.value == "" and not node.style


_PLAIN_WORDS = (
    ("found character '\\t'", "a tab; YAML is indented with spaces"),
    (
        "mapping values are not allowed here",
        "a `:` that is not allowed here (wrong indentation, or text that needs quotes)",
    ),
    ("could not find expected ':'", "a line without `:`; YAML needs `key: value`"),
    ("expected <block end>", "the indentation does not fit the lines above"),
    ("but got '<stream end>'", "a bracket is opened and not closed"),
    ("found unexpected end of stream", "a quote or bracket is opened and not closed"),
    ("while scanning a quoted scalar", "a quote is opened and not closed"),
    ("found undefined alias", "an alias (`*name`) without its anchor (`&name`) above it"),
    ("expected a single document", "a second `---` document; a recipe is one document"),
    ("found duplicate anchor", "an anchor (`&name`) is given twice"),
)


def _syntax_error(error: yaml.YAMLError, text: str, name: str, fixed: Origin | None = None) -> RecipeError:
    """Convert a PyYAML error to a RecipeError in plain words."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if mark is None:  # a character that YAML does not allow
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        return RecipeError(f"not readable as YAML: {problem}", where=f"{name}:{line}:1")
    lines = text.splitlines()
    content = lines[mark.line] if mark.line < len(lines) else ""
    reason = next((plain for words, plain in _PLAIN_WORDS if words in f"{error}"), problem)
    if re.match(r"\s*\t", content):
        reason = _PLAIN_WORDS[0][1]
    hint = 'write "${NAME}", in double quotes, inside braces or brackets' if "${" in content else ""
    if "expected a single document" in f"{error}" and "merge_method" in text:
        hint = "make each document a stage of a pipeline, whose models are then `stage:NAME` (docs/merging.md)"
    where = name if fixed else f"{name}:{mark.line + 1}:{mark.column + 1}"
    return RecipeError(f"not readable as YAML: {reason}", where=where, allowed=content.strip()[:100], hint=hint)
