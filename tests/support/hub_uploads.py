"""What `hub_server.py` answers to uploads: modes, LFS batches in several parts, commits."""

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import yaml
from hub_requests import Request, Response
from hub_server import PART_BYTES, Hub, is_large, route


@route(r"POST /api/validate-yaml")
def validate_yaml(hub: Hub, request: Request) -> Response:
    _, _, rest = request.json()["content"].partition("---\n")
    front, _, _ = rest.partition("\n---\n")
    errors = []
    try:
        data = yaml.safe_load(front)
        if not isinstance(data, dict):
            errors = [{"message": "metadata is not a mapping"}]
    except yaml.YAMLError as error:
        errors = [{"message": str(error)}]
    return Response.of({"errors": errors, "warnings": []}, status=400 if errors else 200)


@route(r"POST /api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)")
def preupload(hub: Hub, request: Request) -> Response:
    repo = request.groups["repo"]
    tree = hub.repos[repo]["commits"][hub.head(repo, request.groups["revision"])]
    files = []
    for file in request.json()["files"]:
        entry = tree.get(file["path"])
        oid = entry and (entry["sha256"] if entry["lfs"] else entry["blob"])
        mode = "lfs" if is_large(file["path"]) else "regular"
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return Response.of({"files": files})


@route(r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
def batch(hub: Hub, request: Request) -> Response:
    objects = [_instructions(hub, request.groups["repo"], o) for o in request.json()["objects"]]
    return Response.of({"transfer": "multipart", "objects": objects})


def _instructions(hub: Hub, repo: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Tell where an object goes, unless it is there."""
    oid, size = wanted["oid"], wanted["size"]
    if hub.path_of(oid).exists():
        return {"oid": oid, "size": size}
    verify = {"href": f"{hub.url}/{repo}.git/info/lfs/objects/verify", "header": {}}
    if size <= PART_BYTES:
        upload: dict[str, Any] = {"href": f"{hub.storage_url}/uploads/{oid}", "header": {}}
    else:
        header = {"chunk_size": str(PART_BYTES)}
        for part in range(1, math.ceil(size / PART_BYTES) + 1):
            header[f"{part:05d}"] = f"{hub.storage_url}/uploads/{oid}/{part}"
        upload = {"href": f"{hub.storage_url}/completed/{oid}", "header": header}
    return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}


@route(r"PUT /uploads/(?P<oid>\w+)(/(?P<part>\d+))?", server="storage")
def receive(hub: Hub, request: Request) -> Response:
    """Keep a whole object, or a part of one."""
    data, part = request.body, request.groups.get("part")
    if part is None:
        hub.path_of(request.groups["oid"]).write_bytes(data)
    else:
        _part(hub, request.groups["oid"], int(part)).write_bytes(data)
    return Response(headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})


def _part(hub: Hub, oid: str, part: int) -> Path:
    folder = hub.root / "parts" / oid
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{part:05d}"


@route(r"POST /completed/(?P<oid>\w+)", server="storage")
def complete(hub: Hub, request: Request) -> Response:
    """Put the parts together, if they are those that were received."""
    oid = request.groups["oid"]
    pieces = []
    for entry in request.json()["parts"]:
        data = _part(hub, oid, entry["partNumber"]).read_bytes()
        if f'"{hashlib.md5(data).hexdigest()}"' != entry["etag"]:
            return Response.error(400, f"part {entry['partNumber']} has another ETag")
        pieces.append(data)
    hub.path_of(oid).write_bytes(b"".join(pieces))
    return Response.of({})


@route(r"POST /(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/verify")
def verify(hub: Hub, request: Request) -> Response:
    """Compare sizes, as the Hub does."""
    path, size = hub.path_of(request.json()["oid"]), request.json()["size"]
    if not path.exists() or path.stat().st_size != size:
        return Response.error(422, "the object is not what was announced")
    return Response.of({})


@route(r"POST /api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)")
def commit(hub: Hub, request: Request) -> Response:
    repo, branch = request.groups["repo"], request.groups["revision"]
    if branch not in hub.repos[repo]["branches"]:
        return Response.error(404, f"Invalid rev id: {branch}", code="RevisionNotFound")
    tree = dict(hub.repos[repo]["commits"][hub.head(repo, branch)])
    for line in request.body.splitlines():
        item = json.loads(line)
        value = item["value"]
        if item["key"] == "file":
            tree[value["path"]] = hub.entry(base64.b64decode(value["content"]), is_lfs=False)
        elif item["key"] == "deletedFile":
            del tree[value["path"]]
        elif item["key"] == "lfsFile":
            if not hub.path_of(value["oid"]).exists():
                return Response.error(400, f"{value['path']}: its LFS object is missing")
            sizes = {"sha256": value["oid"], "size": value["size"], "lfs": True}
            tree[value["path"]] = {**sizes, "blob": hashlib.sha1(line).hexdigest()}
    sha = hub.commit(repo, branch, tree)
    return Response.of(
        {"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{repo}/commit/{sha}"}
    )
