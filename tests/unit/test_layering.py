"""Who may import whom, and where certain words may stand: every file of the package is parsed."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from mapped import MAPPED
from sources import BELOW, FILES, FOLDERS, ROOT, nodes, offenders, parsed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from exl2flow.model.config.families import FAMILIES
from exl2flow.pipeline.stages import REFINE_STAGES, STAGES

PATHS_ONLY = {"exl2flow.calibration_data", "exl2flow.calibration_data.standard"}
PATHS_ONLY |= {"exl2flow.calibration_data.chat", "exl2flow.calibration_data.heldout"}

# library → files that may import it; the rest of the package needs torch, numpy and safetensors
EVERYWHERE = {"torch", "numpy", "safetensors"}
LIBRARIES: dict[str, tuple[str, ...]] = {
    "docket": ("flows/server/",),
    "jinja2": (
        "model/text/template_program.py",
        "inference/report/page.py",
        "inference/report/card.py",
    ),
    "llguidance": ("engine/filters/grammar.py", "engine/filters/trial_program.py"),
    "markdown_it": ("cli/terminal/",),
    "matplotlib": ("inference/report/plots.py",),
    "scipy": ("inference/scoring/intervals.py",),
    "pandas": ("inference/report/frames.py", "quant/tokenize/frame.py"),
    "prefect": ("flows/", "tasks/"),
    "prefect_dask": ("flows/runs/runners.py",),
    "prefect_ray": ("flows/runs/runners.py",),
    "prompt_toolkit": ("cli/terminal/",),
    "packaging": ("cli/work/machine.py",),
    "psutil": ("flows/server/", "cli/work/machine.py"),
    "pyarrow": ("quant/tokenize/", "inference/scoring/text.py", "calibration_data/build.py"),
    "prometheus_client": ("serve/",),
    "pydantic": (
        "core/",
        "cli/",
        "flows/",
        "serve/http/admin.py",
        "serve/answers/answer_schemas.py",
        "serve/answers/bounds.py",
        "serve/answers/fields.py",
        "serve/hosts/keys.py",
        "serve/apis/sections.py",
    ),
    "pydantic_core": ("cli/", "flows/", "model/text/repairs.py", "serve/"),
    "rich": ("cli/",),
    "highspy": ("quant/allocate/knapsack.py",),
    "sentencepiece": ("model/text/sentencepiece_model.py", "model/text/tokenizer.py"),
    "tokenizers": ("model/text/",),
    "typer": ("cli/", "flows/cli/"),
    "cupy": tuple(
        f"kernels/cuda/{name}.py" for name in ("compiler", "exchange", "ops", "ptx", "trial")
    ),
    "huggingface_hub": ("pipeline/hub/", "tasks/revisions.py"),
    "h11": ("serve/http/running.py",),
    "uvicorn": ("flows/server/temporary_process.py", "flows/webhook.py", "serve/"),
    "fastapi": ("flows/webhook.py", "serve/"),
    "httpx": ("flows/webhook.py", "flows/cli/running.py"),  # Prefect's client raises its errors
    "starlette": ("flows/server/application.py", "flows/webhook.py", "serve/"),
    "yaml": ("flows/server/lasting.py", "flows/server/deployments.py"),
    "sqlalchemy": ("flows/server/",),
}
# may import inside functions
LAZY_IMPORTS = (
    "cli/",
    "flows/",
    "kernels/backend.py",
    "model/layers/attention.py",
    "engine/filters/grammar.py",
    "inference/scoring/intervals.py",
)
# may print
PROGRAMS = ("cli/", "flows/cli/", "calibration_data/build.py", "compat/exllamav2/model_init.py")
# what lies directly in a folder: each may import earlier ones only; in quant/ as in the pipeline
ORDER = {
    "core": (
        "errors",
        "words",
        "installing",
        "device_name",
        "model_name",
        "reports",
        "options",
        "runtime",
        "store",
        "requests",
    ),
    "kernels": ("streams", "host_memory", "interface", "reference", "plans", "cuda", "backend"),
    "model": ("config", "files", "text", "layers", "memory", "tensor_parallel"),
    "quant": (
        "walk",
        "tokenize",
        "rounding",
        "sensitivity",
        "measure",
        "allocate",
        "training",
        "quantize",
        "tune",
        "mtp",
        "refine",
        "judge",
        "compile",
        "forecast",
    ),
    "engine": ("loading", "cache", "sampling", "filters", "adapters", "drafts", "generate", "chat"),
    "inference": ("compose", "bench", "scoring", "report", "validate"),
    "flows": (
        "runs",
        "convert",
        "measure",
        "sweep",
        "refine",
        "validate",
        "publish",
        "watch",
        "webhook",
        "server",
        "cli",
    ),
}
ON_PREFECT = ("tasks/", "flows/")
BELOW_PREFECT = [file for file in FILES if not file.startswith(ON_PREFECT)]
PLUGGED = re.compile(r"import_module\(f?\"(exl2flow\.(?:flows|tasks)\.[a-z_]+)")
LONGEST_FILE = 400  # lines of code
LONGEST_FUNCTION = 60  # lines, docstring included
MOST_PARAMETERS = 8
DOCUMENTED_KEYWORDS = {  # of the public interface
    "engine/loading/load.py": {"load_model"},
    "engine/generate/generator.py": {"__init__"},
    "engine/chat/session.py": {"__init__"},
}
PURE_TABLES = ("model/config/families.py", "tests/support/published.py")
STORED_NAMES = ("q_weight", "q_scale", "q_scale_max", "q_groups", "q_invperm", "q_perm")
ARCHITECTURES = {architecture for architecture, _ in FAMILIES}
FAMILY_WORDS = {
    *ARCHITECTURES,
    *MAPPED,
    *(kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in ARCHITECTURES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """A name that a file imports: `a.b.c` for both `import a.b.c` and `from a.b import c`."""

    name: str
    at_top: bool


@cache
def imports(file: str) -> tuple[Import, ...]:
    """Return all imports of a file; those under `if TYPE_CHECKING` do not run and do not count."""
    unreal = {
        id(node)
        for test in nodes(file)
        if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for node in ast.walk(test)
    }
    top = {id(node) for node in parsed(file).body}
    found = []
    for node in nodes(file):
        if not isinstance(node, ast.Import | ast.ImportFrom) or id(node) in unreal:
            continue
        prefix = f"{'.' * node.level}{node.module}." if isinstance(node, ast.ImportFrom) else ""
        found += [Import(name=prefix + a.name, at_top=id(node) in top) for a in node.names]
    return tuple(found)


def strings(file: str) -> Iterator[str]:
    """Yield the string constants of a file except docstrings."""
    docstrings = {id(node.value) for node in nodes(file) if isinstance(node, ast.Expr)}
    for node in nodes(file):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node.value


def is_too_long(file: str) -> bool:
    """Tell whether a file has too many lines without blank ones, comments and docstrings."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    if len(lines) <= LONGEST_FILE:
        return False
    docstrings = {
        line
        for node in nodes(file)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = (line for number, line in enumerate(lines, 1) if number not in docstrings)
    return sum(line.strip()[:1] not in ("", "#") for line in code) > LONGEST_FILE


@cache
def file_of(name: str) -> str | None:
    """Return the file of a module of ours, or of the module that holds the name."""
    parts = name.split(".")[1:]
    for count in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:count])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if candidate in FILES:
                return candidate
    return None


