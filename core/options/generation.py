"""Options of text generation: the model, its cache, the prompt, and what ends a text."""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ByteSize, Field

from exl2flow.core.options.base import (
    MOST_STRETCH,
    CacheName,
    DeviceOption,
    Devices,
    GpuSplit,
    Option,
    Options,
    Reserve,
    Size,
)

MODEL: Final = "Model and cache"
DRAFT_WORDS = ("mtp", "none")  # instead of a folder; one of that name is `./mtp`
EmbeddingPlace = Literal["auto", "cpu", "gpu"]
DRAFTS: Final = "Speculative decoding (same text)"


class PlacementOptions(Options):
    """The devices of a model that generates text, and the format of its cache."""

    device: Annotated[DeviceOption, Option("auto|cpu|cuda", MODEL)] = "auto"
    gpu_split: Annotated[GpuSplit, Option("GB,…|auto", MODEL, rare=True)] = None
    reserve: Annotated[Reserve, Option("BYTES,…", MODEL, rare=True)] = None
    devices: Annotated[Devices, Option("N,…", MODEL, rare=True)] = None
    tensor_parallel: Annotated[str | None, Option("N|all", MODEL, rare=True)] = Field(
        default=None,
        description="GPUs that share each layer, the first ones or those of `devices`, each with a "
        "process of its own; empty: a layer lies on one GPU",
    )
    cache: Annotated[CacheName | None, Option("FORMAT", MODEL)] = Field(
        default=None,
        description="key-value cache: fp16, fp8, q8, q8/q6, q6, q6/q4, q4; empty: as computed",
    )
    embedding: Annotated[EmbeddingPlace, Option("auto|cpu|gpu", MODEL, rare=True)] = Field(
        default="auto",
        description="memory of the embedding; auto: the host's from 0.5 GB on, where the GPU reads "
        "the rows that it needs",
    )


class BenchOptions(PlacementOptions):
    """Options of `exl2flow bench`."""

    context: Annotated[int, Option("N", MODEL)] = Field(
        default=512, ge=1, description="tokens before the decoded ones"
    )
    rows: Annotated[str, Option("N,…", MODEL)] = Field(
        default="1,4,16", description="numbers of texts that are decoded at once, with commas"
    )


class DrawOptions(Options):
    """Seed and greedy sampling, which `SamplingSettings` does not hold."""

    seed: Annotated[int | None, Option("N", "Sampling")] = Field(
        default=None,
        ge=0,
        description="seed for sampling: the same seed gives the same text; empty: a new one every "
        "time",
    )
    greedy: Annotated[bool, Option(panel="Sampling")] = Field(
        default=False, description="always take the likeliest token, whatever the other options say"
    )


class LoadOptions(PlacementOptions):
    """Options by which `generate`, `chat` and `serve` load a model, change it and draft for it."""

    lora: Annotated[list[Path], Option("FOLDER", MODEL)] = Field(
        default=[], description="folder of an adapter that changes the model"
    )
    max_tokens: Annotated[int | None, Option("N", MODEL)] = Field(
        default=None, ge=1, description="longest text, prompt included; empty: the model's context"
    )
    cache_ram: Annotated[Size, Option("SIZE", MODEL)] = Field(
        default=ByteSize(0),
        ge=0,
        description="host memory for parts of prompts that left the cache",
    )
    cache_disk: Annotated[Path | None, Option("FOLDER", MODEL)] = Field(
        default=None,
        description="folder that keeps read prompts for later runs, as private as they are",
    )
    cache_disk_size: Annotated[Size, Option("SIZE", MODEL, rare=True)] = Field(
        default="20GB",
        ge=0,
        validate_default=True,
        description="size of `cache_disk` at most; what was used least recently goes first",
    )
    clear_cache: Annotated[bool, Option(panel=MODEL, rare=True)] = Field(
        default=False, description="first delete what `cache_disk` keeps, of all models"
    )
    state_memory: Annotated[Size, Option("SIZE", MODEL, rare=True)] = Field(
        default="4GB",
        ge=0,
        validate_default=True,
        description="host memory for states behind prompts, of models whose layers have states",
    )
    rope_scale: Annotated[float | None, Option("X", MODEL, rare=True)] = Field(
        default=None, ge=1 / MOST_STRETCH, le=MOST_STRETCH, description="divides positions"
    )
    rope_alpha: Annotated[float | None, Option("X", MODEL, rare=True)] = Field(
        default=None,
        ge=1 / MOST_STRETCH,
        le=MOST_STRETCH,
        description="NTK factor, for texts longer than the model's context",
    )
    rope_yarn: Annotated[float | None, Option("X", MODEL, rare=True)] = Field(
        default=None,
        ge=1,
        le=MOST_STRETCH,
        description="YaRN factor, instead of the model's own way to stretch",
    )
    draft: Annotated[str | None, Option("MODEL|mtp", DRAFTS)] = Field(
        default=None,
        description="folder of a draft model; mtp: the own block",
    )
    ngram: Annotated[bool, Option(panel=DRAFTS)] = Field(
        default=False,
        description="draft tokens by n-grams; also with `draft`",
    )
    draft_tokens: Annotated[int | None, Option("N", DRAFTS, rare=True)] = Field(
        default=None,
        ge=1,
        le=15,
        description="most draft tokens per step; empty: 4 of a model, 15 of n-grams",
    )

    @property
    def draft_folder(self) -> Path | None:
        """The folder of a draft model."""
        is_word = self.draft is None or self.draft in DRAFT_WORDS
        return None if is_word else Path(self.draft or "").expanduser()


