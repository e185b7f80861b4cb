"""Where models come from, and whether they may go where they shall: known before any work.

What a conversion ends with is asked at its beginning, so that nobody waits a night for a refusal.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

from exl2flow.core.errors import ConfigError, HubError, PublicationRefused
from exl2flow.core.publication import PublishOptions
from exl2flow.core.source import hub_model, provenance
from exl2flow.inference.report.publication import (
    Bitrate,
    Origin,
    origin_from,
    origin_problems,
    recorded_origins,
)
from exl2flow.tasks.hub import Hub


def check_target(
    options: PublishOptions, source: Path, work_root: Path, *, writer: Hub, reader: Hub
) -> None:
    """Find out before a conversion whether its result could be published, as far as is known then.

    Args:
        options: what shall be published where.
        source: a folder, or a model of the Hub that need not have been fetched.
        work_root: where it is fetched to.
        writer: with the token that shall publish.
        reader: with the token that the source is fetched with.

    Raises:
        ConfigError: the repository cannot have this name, or is the source.
        HubError: there is no token, or it may not write there.
        PublicationRefused: gate or licence of the source speak against it.
        SourceModelError: the source is a mistyped path.
    """
    check_name(options.repo)
    problems = origin_problems(_origin_of_source(source, work_root, options, reader))
    if problems and not options.force:
        raise refusal(problems)
    check_account(options.repo, writer)


def refusal(problems: Sequence[str]) -> PublicationRefused:
    """Return the error that tells all problems."""
    text = "\n".join(problems)
    return PublicationRefused(f"{text}; `--force` publishes in spite of this and notes it")


def check_name(repo: str) -> None:
    """Refuse what the Hub would not take as a name.

    Raises:
        ConfigError: the repository cannot have this name.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"`{repo}` is no name for a repository: {error}") from error


def check_account(repo: str, hub: Hub) -> None:
    """Ask whose the token is, and whether it may write to a repository.

    What tokens with chosen permissions may do is not told before it is tried.

    Raises:
        HubError: there is no token, it expired, or it may not write there.
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
            f"the token {why}: use one with write access to `{owner}`, or publish under another "
            f"name than `{repo}`"
        )


def origin_of_models(bitrates: Sequence[Bitrate], options: PublishOptions, hub: Hub) -> Origin:
    """Return the one source of all bitrates, as their records or the options tell.

    Raises:
        ConfigError: they have several sources, or the source is where they shall go.
    """
    found = recorded_origins(bitrates)
    if len(found) > 1:
        names = ", ".join(f"`{origin.repo}@{origin.commit}`" for origin in found)
        raise ConfigError(f"the models have several sources: {names}; publish them one by one")
    return _as_told(found[0] if found else None, options, hub)


def _origin_of_source(source: Path, work_root: Path, options: PublishOptions, hub: Hub) -> Origin:
    """Return what will be recorded of a source that is about to be converted."""
    known = provenance(source)
    if known is not None:
        return _as_told(origin_from(known), options, hub)
    wanted = hub_model(source, work_root)
    found = None if wanted is None else _of_hub(wanted.repo, wanted.revision, hub)
    return _as_told(found, options, hub)


def _as_told(origin: Origin | None, options: PublishOptions, hub: Hub) -> Origin:
    """Complete an origin by what the options tell.

    Raises:
        ConfigError: the source is where the models shall go.
    """
    if origin is None:
        named = options.base_model
        origin = Origin() if named is None else _of_hub(named, None, hub, is_pinned=False)
    if (origin.repo or "").casefold() == options.repo.casefold():
        raise ConfigError(
            f"`{options.repo}` is the source itself; name another repository, such as "
            f"`{options.repo}-exl2`"
        )
    return origin if options.license is None else replace(origin, license=options.license)


def _of_hub(repo: str, revision: str | None, hub: Hub, *, is_pinned: bool = True) -> Origin:
    """Return what the Hub tells of a model; without its commit if it need not be that."""
    info = hub.call(repo, lambda: hub.api.model_info(repo, revision=revision))
    card: Any = info.card_data or {}
    known = {key: card.get(key) for key in ("license", "license_name", "license_link")}
    commit = info.sha if is_pinned else None
    return Origin(repo=repo, commit=commit, gated=bool(info.gated), **known)