def compared_words(found: Iterable[ast.AST]) -> Iterator[str]:
    """Yield strings in comparisons, `match` cases and arguments of `startswith` and the like."""
    for node in found:
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare | ast.MatchValue):
            parts = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = list(node.args) if node.func.attr in ("startswith", "endswith") else []
        for part in parts:
            for inner in ast.walk(part):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.value


def compared_fields(file: str) -> set[str]:
    """Return the names of attributes that stand in comparisons."""
    comparisons = [node for node in nodes(file) if isinstance(node, ast.Compare)]
    inside = [inner for node in comparisons for inner in ast.walk(node)]
    return {node.attr for node in inside if isinstance(node, ast.Attribute)}


def called_names(file: str) -> set[str]:
    calls = [node for node in nodes(file) if isinstance(node, ast.Call)]
    return {node.func.id for node in calls if isinstance(node.func, ast.Name)}


def test_all_folders_have_files() -> None:
    assert {file.partition("/")[0] for file in FILES} == FOLDERS
    assert len(FILES) > 60


def test_imports_point_down() -> None:
    def above(file: str) -> set[str]:
        folder = file.partition("/")[0]
        own = [i.name.split(".") for i in imports(file) if i.name.partition(".")[0] == "exl2flow"]
        return {parts[1] for parts in own} - BELOW[folder] - {folder}

    assert offenders(above) == {}


