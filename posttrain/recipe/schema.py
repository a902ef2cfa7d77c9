"""The JSON Schema of recipes, for editors: completion, hover texts and error markers while typing.

`python -m posttrain.recipe.schema` rewrites recipes/schema.json, which shipped recipes name in their first line. The
loader is stricter: it also checks combinations of values.
"""

from __future__ import annotations

import copy
import json
import typing
from typing import Any

from pydantic import BaseModel

from posttrain import registry
from posttrain.recipe import keys, presets
from posttrain.recipe.rounds import Rounds
from posttrain.recipe.section import ComponentSection, params_model
from posttrain.recipe.stages import PipelineRecipe, Stage

Schema = dict[str, Any]
VARIABLE = {"type": "string", "pattern": r"\$\{[A-Za-z_]", "description": "${NAME} of the environment"}
MINUTES = {"type": "string", "pattern": "^stage:", "description": "stage:NAME, as long as that stage trained"}


def build() -> Schema:
    """Build one schema: `stage` selects the sections, `use` selects the keys of a component section."""
    definitions: dict[str, Schema] = {}
    stages = {name: _stage(model, definitions) for name, model in keys.BY_NAME.items()}
    for name, schema in stages.items():
        definitions[f"stage_{name}"] = schema
        definitions[f"entry_{name}"] = _without_requirements(schema)
    definitions.pop("entry_pipeline")
    definitions["entry"] = _entry(list(stages))
    definitions["rounds"] = _rounds()
    either = {"if": {"required": ["rounds"]}, "then": {"$ref": "#/definitions/rounds"}}
    definitions["stage_pipeline"]["properties"]["stages"]["items"] = {**either, "else": {"$ref": "#/definitions/entry"}}
    definitions["stage_pipeline"]["properties"]["defaults"] = _defaults(stages)
    named = {"type": "object", "required": ["stage"], "properties": {"stage": {"enum": list(stages)}}}
    choices = [_when("stage", name, f"stage_{name}") for name in stages]
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "posttrain recipe",
        **named,
        "allOf": choices,
        "definitions": definitions,
    }


def _when(key: str, value: str, definition: str) -> Schema:
    condition = {"required": [key], "properties": {key: {"const": value}}}
    return {"if": condition, "then": {"$ref": f"#/definitions/{definition}"}}


def _stage(model: type[Stage], definitions: dict[str, Schema]) -> Schema:
    """Build the schema of one stage. Required keys may come from an extended recipe, so they are required only without
    `extends`."""
    schema = model.model_json_schema(by_alias=True, ref_template="#/definitions/{model}")
    sections = schema.pop("$defs", {})
    stage = schema["properties"]["stage"]["const"]
    renamed = {name: f"{stage}_{name}" for name in sections}
    for name, definition in sections.items():
        definitions[renamed[name]] = _tidy(definition, renamed)
    for name in _sections(model):  # keys of a section may be inherited; list entries must be complete
        definitions[renamed[name]].pop("required", None)
    for section in _nested_components(model):
        definitions[renamed[section.__name__]] = _component(section)
    schema = _tidy(schema, renamed)
    for key, section in keys.components_of(stage).items():
        definitions[f"{stage}_{key}"] = _component(section)
        description = schema["properties"][key].get("description", "")
        schema["properties"][key] = _component_schema(f"#/definitions/{stage}_{key}", model, key, description)
    for path in model.unused:
        key, _, last = path.partition(".")
        for name in {renamed[m.__name__] for m in keys.models(model.model_fields[key].annotation)}:
            definitions[name]["properties"].pop(last, None)
    if "algorithm" in schema["properties"]:
        schema["properties"]["algorithm"] |= {"enum": presets.names(stage)}
        schema["properties"]["algorithm"].pop("anyOf", None)
    if "merge_method" in schema["properties"]:
        schema["properties"]["merge_method"] |= {"enum": sorted(registry.load_index().get("merge", {}))}
    required = [key for key in schema.pop("required", []) if key != "stage"]
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    return schema


def _sections(model: type[Stage]) -> set[str]:
    annotations = [field.annotation for field in model.model_fields.values()]
    named = {m.__name__ for a in annotations if typing.get_origin(a) is not list for m in keys.models(a)}
    return named - {section.__name__ for section in keys.components_of(model.model_fields["stage"].default).values()}


def _nested_components(model: type[Stage]) -> set[type[ComponentSection]]:
    """Return the component sections that are keys of another section (`rollout.shape`)."""
    sections = [section for field in model.model_fields.values() for section in keys.models(field.annotation)]
    below = [field.annotation for section in sections for field in section.model_fields.values()]
    return {m for annotation in below for m in keys.models(annotation) if issubclass(m, ComponentSection)}


def _component_schema(reference: str, model: type[Stage], key: str, description: str) -> Schema:
    """Return the schema of a field with one component, several, one or several, or one per name."""
    component, annotation = {"$ref": reference}, model.model_fields[key].annotation
    choices: list[Schema] = [component]
    if typing.get_origin(annotation) is list:
        choices = [{"type": "array", "items": component}]
    elif typing.get_origin(annotation) is dict:
        choices = [{"type": "object", "additionalProperties": component}]
    elif "list[" in str(annotation):
        choices.append({"type": "array", "items": component})
    if model.model_fields[key].default is None:
        choices.append({"type": "null"})
    return {"anyOf": choices, **({"description": description} if description else {})}


