"""The token for the Hub, from a Prefect Secret block: read on use, never passed around."""

from typing import Any, cast

from prefect.blocks.system import Secret

from exl2flow.core.errors import ConfigError


def read_token(block: str | None) -> str | None:
    """Return a Secret block's token; None without one, because the client reads HF_TOKEN itself.

    Raises:
        ConfigError: there is no such block, or it does not hold text.
    """
    if block is None:
        return None
    try:
        token = cast(Secret[Any], Secret.load(block)).get()
    except ValueError:
        raise ConfigError(
            f"there is no Secret block `{block}` on this Prefect server; create one in its UI "
            "under Blocks, or set HF_TOKEN"
        ) from None
    if not isinstance(token, str) or not token:
        raise ConfigError(f"the Secret block `{block}` holds no text; store the token in it")
    return token
