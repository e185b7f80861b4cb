"""Continue a few prompts greedily with the demo model and print the share of distinct trigrams."""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

HERE = Path(__file__).resolve().parent
PROMPTS = [
    "One morning",
    "One morning, Nora",
    "Once there was a",
    "Dear Peter,\n\n",
    "How to bake a loaf of bread\n\n",
    "The fox is a",
    "News from",
]


def trigram_share(tokens: list[int]) -> float:
    """Return the share of distinct trigrams among all trigrams."""
    trigrams = list(zip(tokens, tokens[1:], tokens[2:], strict=False))
    return len(set(trigrams)) / max(1, len(trigrams))


@torch.inference_mode()
def greedy(model: LlamaForCausalLM, prompt: list[int], count: int) -> list[int]:
    """Return exactly `count` greedy tokens after the prompt; an end token does not stop it."""
    tokens = torch.tensor([prompt])
    output = model(input_ids=tokens, use_cache=True)
    new: list[int] = []
    for _ in range(count):
        new.append(int(output.logits[0, -1].argmax()))
        step = torch.tensor([[new[-1]]])
        output = model(input_ids=step, past_key_values=output.past_key_values, use_cache=True)
    return new


def main() -> None:
    """Print greedy text for the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    for prompt in arguments.prompts:
        new = greedy(model, tokenizer.encode(prompt).ids, arguments.tokens)
        text = tokenizer.decode(new, skip_special_tokens=False)
        print(f"--- distinct trigrams {trigram_share(new):.2f}\n{prompt}{text}\n")


if __name__ == "__main__":
    main()