class SlotOptions(LoadOptions):
    """Room for several texts at once, besides how a model is loaded."""

    tokens: Annotated[int | None, Option("N", MODEL)] = Field(
        default=None,
        ge=1,
        description="cache capacity in tokens, shared by all texts; empty: one context, or as many "
        "as fit",
    )
    slots: Annotated[int, Option("N", MODEL)] = Field(
        default=16, ge=1, description="texts that are generated at once"
    )


class ModelOptions(LoadOptions):
    """Options for what all texts must and must not hold, and for loading a model."""

    ban: Annotated[list[str], Option("TEXT", "Stopping")] = Field(
        default=[], description="text that must not appear, in upper or lower case"
    )
    json_schema: Annotated[str | None, Option("FILE|JSON", "Constraints")] = Field(
        default=None, description="JSON schema of the answer: a file, or the schema itself"
    )
    regex: Annotated[str | None, Option("REGEX", "Constraints")] = Field(
        default=None, description="regular expression that the whole answer matches"
    )
    grammar: Annotated[Path | None, Option("FILE", "Constraints")] = Field(
        default=None, description="file with a grammar of the answer, in Lark"
    )


class GenerationOptions(ModelOptions, SlotOptions, DrawOptions):
    """Options of `exl2flow generate` besides those of the sampler."""

    prompts: Annotated[Path | None, Option("FILE", "Prompt")] = Field(
        default=None, description="file of prompts to continue at once, a JSON object per line"
    )
    out: Annotated[Path | None, Option("FILE", "Prompt")] = Field(
        default=None,
        description="file for the answers to them, a JSON object per line as each one ends; "
        "empty: stdout",
    )
    negative_prompt: Annotated[str | None, Option("TEXT", "Prompt")] = Field(
        default=None, description="prompt to steer away from; needs `--cfg-scale`"
    )
    heal: Annotated[bool, Option(panel="Prompt")] = Field(
        default=False,
        description="choose the prompt's last token again, if it may end inside a word",
    )
    no_bos: Annotated[bool, Option(panel="Prompt", rare=True)] = Field(
        default=False, description="do not begin with the model's BOS token"
    )
    special: Annotated[bool, Option(panel="Prompt")] = Field(
        default=False, description="read special tokens in prompts, and show those of the answer"
    )
    max_new_tokens: Annotated[int, Option("N", "Stopping")] = Field(
        default=128, ge=1, description="tokens at most"
    )
    min_new_tokens: Annotated[int, Option("N", "Stopping")] = Field(
        default=0, ge=0, description="least number of new tokens before an end-of-text token counts"
    )
    stop: Annotated[list[str], Option("TEXT", "Stopping")] = Field(
        default=[], description="text that ends the answer, and is not shown"
    )
    ignore_eos: Annotated[bool, Option(panel="Stopping")] = Field(
        default=False, description="go on after the model's end-of-text tokens"
    )
    end_loops: Annotated[bool, Option(panel="Stopping", rare=True)] = Field(
        default=False, description="end a text that repeats itself without end"
    )
    prefer_end: Annotated[bool, Option(panel="Constraints", rare=True)] = Field(
        default=False, description="end the answer as soon as these allow it"
    )
