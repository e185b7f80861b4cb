"""Options of text generation: the model, its cache, the prompt, and what ends a text."""

from pathlib import Path

from pydantic import Field

from exl2flow.core.options.config import CacheName, Device, Options


class GenerationOptions(Options):
    """What `exl2flow generate` takes besides the settings of the sampler."""

    max_new_tokens: int = Field(128, ge=1, description="tokens at most")
    min_new_tokens: int = Field(
        0, ge=0, description="least number of new tokens before an end-of-text token counts"
    )
    stop: list[str] = Field([], description="texts that end the answer, and are not shown")
    ignore_eos: bool = Field(False, description="go on after the model's end-of-text tokens")
    ban: list[str] = Field([], description="texts that must not appear, in upper or lower case")
    json_schema: str | None = Field(
        None, description="JSON schema of the answer: a file, or the schema itself"
    )
    regex: str | None = Field(None, description="regular expression that the whole answer matches")
    grammar: Path | None = Field(None, description="file with a grammar of the answer, in Lark")
    prefer_end: bool = Field(False, description="end the answer as soon as these allow it")
    end_loops: bool = Field(False, description="end a text that repeats itself without end")
    heal: bool = Field(
        False, description="choose the prompt's last token again, if it may end inside a word"
    )
    no_bos: bool = Field(False, description="do not begin with the model's BOS token")
    special: bool = Field(
        False, description="read special tokens in prompts, and show those of the answer"
    )
    negative_prompt: str | None = Field(
        None, description="prompt to steer away from; needs `cfg_scale`"
    )
    prompts: Path | None = Field(
        None, description="file of prompts to continue at once, a JSON object per line"
    )
    out: Path | None = Field(
        None, description="file for the answers to them, a JSON object per line as each one ends"
    )
    cache: CacheName | None = Field(None, description="format of the key-value cache")
    tokens: int | None = Field(
        None, ge=1, description="cache capacity in tokens, shared by all texts"
    )
    slots: int = Field(16, ge=1, description="texts that are generated at once")
    max_tokens: int | None = Field(None, ge=1, description="longest text, prompt included")
    rope_scale: float | None = Field(None, gt=0, description="divides positions")
    rope_alpha: float | None = Field(
        None, gt=0, description="NTK factor, for texts longer than the model's context"
    )
    rope_yarn: float | None = Field(
        None, ge=1, description="YaRN factor, in place of the model's own way to stretch"
    )
    lora: list[Path] = Field([], description="folder of an adapter that changes the model")
    draft: Path | None = Field(
        None, description="folder of a draft model with the same vocabulary (speculative decoding)"
    )
    ngram: bool = Field(False, description="draft tokens by n-grams of the text so far")
    draft_tokens: int = Field(4, ge=1, le=7, description="most draft tokens per step")
    device: Device = Field("auto", description="auto, cpu or cuda")
    gpu_split: str | None = Field(
        None,
        description="GB that the model and its cache may take on each GPU, as 20,24, 0 to skip "
        "one; or auto: what is free",
    )
    reserve: str | None = Field(
        None,
        description="bytes that an automatic split leaves free, one number or one for each GPU",
    )
    devices: str | None = Field(
        None, description="GPUs to split the model among, as 0,2, in the order of its layers"
    )
