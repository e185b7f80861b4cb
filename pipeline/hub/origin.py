"""Where models come from, and whether they may be published: checked before any work.

A conversion checks its last step first, so that no refusal comes after a night of work.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from exl2flow.core.errors import ConfigError, HubError, HubUnavailable, PublicationRefused
from exl2flow.core.options.publication import PublishOptions
from exl2flow.core.store.source import hub_model, provenance
from exl2flow.inference.report.publication import (
    Bitrate,
    Origin,
    origin_from,
    origin_problems,
    recorded_origins,
)
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import fetched, record_of

log = logging.getLogger(__name__)

ATTEMPTS_AHEAD = 2  # retries before the conversion; everything is checked again after it


def check_target(
    options: PublishOptions, source: Path, work_root: Path, *, writer: Hub, reader: Hub
) -> None:
    """Check before a conversion whether its result could be published.

    If the Hub cannot be reached, log a warning and let the conversion start: everything is checked
    again before anything is published.

    Args:
        options: where and how to publish.
        source: a folder, or a model on the Hub, fetched or not.
        work_root: where it is fetched to.
        writer: client with the token for publishing.
        reader: client with the token for fetching the source.

    Raises:
        ConfigError: the repository is the source.
        HubError: no token, or it may not write there.
        PublicationRefused: the source is gated, or its licence forbids it.
        SourceModelError: the source is a mistyped path.
    """
    reader, writer = (replace(hub, waits=hub.waits[:ATTEMPTS_AHEAD]) for hub in (reader, writer))
    try:
        refuse(origin_problems(_origin_of_source(source, work_root, options, reader)), options)
        check_account(options.repo, writer)
    except HubUnavailable as error:
        log.warning(
            "%s; whether `%s` may receive the result is checked again before publishing",
            error,
            options.repo,
        )


def refuse(problems: Sequence[str], options: PublishOptions) -> None:
    """Raise `PublicationRefused` with all problems, if there are any that are not overridden."""
    if problems and not options.force:
        text = "\n".join(problems)
        raise PublicationRefused(f"{text}; `--force` publishes anyway and says so on the card")


def check_account(repo: str, hub: Hub) -> None:
    """Look up the token's owner, and check that it may write to a repository.

    The Hub does not report in advance what a fine-grained token may do.

    Raises:
        HubError: no token, it expired, or it may not write there.
    """
    account = hub.call(repo, hub.api.whoami)
    role = ((account.get("auth") or {}).get("accessToken") or {}).get("role")
    orgs = [org for org in account.get("orgs") or () if org.get("roleInOrg") != "read"]
    owners = [account.get("name"), *(org.get("name") for org in orgs)]
    owner = repo.partition("/")[0]
    is_owner = owner.casefold() in (str(name).casefold() for name in owners)
    if role == "read" or (role == "write" and not is_owner):
        why = "may only read" if role == "read" else f"belongs to `{owners[0]}`"
        raise HubError(
            f"the token {why}: use one with write access to `{owner}`, or choose a "
            f"repository other than `{repo}`"
        )


def origin_of_models(
    bitrates: Sequence[Bitrate], options: PublishOptions, hub: Hub | None
) -> Origin:
    """Return the source that all bitrates share, from their records or the options.

    Without a client, nothing is looked up: a source of the options is known by its name only.

    Raises:
        ConfigError: they have several sources, or would be published over the source.
    """
    origins = recorded_origins(bitrates)
    if len(origins) > 1:
        names = ", ".join(f"`{origin.repo}@{origin.commit}`" for origin in origins)
        raise ConfigError(f"the models have several sources: {names}; publish them one by one")
    return _as_told(origins[0] if origins else None, options, hub)


def _origin_of_source(source: Path, work_root: Path, options: PublishOptions, hub: Hub) -> Origin:
    """Return the origin to record for a source that is about to be converted."""
    wanted = hub_model(source, work_root)
    folder = fetched(wanted, work_root) if wanted else source
    record = provenance(folder) if folder else None
    if record is not None:
        return _as_told(origin_from(record), options, hub)
    origin = None if wanted is None else _of_hub(wanted.repo, wanted.revision, hub)
    return _as_told(origin, options, hub)


def _as_told(origin: Origin | None, options: PublishOptions, hub: Hub | None) -> Origin:
    """Complete an origin with the options.

    Raises:
        ConfigError: the models would be published over the source.
    """
    if origin is None:
        named = options.base_model
        if named is None or hub is None:
            origin = Origin(repo=named)
        else:
            origin = replace(_of_hub(named, None, hub), commit=None)
    if (origin.repo or "").casefold() == options.repo.casefold():
        raise ConfigError(
            f"`{options.repo}` is the source itself; name another repository, such as "
            f"`{options.repo}-exl2`"
        )
    return origin if options.license is None else replace(origin, license=options.license)


def _of_hub(repo: str, revision: str | None, hub: Hub) -> Origin:
    """Return the Hub's facts about a model."""
    info = hub.call(repo, lambda: hub.api.model_info(repo, revision=revision))
    return origin_from(record_of(repo, revision, info))
