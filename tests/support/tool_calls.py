"""Texts with calls as each format of `tools.toml` writes them, and the functions that they call."""

from collections.abc import Sequence
from typing import Any

from exl2flow.model.text.messages import values_of
from exl2flow.model.text.template_program import environment

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "metric": {"type": "boolean"},
                "hours": {"type": "array", "items": {"enum": [0, 6, 12, 23]}, "maxItems": 3},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}}
STOP["function"]["parameters"] |= {"properties": {}, "additionalProperties": False}  # type: ignore[index]  # nested JSON
TOOLS: list[dict[str, Any]] = [WEATHER, STOP]

_JSON = "{%- for c in m.tool_calls %}"
_END = "{%- endfor %}"
_PAIR = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
_LIST = (
    '[{%- for c in m.tool_calls %}{{ ", " if not loop.first }}'
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{%- endfor %}]"
)
_TEXT = "{{ v if v is string else v | tojson }}"
_ITEMS = "{%- for k, v in c.function.arguments.items() %}"
_XML = (
    _JSON
    + "{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    + _ITEMS
    + "{{ '<parameter=' + k + '>\n' }}"
    + _TEXT
    + "{{ '\n</parameter>\n' }}"
    + _END
    + "{{ '</function>\n</tool_call>' }}"
    + _END
)
_SEED = _XML.replace("tool_call>", "seed:tool_call>").replace("k + '>\n'", "k + '>'")
_SEED = _SEED.replace("'\n</parameter>\n'", "'</parameter>\n'")
_PYTHON = (
    '{%- for c in m.tool_calls %}{{ SEP if not loop.first }}{{ c.function.name + "(" }}'
    '{%- for k, v in c.function.arguments.items() %}{{ ", " if not loop.first }}{{ k }}='
    "{{ v | tojson }}{%- endfor %}{{ ')' }}{%- endfor %}"
)

# of each row a short template of our own: what the published one marks calls with, in its order
TEMPLATES = {
    "hermes": _JSON + "{{ '\n<tool_call>\n' }}" + _PAIR + "{{ '\n</tool_call>' }}" + _END,
    "granite4": "{{ '<|start_of_role|>assistant' if false }}"
    + (_JSON + "{{ '\n<tool_call>\n' }}" + _PAIR + "{{ '\n</tool_call>' }}" + _END),
    "ernie4.5": "{%- set cls_token = '<|begin_of_sentence|>' %}"
    + (_JSON + "{{ '\n<tool_call>\n' }}" + _PAIR + "{{ '\n</tool_call>\n' }}" + _END),
    "phi4-mini": _JSON + "{{ '<|tool_call|>' }}" + _PAIR + "{{ '<|/tool_call|>' }}" + _END,
    "llama3-json": "{{ '<|start_header_id|>' if false }}"
    + (_JSON + _PAIR.replace('arguments": ', 'parameters": ') + _END),
    "granite": "{{ '<|start_of_role|>' if false }}{{ '<|tool_call|>' }}" + _LIST,
    "mistral-list": "{{ '[TOOL_CALLS] ' }}" + _LIST.replace("}}}{%-", '}}, "id": "aB3456789"}{%-'),
    "command-r7b": "{{ '<|START_ACTION|>[\n' }}"
    "{%- for c in m.tool_calls %}{{ ',\n' if not loop.first }}"
    '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
    '"parameters": {{ c.function.arguments | tojson }}}'
    "{%- endfor %}{{ '\n]<|END_ACTION|>' }}",
    "hunyuan": "{{ '<tool_calls>' }}" + _LIST + "{{ '</tool_calls>' }}",
    "nemotron": "{{ '<TOOLCALL>' }}" + _LIST + "{{ '</TOOLCALL>' }}",
    "mistral-args": _JSON
    + "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}"
    + _END,
    "deepseek-v3.1": "{{ '<｜tool▁calls▁begin｜>' }}"
    + (_JSON + "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' }}")
    + ("{{ c.function.arguments | tojson }}{{ '<｜tool▁call▁end｜>' }}" + _END)
    + "{{ '<｜tool▁calls▁end｜>' }}",
    "qwen3-coder": _XML,
    "seed-oss": _SEED,
    "glm4.5": _JSON
    + ("{{ '\n<tool_call>' + c.function.name }}" + _ITEMS)
    + (
        "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
        + _TEXT
        + "{{ '</arg_value>' }}"
        + _END
    )
    + ("{{ '\n</tool_call>' }}" + _END),
    "minimax-m2": "{{ '<minimax:tool_call>\n' }}"
    + (_JSON + "{{ '<invoke name=\"' + c.function.name + '\">\n' }}" + _ITEMS)
    + ("{{ '<parameter name=\"' + k + '\">' }}" + _TEXT + "{{ '</parameter>\n' }}" + _END)
    + ("{{ '</invoke>\n' }}" + _END + "{{ '</minimax:tool_call>' }}"),
    "llama4-pythonic": "{{ '<|header_start|> [func_name1(param1=value1, …)]' if false }}["
    + (_PYTHON.replace("SEP", "', '") + "]"),
    "lfm2": "{{ '<|tool_call_start|>[' }}"
    + (_PYTHON.replace("SEP", "', '") + "{{ ']<|tool_call_end|>' }}"),
    "olmo3": "{{ '<function_calls>\n' }}"
    + (_PYTHON.replace("SEP", "'\n'") + "{{ '\n</function_calls>' }}"),
    "gpt-oss": _JSON
    + "{{ '<|start|>assistant to=' + 'functions.' + c.function.name }}"
    + "{{ '<|channel|>commentary json' }}"
    + "{{ '<|message|>' }}{{ c.function.arguments | tojson }}{{ '<|call|>' }}"
    + _END,
}
ONE_CALL = {"llama3-json"}  # formats whose texts hold one call at most


def template_of(name: str) -> str:
    """Return a whole template: tools, then turns; calls of a turn as the format writes them."""
    body = "{%- for m in messages %}{%- if m.tool_calls %}{{ m.content }}"
    return "{{ tools and '' }}" + body + TEMPLATES[name] + "{%- endif %}{%- endfor %}"


def turn(calls: Sequence[tuple[str, dict[str, Any]]], content: str = "") -> dict[str, Any]:
    """Return a turn of the assistant that calls functions."""
    functions = [{"function": {"name": name, "arguments": given}} for name, given in calls]
    return {"role": "assistant", "content": content, "tool_calls": functions}


def rendered(name: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return how a format writes calls."""
    template = environment().from_string(template_of(name))
    return template.render(messages=values_of([turn(calls)]), tools=TOOLS)
