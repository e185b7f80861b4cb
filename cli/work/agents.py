"""The coding agents that `exl2flow agent` starts: a row each, with what it must be given.

Names of variables, flags and keys are those of Claude Code 2.1.197, Codex 0.171.0 and opencode
1.18.33.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exl2flow.core.options.serving import KEY_VARIABLE

NO_KEY = "none"  # agents demand a key; a server without keys takes any
TIMEOUT_MS = 3_600_000  # of one answer: a long prompt may take minutes on a slow device
PROVIDER = "exl2flow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server as an agent sees it: `model` is the name in requests, `context` its tokens."""

    url: str  # without `/v1`
    key: str
    model: str
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What reaches an agent: arguments before those of the user, and variables; None: unset."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """A coding agent: its program, how that is installed, how it is started."""

    program: str
    install: str
    launch: Callable[[Endpoint], Launch]


def _claude(at: Endpoint) -> Launch:
    models = ("OPUS", "SONNET", "HAIKU")  # for subagents and titles
    return Launch(
        arguments=("--model", at.model),
        environment={
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_AUTH_TOKEN": at.key,
            "ANTHROPIC_API_KEY": None,  # with both, Claude Code warns about a conflict
            **{f"ANTHROPIC_DEFAULT_{name}_MODEL": at.model for name in models},
            "API_TIMEOUT_MS": str(TIMEOUT_MS),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(at.context),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    )


def _codex(at: Endpoint) -> Launch:
    own = f"model_providers.{PROVIDER}."
    settings = {
        "model": at.model,
        "model_provider": PROVIDER,
        "model_context_window": at.context,
        f"{own}name": PROVIDER,
        f"{own}base_url": f"{at.url}/v1",
        f"{own}wire_api": "responses",
        f"{own}env_key": KEY_VARIABLE,
        f"{own}stream_idle_timeout_ms": TIMEOUT_MS,
        "features.plugins": False,  # they ask GitHub and chatgpt.com
        "analytics.enabled": False,
        "check_for_update_on_startup": False,
    }
    # values are TOML, in which these are written as in JSON
    pairs = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
    return Launch(
        arguments=tuple(word for pair in pairs for word in ("-c", pair)),
        environment={KEY_VARIABLE: at.key},
    )


def _opencode(at: Endpoint) -> Launch:
    limits = {"context": at.context, "output": max(1, at.context // 4)}
    timeouts = {"timeout": TIMEOUT_MS, "headerTimeout": TIMEOUT_MS, "chunkTimeout": TIMEOUT_MS}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": PROVIDER,
        "options": {"baseURL": f"{at.url}/v1", "apiKey": at.key, **timeouts},
        "models": {at.model: {"name": at.model, "limit": limits}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "provider": {PROVIDER: provider},
        "model": f"{PROVIDER}/{at.model}",
        "small_model": f"{PROVIDER}/{at.model}",
    }
    return Launch(
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }
    )


AGENTS = {
    "claude": Agent(
        program="claude", install="npm install -g @anthropic-ai/claude-code", launch=_claude
    ),
    "codex": Agent(program="codex", install="npm install -g @openai/codex", launch=_codex),
    "opencode": Agent(program="opencode", install="npm install -g opencode-ai", launch=_opencode),
}
