"""A Hub of our own on 127.0.0.1: what `huggingface_hub` asks for, answered from files.

Two servers: the Hub (repositories, commits, LFS batches) and the storage that it refers to for
large files, which must never see a token. Objects lie on disk under their sha256, repositories in
one JSON file. Faults are switched on per test and used up by the requests that they match.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import unquote

import pytest
from hub_requests import Request, Response, handler_of

TOKEN = "hf_TestOnlyTokenWithWriteAccess"  # the one that is valid
USER, ORGANIZATION = "tester", "org"
FILES = "/{repo_id}/resolve/{revision}/{filename}"  # as the client writes it
PART_BYTES = 1 << 20  # of a multipart upload
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"

Tree = dict[str, dict[str, Any]]  # path → sha256, size, blob id, whether it is an LFS file


Kind = Literal["status", "cut", "damage", "lose", "slow"]


@dataclass(kw_only=True)
class Fault:
    """What goes wrong with requests whose `METHOD path` matches.

    kind: `status` answers with status and headers; `cut` ends the connection after so many bytes
        of the body, in whichever direction it goes; `damage` stores a body with one bit flipped;
        `lose` does what is asked and ends the connection without an answer; `slow` stops for
        `seconds` in the middle of the answer.
    times: requests that it hits; None: all.
    """

    where: str
    kind: Kind
    times: int | None = 1
    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int = 0
    seconds: float = 0.0

    def strikes(self, request: Request) -> bool:
        """Tell whether it hits this request, and use it up."""
        if self.times == 0 or not re.search(self.where, f"{request.method} {request.path}"):
            return False
        self.times = None if self.times is None else self.times - 1
        return True


def git_blob(data: bytes) -> str:
    """Return the id that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """Repositories and objects in a folder, and the requests that arrived."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "objects").mkdir(parents=True, exist_ok=True)
        self.url = self.storage_url = ""
        self.tokens = {TOKEN}
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.lock = threading.RLock()
        file = root / "repositories.json"
        self.repos: dict[str, dict[str, Any]] = (
            json.loads(file.read_text()) if file.exists() else {}
        )

    def fail(self, where: str, kind: Kind, **values: Any) -> None:
        """Switch a fault on."""
        self.faults.append(Fault(where=where, kind=kind, **values))

    def fault(self, request: Request) -> Fault | None:
        """Return the fault that hits a request."""
        with self.lock:
            return next((fault for fault in self.faults if fault.strikes(request)), None)

    def asked(self, where: str) -> list[Request]:
        """Return the requests so far whose `METHOD path` matches."""
        return [r for r in self.requests if re.search(where, f"{r.method} {r.path}")]

    def save(self) -> None:
        """Write the repositories to disk."""
        (self.root / "repositories.json").write_text(json.dumps(self.repos, indent=1))

    def path_of(self, sha256: str) -> Path:
        """Return where an object lies."""
        return self.root / "objects" / sha256

    def store(self, data: bytes) -> str:
        """Keep an object and return its sha256."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.path_of(sha256).write_bytes(data)
        return sha256

    def entry(self, data: bytes, *, is_lfs: bool) -> dict[str, Any]:
        """Return the tree entry of a file, its content stored."""
        sha256 = self.store(data)
        return {"sha256": sha256, "size": len(data), "blob": git_blob(data), "lfs": is_lfs}

    def create(self, repo: str, *, private: bool = False, **values: Any) -> dict[str, Any]:
        """Make a repository with the first commit that the Hub makes."""
        made = {"private": private, "gated": False, "card": {}, "granted": [], **values}
        self.repos[repo] = {**made, "branches": {}, "commits": {}}
        self.commit(repo, "main", {".gitattributes": self.entry(ATTRIBUTES, is_lfs=False)})
        return self.repos[repo]

    def add_folder(self, repo: str, folder: Path, **values: Any) -> str:
        """Make a repository that holds a folder, and return its commit."""
        self.create(repo, **values)
        files = {
            str(path.relative_to(folder)): self.entry(path.read_bytes(), is_lfs=is_large(path.name))
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return self.commit(repo, "main", files)

    def commit(self, repo: str, branch: str, tree: Tree) -> str:
        """Make this tree the head of a branch, and return the commit."""
        found = self.repos[repo]
        before = found["branches"].get(branch, "")
        sha = hashlib.sha1(json.dumps([repo, before, tree], sort_keys=True).encode()).hexdigest()
        found["commits"][sha] = tree
        found["branches"][branch] = sha
        self.save()
        return sha

    def head(self, repo: str, revision: str) -> str | None:
        """Return the commit of a branch, or of itself."""
        found = self.repos[repo]
        sha = found["branches"].get(revision, revision)
        return sha if sha in found["commits"] else None

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Return path → content of a branch."""
        sha = self.head(repo, revision)
        assert sha is not None
        tree = self.repos[repo]["commits"][sha]
        return {path: self.path_of(entry["sha256"]).read_bytes() for path, entry in tree.items()}


def is_large(name: str) -> bool:
    """Tell whether the Hub wants a file as an LFS file."""
    return name.endswith(".safetensors")


Route = Callable[[Hub, Request], Response]
ROUTES: dict[str, list[tuple[str, Route]]] = {"hub": [], "storage": []}


def route(pattern: str, *, server: str = "hub") -> Callable[[Route], Route]:
    """Register the answer to `METHOD path`; groups of the pattern become `request.groups`."""

    def register(function: Route) -> Route:
        ROUTES[server].append((pattern, function))
        return function

    return register


def answer(hub: Hub, request: Request, *, server: str) -> Response:
    """Answer a request, or tell what is wrong with it."""
    for pattern, function in ROUTES[server]:
        match = re.fullmatch(pattern, f"{request.method} {request.path}")
        if match:
            request.groups = {k: unquote(v) for k, v in match.groupdict().items() if v}
            with hub.lock:
                return _permitted(hub, request, server) or function(hub, request)
    return Response.error(404, f"no such endpoint: {request.method} {request.path}")


def _permitted(hub: Hub, request: Request, server: str) -> Response | None:
    """Refuse tokens that are not valid, and repositories that the caller may not see."""
    if server == "storage":
        return None
    if request.token is not None and request.token not in hub.tokens:
        return Response.error(401, "Invalid credentials in Authorization header")
    repo = request.groups.get("repo")
    known = request.token is not None
    if repo is not None and (repo not in hub.repos or (hub.repos[repo]["private"] and not known)):
        return Response.error(404 if known else 401, "Repository not found", code="RepoNotFound")
    if request.method in ("POST", "PUT") and not known and "validate" not in request.path:
        return Response.error(401, "Write access needs a token")
    revision = request.groups.get("revision")
    if repo is not None and revision is not None and hub.head(repo, revision) is None:
        return Response.error(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
    return None


@route(r"GET /api/whoami-v2")
def whoami(hub: Hub, request: Request) -> Response:
    if request.token is None:
        return Response.error(401, "Invalid username or password.")
    orgs = [{"type": "org", "name": ORGANIZATION}]
    access = {"type": "access_token", "accessToken": {"role": "write"}}
    return Response.of({"type": "user", "name": USER, "orgs": orgs, "auth": access})


@route(r"GET /api/models")
def models_of(hub: Hub, request: Request) -> Response:
    """Tell of all public models of an author; the client asks for nothing else."""
    [author] = request.query["author"]
    return Response.of(
        [
            {"_id": git_blob(repo.encode()), "id": repo, "sha": hub.head(repo, "main")}
            for repo, found in hub.repos.items()
            if repo.startswith(f"{author}/") and not found["private"]
        ]
    )


@route(r"GET /api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?")
def model_info(hub: Hub, request: Request) -> Response:
    repo = request.groups["repo"]
    found = hub.repos[repo]
    sha = hub.head(repo, request.groups.get("revision") or "main")
    assert sha is not None
    return Response.of(
        {
            "_id": git_blob(repo.encode()),
            "id": repo,
            "modelId": repo,
            "author": repo.partition("/")[0],
            "sha": sha,
            "private": found["private"],
            "gated": found["gated"],
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": found["card"],
            "siblings": [{"rfilename": path} for path in found["commits"][sha]],
        }
    )


@route(r"GET /api/models/(?P<repo>[^/]+/[^/]+)/refs")
def refs(hub: Hub, request: Request) -> Response:
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
        for name, sha in hub.repos[request.groups["repo"]]["branches"].items()
    ]
    return Response.of({"branches": branches, "tags": [], "converts": []})


@route(r"GET /api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
def tree(hub: Hub, request: Request) -> Response:
    repo = request.groups["repo"]
    sha = hub.head(repo, request.groups["revision"])
    assert sha is not None
    return Response.of(
        [
            {
                "type": "file",
                "path": path,
                "size": entry["size"],
                "oid": entry["blob"],
                **({"lfs": _lfs(entry)} if entry["lfs"] else {}),
            }
            for path, entry in hub.repos[repo]["commits"][sha].items()
        ]
    )


def _lfs(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"oid": entry["sha256"], "size": entry["size"], "pointerSize": 134}


@route(r"(GET|HEAD) /(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(hub: Hub, request: Request) -> Response:
    """Give a small file; of a large one its digest, and where it lies."""
    repo = hub.repos[request.groups["repo"]]
    sha = hub.head(request.groups["repo"], request.groups["revision"])
    headers = {"X-Repo-Commit": str(sha)}
    if repo["gated"] and request.token not in repo["granted"]:
        return Response.error(403, "Access to model is restricted", code="GatedRepo")
    entry = repo["commits"][sha].get(request.groups["path"])
    if entry is None:
        return Response.error(404, "Entry not found", code="EntryNotFound")
    if not entry["lfs"]:
        headers["ETag"] = f'"{entry["blob"]}"'
        return Response(body=hub.path_of(entry["sha256"]).read_bytes(), headers=headers)
    headers |= {"X-Linked-Etag": f'"{entry["sha256"]}"', "X-Linked-Size": str(entry["size"])}
    headers["Location"] = f"{hub.storage_url}/objects/{entry['sha256']}"
    return Response(status=302, headers=headers)


@route(r"(GET|HEAD) /objects/(?P<sha256>\w+)", server="storage")
def read_object(hub: Hub, request: Request) -> Response:
    data = hub.path_of(request.groups["sha256"]).read_bytes()
    return Response(body=data, headers={"ETag": f'"{request.groups["sha256"]}"'})


@route(r"POST /api/repos/create")
def create_repo(hub: Hub, request: Request) -> Response:
    wanted = request.json()
    namespace = wanted.get("organization") or USER
    repo = f"{namespace}/{wanted['name']}"
    if namespace not in (USER, ORGANIZATION):
        return Response.error(403, f"You don't have the rights to create a model under {namespace}")
    url = {"url": f"{hub.url}/{repo}"}
    if repo in hub.repos:
        return Response.of({"error": "You already created this model repo", **url}, status=409)
    hub.create(repo, private=wanted.get("visibility") == "private")
    return Response.of(url)


@route(r"POST /api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<branch>[^/]+)")
def create_branch(hub: Hub, request: Request) -> Response:
    repo, branch = request.groups["repo"], request.groups["branch"]
    if branch in hub.repos[repo]["branches"]:
        return Response.error(409, "Reference already exists")
    sha = hub.head(repo, request.json().get("startingPoint", "main"))
    hub.repos[repo]["branches"][branch] = sha
    hub.save()
    return Response(status=201)


@route(r"PUT /api/models/(?P<repo>[^/]+/[^/]+)/settings")
def settings(hub: Hub, request: Request) -> Response:
    hub.repos[request.groups["repo"]]["private"] = request.json()["visibility"] == "private"
    hub.save()
    return Response.of({"private": hub.repos[request.groups["repo"]]["private"]})


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    """Run a Hub and its storage on free ports of the loopback interface."""
    import hub_uploads  # noqa: F401  # registers its routes

    hub = Hub(root)
    servers = {
        name: ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub, name, answer))
        for name in ROUTES
    }
    hub.url, hub.storage_url = (
        f"http://127.0.0.1:{servers[name].server_port}" for name in ("hub", "storage")
    )
    threads = [
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        for server in servers.values()
    ]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        for server in servers.values():
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


@contextmanager
def used_by_client(hub: Hub) -> Iterator[None]:
    """Let `huggingface_hub` in this process talk to a Hub, without Xet, tokens or long waits."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http, close_session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + FILES)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(hub.root / "cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(hub.root / "no-token"))
        patch.setenv("HF_TOKEN", TOKEN)
        for module in (_http, file_download):
            patch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        close_session()
        try:
            yield
        finally:
            close_session()
