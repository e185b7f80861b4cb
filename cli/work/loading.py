"""Load model, draft model and filters for commands that generate; its imports take seconds."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from exl2flow.cli.output.console import say
from exl2flow.core import words
from exl2flow.core.errors import ConfigError, OutOfDeviceMemory
from exl2flow.core.options.generation import LoadOptions, ModelOptions, PlacementOptions
from exl2flow.core.requests.request import Filter
from exl2flow.engine import (
    Draft,
    Generator,
    HybridDraft,
    LoadedModel,
    Mtp,
    NgramDraft,
    PromptCache,
    load_model,
)
from exl2flow.engine.cache.page_files import clear
from exl2flow.engine.drafts import Drafter
from exl2flow.engine.drafts.mtp import has_block
from exl2flow.engine.filters import GrammarFilter
from exl2flow.engine.loading.layer_split import Split, numbers
from exl2flow.pipeline.devices import choose_allocator


def split_of(
    options: PlacementOptions, *, tokens: int | None, slots: int, draft: Path | None = None
) -> Split | None:
    """Return how a model is split among GPUs, with room for all else; see `Split`."""
    if options.tensor_parallel is not None:
        return None
    return Split.of(options, tokens=tokens, cache=options.cache, slots=slots, draft=draft)


def shared_by(options: PlacementOptions) -> int | str | tuple[int, ...] | None:
    """Return what shares each layer of a model; see `load_model`.

    Raises:
        ConfigError: it is not a number, does not fit the devices, or a split is asked for, too.
    """
    text, devices = options.tensor_parallel, numbers("devices", options.devices, int)
    if text is None:
        return None
    if options.gpu_split is not None or options.reserve is not None:
        raise ConfigError("`--tensor-parallel` and a split of layers are two ways; give one")
    if text != "all" and not (text.isdecimal() and int(text)):
        raise ConfigError(f"`--tensor-parallel {text}` is neither a number of GPUs nor `all`")
    if devices is None:
        return text if text == "all" else int(text)
    if text not in ("all", str(len(devices))):
        raise ConfigError(f"`--tensor-parallel {text}`, but `--devices` names {len(devices)}")
    return devices


def load(
    model: Path, options: LoadOptions, *, slots: int, tokens: int | None = None
) -> LoadedModel:
    """Load a model as the options say; a split leaves room for the logits of `slots` texts."""
    choose_allocator()
    return load_model(
        model,
        device=options.device,
        placement=split_of(options, tokens=tokens, slots=slots, draft=options.draft_folder),
        tensor_parallel=shared_by(options),
        embedding=options.embedding,
        max_tokens=options.max_tokens,
        rope_scale=options.rope_scale,
        rope_alpha=options.rope_alpha,
        rope_yarn=options.rope_yarn,
    )


def load_draft(options: LoadOptions, model: LoadedModel) -> Drafter | None:
    """Return what proposes draft tokens, on the device of the model's head."""
    tokens = {} if options.draft_tokens is None else {"tokens": options.draft_tokens}
    copies = NgramDraft(**tokens) if options.ngram else None
    other: Draft | Mtp | None = None
    if options.draft == "mtp":
        other = Mtp(**tokens)
    elif options.draft_folder is not None:
        device = str(model.decoder.placement.head)
        other = Draft(model=load_model(options.draft_folder, device=device), **tokens)
    if copies is None or other is None:
        return copies or other
    return HybridDraft(other=other, copies=copies)


def with_own_draft(
    options: LoadOptions, model: LoadedModel, make: Callable[[Drafter | None], Generator]
) -> Callable[[], Generator]:
    """Return what makes a generator that drafts with the model's own MTP block, if it may.

    If the block does not fit in memory, this warns and generates without it.
    """
    asked_for = load_draft(options, model)
    if options.draft is not None or not has_block(model):
        return partial(make, asked_for)
    own = load_draft(options.model_copy(update={"draft": "mtp"}), model)

    def attempt() -> Generator:
        try:
            return make(own)
        except (OutOfDeviceMemory, torch.OutOfMemoryError) as error:
            cause = words.cause(error)
        say(f"warning: the MTP block is left out, texts come slower: {cause}", style="yellow")
        return make(asked_for)

    return attempt


def prompt_cache(options: LoadOptions) -> PromptCache:
    """Return where read prompts are kept, which is said, and cleared first if so asked.

    Raises:
        ConfigError: options do not go together, or the folder is not ours.
    """
    folder = options.cache_disk
    if folder is None and options.clear_cache:
        raise ConfigError("`--clear-cache` goes with `--cache-disk`")
    if folder is not None:
        if options.clear_cache:
            clear(folder)
        say(f"`{folder}` keeps prompts and answers in readable form; only you may read it")
    return PromptCache(
        ram=options.cache_ram,
        disk=folder,
        disk_size=options.cache_disk_size,
        states=options.state_memory,
    )


def filters_of(options: ModelOptions) -> list[Filter]:
    """Return what all answers must match: a schema or its file, an expression, a grammar's file.

    Raises:
        ConfigError: one of them is broken, or a file cannot be read.
    """
    filters = list[Filter]()
    if (schema := options.json_schema) is not None:
        is_text = schema.lstrip().startswith("{")
        text = schema if is_text else read_text(Path(schema))
        filters.append(GrammarFilter(json_schema=text))
    if options.regex is not None:
        filters.append(GrammarFilter(regex=options.regex))
    if options.grammar is not None:
        filters.append(GrammarFilter(lark=read_text(options.grammar)))
    return filters


def read_text(path: Path) -> str:
    """Return a text file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read `{path}`: {words.cause(error)}") from error
