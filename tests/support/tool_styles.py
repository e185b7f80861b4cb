"""A conversation with a call, and templates in the styles that models use."""

import json
from typing import Any

ARGUMENTS = {"city": 'São "Paulo"', "days": 2, "units": None, "hours": [1.5, True]}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather < forecast >",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need a tool.",
        "tool_calls": [CALL],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "weather"},
]

HERMES = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' }}
{%- if m.role == 'tool' %}{{- '<tool_response>' + m.content + '</tool_response>' }}
{%- else %}
{%- set thoughts = m.reasoning_content %}
{%- if thoughts is string %}{{- '<think>' + thoughts + '</think>' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{% set call = call.function %}
{{- '<tool_call>{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ '}' }}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}"""
LLAMA3_JSON = """\
{{- bos_token }}
{%- if tools is not none %}{% for t in tools %}{{- t | tojson(indent=4) }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|header|>assistant<|end|>{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot|>' }}
{%- elif m.role == 'tool' %}
{{- '<|header|>ipython<|end|>' }}
{{- m.content | tojson if m.content is mapping else m.content }}{{- '<|eot|>' }}
{%- else %}{{- '<|header|>' + m.role + '<|end|>' + m.content + '<|eot|>' }}{% endif %}
{%- endfor %}"""
MISTRAL_ARGS = """\
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have 9 letters') }}{% endif %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]' + call.id + '[ARGS]' }}
{{- call.function.arguments | tojson }}
{%- endfor %}{{- eos_token }}
{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '[TOOL_CONTENT]' + m.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}"""
GLM45 = """\
{%- for m in messages %}
{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\\n' }}
{%- set thoughts = m.reasoning_content or '' %}
{%- if thoughts %}{{- '<think>' + thoughts.strip() + '</think>\\n' }}{% endif %}
{{- m.content.strip() }}
{%- for call in m.tool_calls or [] %}{% set call = call.function or call %}
{{- '<tool_call>' + call.name }}
{%- for key, value in call.arguments.items() %}
{{- '\\n<arg_key>' ~ key ~ '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}{{- '</arg_value>' }}
{%- endfor %}{{- '\\n</tool_call>' }}
{%- endfor %}
{%- endfor %}"""
CHANNELS = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- for tool in tools or [] %}{% set f = tool.function %}
{{- 'type ' + f.name + ' = (_: {' + f.parameters.properties.keys() | join(', ') + '})' }}
{%- endfor %}
{%- set last = namespace(name='') %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}{% set last.name = call.name %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' ~ m.reasoning_content ~ '<|end|>' }}
{{- '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' ~ last.name ~ ' to=assistant<|message|>' ~ (m.content | tojson) }}
{{- '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}"""
AS_JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
STYLES = {
    "hermes": (
        HERMES,
        ["Weather < forecast >", "<think>I need a tool.</think>", f'"arguments": {AS_JSON}' + "}"],
    ),
    "llama3-json": (
        LLAMA3_JSON,
        ['        "name": "weather"', f'"parameters": {AS_JSON}' + "}<|eot|>", ">sunny<"],
    ),
    "mistral-args": (
        MISTRAL_ARGS,
        [f"weather[CALL_ID]call00001[ARGS]{AS_JSON}</s>", "call00001[TOOL_CONTENT]sunny"],
    ),
    "glm4.5": (
        GLM45,
        ['city</arg_key>\n<arg_value>São "Paulo"</arg_value>', "units</arg_key>\n<arg_value>null"],
    ),
    "gpt-oss": (
        CHANNELS,
        ["Reasoning: medium", "weather = (_: {city})", f"{AS_JSON}<|call|>", '"sunny"<|end|>'],
    ),
}