@pytest.mark.parametrize("folder", ORDER)
def test_nothing_in_a_folder_imports_what_comes_later(folder: str) -> None:
    order = ORDER[folder]

    def room(file: str) -> str:
        return file.split("/")[1].removesuffix(".py")

    def later(file: str) -> set[str]:
        used = inside & {file_of(i.name) for i in imports(file)}
        return {room(other) for other in used if order.index(room(other)) > order.index(room(file))}

    inside = {file for file in FILES if file.startswith(f"{folder}/")} - {f"{folder}/__init__.py"}
    assert {room(file) for file in inside} == set(order)
    assert offenders(later, inside) == {}


def test_only_its_command_imports_the_http_server() -> None:
    def serving(file: str) -> set[str]:
        return {i.name for i in imports(file) if i.name.startswith("exl2flow.serve")}

    outside = [file for file in FILES if not file.startswith("serve/")]
    assert {*offenders(serving, outside)} == {"cli/commands/serve.py"}


def test_every_stage_is_found_by_its_name() -> None:
    # what `refine` trains and compiles
    variants = {"exl2flow.quant.refine.tuned", "exl2flow.quant.compile.refined"}
    for stage in {*STAGES, *REFINE_STAGES}:
        home = stage.run.__module__
        assert home in variants or home.endswith(f".{stage.name}.stage"), home


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = TopologicalSorter(
        {
            file: {found for i in imports(file) if (found := file_of(i.name)) and found != file}
            for file in FILES
        }
    )

    graph.prepare()  # raises CycleError, which names the files


def test_only_the_paths_of_calibration_data_are_used() -> None:
    def others(file: str) -> set[str]:
        used = {i.name for i in imports(file) if i.name.startswith("exl2flow.calibration_data")}
        return used - PATHS_ONLY

    outside = [file for file in FILES if not file.startswith("calibration_data/")]
    assert offenders(others, outside) == {}


def test_libraries_are_imported_where_they_belong() -> None:
    def misplaced(file: str) -> set[str]:
        roots = {i.name.partition(".")[0] for i in imports(file)}
        foreign = roots - sys.stdlib_module_names - EVERYWHERE - {"exl2flow"}
        return {root for root in foreign if not file.startswith(LIBRARIES.get(root, ("-",)))}

    assert offenders(misplaced) == {}


def test_imports_are_absolute() -> None:
    assert offenders(lambda file: {i.name for i in imports(file) if i.name.startswith(".")}) == {}


def test_no_folder_is_imported_under_its_bare_name() -> None:
    assert offenders(lambda file: {i.name.partition(".")[0] for i in imports(file)} & FOLDERS) == {}


def test_no_folder_is_loaded_under_its_bare_name() -> None:
    loaded = {
        name
        for name in FOLDERS & set(sys.modules)
        if str(ROOT / name) in getattr(sys.modules[name], "__path__", ())
    }

    assert not loaded


def test_imports_stand_at_the_top() -> None:
    eager = [file for file in FILES if not file.startswith(LAZY_IMPORTS)]

    assert offenders(lambda file: {i.name for i in imports(file) if not i.at_top}, eager) == {}


