"""Refuse images and videos in prompts, messages and files of conversations."""

from collections.abc import Mapping

from exl2flow.core.errors import ConfigError

KINDS = ("image", "video")
PLACEHOLDERS = tuple(f"{kind}_token_{end}" for kind in KINDS for end in ("id", "index"))
PARTS = {name for kind in KINDS for name in (kind, f"{kind}s", f"{kind}_url", f"input_{kind}")}


def refuse_images(value: object, where: str) -> None:
    """Refuse a JSON value that holds an image or a video in a form that chats and prompts use.

    Args:
        value: a message, its content, a list of them, or whatever was given instead of text.
        where: what holds it, for the message.

    Raises:
        ConfigError: it holds one.
    """
    left = [value]
    while left:
        match left.pop():
            case Mapping() as value:
                kind = value.get("type")
                if PARTS & value.keys() or (isinstance(kind, str) and kind in PARTS):
                    raise images_refused(where)
                left += value.values()
            case list() | tuple() as value:
                left += value


def placeholders(config: Mapping[str, object]) -> frozenset[int]:
    """Return the ids that stand for images in prompts of a model with this `config.json`."""
    ids = map(config.get, PLACEHOLDERS)
    return frozenset(i for i in ids if isinstance(i, int) and not isinstance(i, bool))


def images_refused(where: str) -> ConfigError:
    """Return the error for an image; `where` begins the sentence."""
    return ConfigError(
        f"{where} holds an image, but exl2flow runs only the text model; remove it, or give a "
        "vision encoder's output as `embeddings` of a `Request`"
    )