def _tidy(schema: Any, renamed: dict[str, str]) -> Any:
    """Rename definitions, drop generated titles, and allow environment variables for numbers."""
    if isinstance(schema, list):
        return [_tidy(item, renamed) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {
        key: _tidy(value, renamed) for key, value in schema.items() if not (key == "title" and isinstance(value, str))
    }
    if "$ref" in tidy:
        tidy["$ref"] = "#/definitions/" + renamed[tidy["$ref"].rpartition("/")[2]]
    if isinstance(tidy.get("properties"), dict):
        tidy["properties"] = {key: _with_variable(key, value) for key, value in tidy["properties"].items()}
    return tidy


def _with_variable(key: str, schema: Schema) -> Schema:
    """Allow `${NAME}` in place of a number, a boolean or a word."""
    text = json.dumps(schema)
    strings = any(part.get("type") == "string" and "enum" not in part for part in [schema, *schema.get("anyOf", [])])
    if strings or "$ref" in text or '"array"' in text or '"object"' in text or "const" in schema:
        return schema
    outside: Schema = {name: schema[name] for name in ("description", "default") if name in schema}
    inside: Schema = {name: value for name, value in schema.items() if name not in outside}
    choices = inside.pop("anyOf", None) or [inside]
    return {**outside, "anyOf": [*choices, VARIABLE, *([MINUTES] if key == "max_minutes" else [])]}


def _component(section: type[ComponentSection]) -> Schema:
    """Return the schema of a component section: the name alone, or `use` with the keys of that component; any keys for
    a user's function."""
    shared = _tidy(section.model_json_schema(by_alias=True), {})["properties"]
    known = section.registered_components()
    branches = [_branch(section, name, described, shared) for name, described in known.items()]
    user = {"type": "object", "required": ["use"], "properties": {**shared, "use": {"type": "string", "pattern": ":"}}}
    short = {"anyOf": [{"enum": list(known)}, {"type": "string", "pattern": ":"}]}
    return {"description": section.__doc__, "anyOf": [short, *branches, user]}


def _branch(section: type[ComponentSection], name: str, described: Schema, shared: Schema) -> Schema:
    params = _tidy(_params(registry.find_kind(section.kinds, name), name), {}).get("properties", {})
    properties = copy.deepcopy(shared) | params | {"use": {"const": name, "description": described["doc"]}}
    branch = {"type": "object", "properties": properties, "additionalProperties": False}
    return branch if name == section.default_use() else {**branch, "required": ["use"]}


def _params(kind: str, name: str) -> Schema:
    model: type[BaseModel] = params_model(kind, name)
    schema = model.model_json_schema()
    return _inline_definitions(schema, schema.pop("$defs", {}))


def _inline_definitions(schema: Any, definitions: Schema) -> Any:
    """Replace references to a component's own definitions (gates and channels) by the definitions."""
    if isinstance(schema, list):
        return [_inline_definitions(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inline_definitions(definitions[schema["$ref"].rpartition("/")[2]], definitions), **siblings}
    return {key: _inline_definitions(value, definitions) for key, value in schema.items()}


def _entry(stages: list[str]) -> Schema:
    """Return the schema of a pipeline entry: a stage with a name; missing keys may come from the pipeline's
    defaults."""
    names = [name for name in stages if name != PipelineRecipe.model_fields["stage"].default]
    base = {
        "type": "object",
        "required": ["name", "stage"],
        "properties": {"name": {"type": "string"}, "stage": {"enum": names}},
    }
    return {**base, "allOf": [_when("stage", name, f"entry_{name}") for name in names]}


def _rounds() -> Schema:
    """Return the schema of a pipeline entry that repeats stages."""
    schema: Schema = _tidy(Rounds.model_json_schema(), {})
    schema["properties"]["stages"]["items"] = {"$ref": "#/definitions/entry"}
    return schema


def _without_requirements(stage: Schema) -> Schema:
    entry = {key: value for key, value in stage.items() if key != "anyOf"}
    properties = {key: value for key, value in stage["properties"].items() if key != "extends"}
    return {**entry, "properties": {"name": {"type": "string"}, **properties}}


def _defaults(stages: dict[str, Schema]) -> Schema:
    """Return the schema of sections shared by all stages: each has the form that one of the stages takes."""
    properties: dict[str, Schema] = {}
    for name, schema in stages.items():
        for key, value in schema["properties"].items():
            if name != "pipeline" and key not in ("stage", "extends"):
                properties.setdefault(key, {"anyOf": []})["anyOf"].append(value)
    unique = {
        k: {"anyOf": [v for n, v in enumerate(s["anyOf"]) if v not in s["anyOf"][:n]]} for k, s in properties.items()
    }
    return {"type": "object", "properties": unique, "additionalProperties": False}


def text() -> str:
    """Return the content of recipes/schema.json."""
    return json.dumps(build(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    from posttrain.path_resolution import shipped_folder

    target = shipped_folder("recipes") / "schema.json"
    target.write_text(text(), encoding="utf-8")
    print(f"wrote {target}")
