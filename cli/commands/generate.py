"""`exl2flow generate`: complete a prompt, printing the text as it comes, or a file of prompts."""

from typing import Annotated

import typer

from exl2flow.cli.options import ModelFolder, local, with_options
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.generation import GenerationOptions
from exl2flow.core.options.sampling import SamplingSettings

EXAMPLES = (
    "exl2flow generate ./Llama-3.2-1B-4.0bpw --prompt 'Once upon a time'",
    "exl2flow generate ./model --prompt 'The capital of France is' --greedy --max-new-tokens 8",
    "exl2flow generate ./model --prompt 'Dear Sir' --seed 1 --temperature 1 --min-p 0.1 --json",
    "exl2flow generate ./model --prompt 'A person: ' --json-schema person.json",
    "exl2flow generate ./model --prompt 'Once upon a time' --draft ./smaller-model",
    "exl2flow generate ./model --prompts prompts.jsonl --out answers.jsonl --slots 32 --cache q6",
)


@with_options()
def generate(
    model: ModelFolder,
    *,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to continue.")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object at the end, with the exact text; otherwise control "
            "characters are replaced.",
        ),
    ] = False,
    options: GenerationOptions,
    settings: SamplingSettings,
) -> None:
    """Generate text from a model. The prompt is plain text unless --special is given."""
    if (prompt is None) == (options.prompts is None):
        raise ConfigError("give either `--prompt` or `--prompts`")
    if options.prompts is None and options.out is not None:
        raise ConfigError("`--out` goes with `--prompts`")
    if prompt is None and (as_json or options.negative_prompt is not None):
        raise ConfigError("`--json` and `--negative-prompt` go with `--prompt`")
    from exl2flow.cli.work.completion import complete, complete_all  # imports torch

    model = local(model, plain=as_json)
    settings = SamplingSettings.greedy() if options.greedy else settings
    if prompt is not None:
        complete(model, prompt, options, settings, as_json=as_json)
    else:
        complete_all(model, options, settings)
