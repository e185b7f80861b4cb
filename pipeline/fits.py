"""Which EXL2 models of a repository or a folder fit a GPU, from configs and headers of weights.

Nothing here needs a library of an extra. What conversions of an unquantized model would make is
forecast by `quant/forecast/outputs.py`, which does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from exl2flow.core.errors import Exl2FlowError, SourceModelError
from exl2flow.core.model_name import HubName
from exl2flow.core.options.groups import FitOptions
from exl2flow.core.store.model_files import CONFIG_FILE, is_of_model, weight_files
from exl2flow.inference.report.record import read_object
from exl2flow.model import CanonicalTensors, resolve
from exl2flow.model.files.exl2 import is_quantized
from exl2flow.model.layers.mtp import block_in
from exl2flow.model.memory.on_card import OnCard, context_of, needs_of
from exl2flow.model.memory.plan import plan_of
from exl2flow.pipeline.hub.cached import cache_of
from exl2flow.pipeline.hub.client import Hub
from exl2flow.pipeline.hub.fetch import MAIN
from exl2flow.pipeline.hub.named import Offers, offers_of
from exl2flow.pipeline.hub.outline import headers_of
from exl2flow.pipeline.hub.variants import Variant, quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A model that may fit.

    typed: what commands call it; label: what tells it from the others; folder: with its config and
    headers; bits: per weight, None: unknown; size: bytes of all its files.
    """

    typed: str
    label: str
    folder: Path
    bits: float | None
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The models of a repository or folder: EXL2 ones by descending bits, else one to convert."""

    exl2: Sequence[Candidate] = field(default=())
    source: Candidate | None = None


@contextmanager
def found_on_hub(name: HubName, hub: Hub, *, say: Callable[[str], None]) -> Iterator[Found]:
    """Provide the models that a name may mean while the block runs; no weights are fetched.

    Errors of the block name models as they are typed, not their temporary folders.

    Args:
        name: a repository, with a revision, with a choice, or with both.
        hub: a client.
        say: receives lines for the user.

    Raises:
        HubError: no such repository or revision, or it cannot be read.
        SourceModelError: there is no model of that name.
    """
    offers = offers_of(name, hub, say=say)
    chosen = [one for one in offers.models if one.is_exl2]
    if name.choice is not None:
        chosen = offers.named(name.choice)
    sources = [one for one in offers.models if _is_source(one, name)]
    is_exl2 = bool(chosen)
    if not is_exl2 and (name.choice is not None or not sources):
        offers.choose()  # says what there is
    models = chosen or sources[:1]
    with _folders(hub, models) as folders:
        candidates = [
            _offered(offers, model, folder, is_exl2=is_exl2)
            for model, folder in zip(models, folders, strict=True)
        ]
        try:
            yield Found(exl2=candidates) if is_exl2 else Found(source=candidates[0])
        except Exl2FlowError as error:
            text = str(error)
            for one in candidates:
                text = text.replace(str(one.folder), one.typed)
            error.args = (text,)
            raise


def _is_source(model: Variant, name: HubName) -> bool:
    """Return whether `convert` takes this model by the name of its repository."""
    own = (name.revision or MAIN, "")
    return not model.is_exl2 and (model.revision, model.folder) == own


@contextmanager
def _folders(hub: Hub, models: Sequence[Variant]) -> Iterator[Sequence[Path]]:
    """Provide the headers of models, which lie in the cache where the Hub did not list them."""
    if all(model.files for model in models):
        with headers_of(hub, models) as folders:
            yield folders
    else:
        yield [cache_of(one.repo) / "snapshots" / one.commit / one.folder for one in models]


def _offered(offers: Offers, model: Variant, folder: Path, *, is_exl2: bool) -> Candidate:
    source = str(HubName(repo=model.repo, revision=offers.name.revision))
    typed = offers.typed(model) if is_exl2 else source
    label = HubName.of(typed)
    return Candidate(
        typed=typed,
        label=(label and (label.choice or label.revision)) or MAIN,
        folder=folder,
        bits=model.bits,
        size=model.size,
    )


def found_in(folder: Path) -> Found:
    """Return the model of a folder, or the EXL2 models in folders below it, as `sweep` writes them.

    Raises:
        SourceModelError: there are none.
    """
    if not folder.is_dir():
        raise SourceModelError(
            f"no folder `{folder}`; give that of a model, or a name on the Hub as `org/name`"
        )
    if (folder / CONFIG_FILE).exists():
        model = _in_folder(folder)
        return Found(exl2=[model]) if _is_exl2(folder) else Found(source=model)
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG_FILE}"))
    models = [_in_folder(path) for path in inside if weight_files(path) and _is_exl2(path)]
    if not models:
        raise SourceModelError(
            f"`{folder}` holds neither a model (a `{CONFIG_FILE}` beside `*.safetensors`) nor "
            "folders with EXL2 models; give a folder that does, or a name on the Hub as `org/name`"
        )
    return Found(exl2=sorted(models, key=lambda one: (-(one.bits or 0), -one.size)))


def _is_exl2(folder: Path) -> bool:
    spec = resolve(folder)
    tensors = CanonicalTensors(spec)
    return any(is_quantized(p.key, tensors) for p in (*spec.projections, spec.head))


def _in_folder(folder: Path) -> Candidate:
    name, files = folder.resolve().name, (p for p in folder.iterdir() if p.is_file())
    _, bits = quantized(read_object(folder / CONFIG_FILE), name, "", "")
    return Candidate(
        typed=str(folder),
        label=name,
        folder=folder,
        bits=bits,
        size=sum(path.stat().st_size for path in files if is_of_model(path.name)),
    )


def on_card(model: Candidate, wanted: FitOptions) -> OnCard:
    """Return what an EXL2 model takes of a GPU's memory.

    Args:
        model: with its folder.
        wanted: the GPU's memory, and the context and the cache for which it must suffice.

    Raises:
        SourceModelError: its config or the headers of its weights are damaged or not supported.
        ConfigError: the context exceeds the model's positions.
    """
    spec = resolve(model.folder)
    context = context_of(spec, wanted.context)
    plan = plan_of(model.folder, context=context, cache_format=wanted.cache)
    needs = needs_of(spec, cache_format=wanted.cache, block=block_in(spec))
    return OnCard.of(plan, needs, memory=int(wanted.memory), positions=spec.max_positions)
