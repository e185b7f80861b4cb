"""Values of tool calls outside of JSON: raw text of parameters, and Python's literals."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
ESCAPES = "\\'\"abfnrtvxuU\n"  # that Python knows, octal ones and names of characters apart


def json_value(text: str) -> Any:
    """Return the value of a JSON text; raises `ValueError` for anything else, NaN included."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def types_of(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema names; empty: it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset((given,))
    if isinstance(given, list):
        return frozenset(map(str, given))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(TYPES.get(type(value), "object") for value in values)
    return frozenset()


def parameter_value(text: str, schema: object) -> Any:
    """Return the value of a parameter that stands as raw text.

    Raises:
        ValueError: it is of no type that its schema names.
    """
    types = types_of(schema)
    if types == {"string"}:
        return text
    try:
        bare = text.strip()
        value = CONSTANTS[bare] if bare in CONSTANTS else json_value(bare)
    except ValueError:
        value = text
    kind = TYPES[type(value)]
    if not types or kind in types or (kind == "integer" and "number" in types):
        return value
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return value
    if "string" in types:
        return text
    raise ValueError(f"{text[:40]!r} is not of type {' or '.join(sorted(types))}")


def python_value(text: str) -> Any:
    """Return the value of a literal, Python's or JSON's; raises `ValueError` for anything else."""
    try:
        return json_value(text)
    except ValueError:
        pass
    try:
        return _value(ast.parse(re.sub(r"\\(.)", _known_escape, text.strip(), flags=re.S)).body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error


def _value(node: object) -> Any:
    match node:
        case [ast.Expr(value=inner)]:
            return _value(inner)
        case ast.Constant(value=value) if type(value) in TYPES:
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            found = {_value(key): _value(value) for key, value in pairs if key is not None}
            if len(found) == len(keys) and all(isinstance(key, str) for key in found):
                return found
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("no literal")


def _known_escape(found: re.Match[str]) -> str:
    return found[0] if found[1] in ESCAPES else "\\" + found[0]


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)
