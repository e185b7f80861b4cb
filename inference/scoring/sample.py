"""A short sample of a model, whole in memory or streamed from disk."""

from pathlib import Path

from exl2flow.inference.generate.generator import Generator
from exl2flow.inference.loading.load import SAMPLE_PROMPT_TOKENS, load_for_sample


def sample_text(model_dir: Path, prompt: str, *, tokens: int, seed: int, device: str) -> str:
    """Return a seeded continuation of a prompt by a model folder; see `load_for_sample`."""
    model = load_for_sample(model_dir, device=device, tokens=tokens)
    room = min(model.max_tokens, SAMPLE_PROMPT_TOKENS + tokens)
    generator = Generator(model, tokens=room, slots=1)
    return generator.generate(prompt, max_new_tokens=tokens, seed=seed)