def test_the_command_line_names_what_plugs_in_and_imports_none_of_it() -> None:
    plugged = set(PLUGGED.findall("".join((ROOT / file).read_text() for file in BELOW_PREFECT)))

    assert plugged == {"exl2flow.flows.cli", "exl2flow.tasks.hub_tasks"}


def test_environment_is_read_in_configuration_and_flows_only() -> None:
    reads = {"environ", "environb", "getenv"}

    def read(file: str) -> set[str]:
        names = {node.attr for node in nodes(file) if isinstance(node, ast.Attribute)}
        return names & reads | {i.name for i in imports(file)} & {f"os.{name}" for name in reads}

    allowed = (
        "core/options/environment.py",
        "core/runtime/device_locks.py",
        "pipeline/devices.py",
        "cli/",
        "flows/",
    )  # slots choose the device of a process
    outside = [f for f in FILES if not f.startswith(allowed)]
    assert offenders(read, outside) == {}


def test_stored_tensor_names_are_spelled_in_one_file() -> None:
    spelled = offenders(
        lambda file: {n for text in strings(file) for n in STORED_NAMES if n in text}
    )

    assert set(spelled) == {"model/files/exl2.py"}


def test_no_decision_hangs_on_the_name_of_a_family() -> None:
    def decisions(file: str) -> set[str]:
        fields = compared_fields(file) & {"family", "architecture", "model_type"}
        return FAMILY_WORDS & set(compared_words(nodes(file))) | fields

    outside = [file for file in FILES if file != "model/config/families.py"]
    assert offenders(decisions, outside) == {}


def test_libraries_do_not_print() -> None:
    libraries = [file for file in FILES if not file.startswith(PROGRAMS)]

    assert offenders(lambda file: called_names(file) & {"print"}, libraries) == {}


def test_every_file_opens_with_what_it_owns() -> None:
    silent = [f for f in FILES if parsed(f).body and not ast.get_docstring(parsed(f))]

    assert silent == []


def test_no_file_has_the_name_of_a_standard_module() -> None:
    assert not {Path(file).stem for file in FILES} & sys.stdlib_module_names - {"__main__"}


def test_no_file_is_longer_than_the_limit() -> None:
    others = [
        str(path.relative_to(ROOT))
        for name in ("tests", "demo", "benchmarks", "campaigns")
        for path in (ROOT / name).rglob("*.py")
    ]

    assert set(filter(is_too_long, FILES + others)) <= set(PURE_TABLES)


def functions(file: str) -> Iterator[ast.FunctionDef]:
    """Yield all functions of a file, those in classes and functions included."""
    return (node for node in nodes(file) if isinstance(node, ast.FunctionDef))


def test_functions_are_short() -> None:
    def too_long(file: str) -> set[str]:
        ends = ((f.name, f.lineno, f.end_lineno or f.lineno) for f in functions(file))
        return {name for name, first, last in ends if last - first >= LONGEST_FUNCTION}

    assert offenders(too_long) == {}


def test_functions_have_few_parameters() -> None:
    def too_many(file: str) -> set[str]:
        given = ((f.name, f.args) for f in functions(file))
        counts = ((n, len([*a.posonlyargs, *a.args, *a.kwonlyargs])) for n, a in given)
        return {name for name, count in counts if count > MOST_PARAMETERS}

    own = [file for file in FILES if not file.startswith("compat/")]  # another library's signatures
    assert offenders(too_many, own) == DOCUMENTED_KEYWORDS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('if spec.name == "llama": pass', {"llama"}),
        ('if "qwen2" in names or x in ("mistral", "b"): pass', {"qwen2", "mistral", "b"}),
        ('match x:\n    case "Qwen3ForCausalLM": pass', {"Qwen3ForCausalLM"}),
        ('x.startswith("llama")', {"llama"}),
        ('print("llama")', set()),
    ],
)
def test_comparisons_with_words_are_found(text: str, words: set[str]) -> None:
    assert set(compared_words(ast.walk(ast.parse(text)))) == words
