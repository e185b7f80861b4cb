"""`exl2flow webhook`: receive the Hub's webhooks."""

import os
import signal
from typing import Annotated

import typer

from exl2flow.cli.output.console import say
from exl2flow.core.errors import ConfigError

SECRET_VARIABLE = "EXL2FLOW_WEBHOOK_SECRET"
EXAMPLES = (
    f"{SECRET_VARIABLE}=… PREFECT_API_URL=http://127.0.0.1:4200/api exl2flow webhook --port 4300",
)


def webhook(
    *,
    host: Annotated[str, typer.Option("--host", help="Interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port.", min=1, max=65535)] = 4300,
) -> None:
    """Receive webhooks of the Hugging Face Hub, and emit an event for each new revision.

    The environment has the secret that you gave to the Hub, EXL2FLOW_WEBHOOK_SECRET, and address
    and password of the Prefect server, PREFECT_API_URL and PREFECT_API_AUTH_STRING.
    """
    secret = os.environ.get(SECRET_VARIABLE, "")
    if not secret:
        raise ConfigError(
            f"{SECRET_VARIABLE} is not set; set it to the secret of the webhook on the Hub"
        )
    if not os.environ.get("PREFECT_API_URL"):
        raise ConfigError(
            "PREFECT_API_URL is not set; `exl2flow server up` prints the address of its server"
        )
    from exl2flow.flows.server.services import in_url, listen
    from exl2flow.flows.webhook import serve

    with listen(host, port) as listener:
        say(f"receiving on http://{in_url(host)}:{port}/")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ours prints a message about finished work
        serve(listener, secret)
