"""Licences of sources that allow anybody to redistribute a converted model.

Ids are those of the Hub. A licence in neither table, including `other` and `unknown`, is treated as
forbidden: somebody has to read it and decide.
"""

ALLOWED = frozenset(
    (
        "apache-2.0",
        "mit",
        "bsd",
        "bsd-2-clause",
        "bsd-3-clause",
        "bsd-3-clause-clear",
        "isc",
        "cc0-1.0",
        "cc-by-2.0",
        "cc-by-2.5",
        "cc-by-3.0",
        "cc-by-4.0",
        "unlicense",
        "zlib",
        "cc-by-sa-3.0",
        "cc-by-sa-4.0",
        "wtfpl",
        "bsl-1.0",
        "afl-3.0",
        "ecl-2.0",
        "ms-pl",
        "artistic-2.0",
        "mpl-2.0",
        "epl-2.0",
        "eupl-1.2",
        "ncsa",
        "postgresql",
        "pddl",
        "gpl",
        "gpl-2.0",
        "gpl-3.0",
        "agpl-3.0",
        "lgpl",
        "lgpl-2.1",
        "lgpl-3.0",
        "osl-3.0",
        "cdla-permissive-1.0",
        "cdla-permissive-2.0",
        "odc-by",
        "odbl",
        "openmdw-1.0",
        # with conditions of use that pass on with the model
        "openrail",
        "openrail++",
        "bigscience-openrail-m",
        "bigcode-openrail-m",
        "creativeml-openrail-m",
        "bigscience-bloom-rail-1.0",
        "llama2",
        "llama3",
        "llama3.1",
        "llama3.2",
        "llama3.3",
        "llama4",
        "gemma",
    )
)
NO_COMMERCE = "forbids commercial use"
NO_CHANGES = "forbids redistributing modified versions"
RESEARCH = "allows research only"
FORBIDDEN: dict[str, str] = {
    **dict.fromkeys(("cc-by-nc-2.0", "cc-by-nc-3.0", "cc-by-nc-4.0"), NO_COMMERCE),
    **dict.fromkeys(("cc-by-nc-sa-2.0", "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0"), NO_COMMERCE),
    **dict.fromkeys(("cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0"), f"{NO_COMMERCE} and {NO_CHANGES}"),
    "cc-by-nd-4.0": NO_CHANGES,
    "deepfloyd-if-license": RESEARCH,
    "apple-amlr": RESEARCH,
    "intel-research": RESEARCH,
    "h-research": RESEARCH,
    "fair-noncommercial-research-license": f"{NO_COMMERCE} and {RESEARCH}",
}


def licence_problem(license: str | None, name: str | None = None) -> str:
    """Return why a licence does not allow publishing, nothing if it does.

    Args:
        license: the Hub's id, None if the source states none.
        name: the licence that `other` stands for.
    """
    if license is None:
        return "the source states no licence; give its id with `--license` if you know it"
    if license in ALLOWED:
        return ""
    if license in FORBIDDEN:
        return f"the source's licence `{license}` {FORBIDDEN[license]}"
    called = f"{license} ({name})" if name else license
    return f"the source's licence `{called}` is not in the table of known ones; read it first"
