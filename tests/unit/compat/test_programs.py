"""A chat program over star imports, as users write it."""

import torch

CHAT = """
from exl2flow.compat.exllamav2 import *
from exl2flow.compat.exllamav2.generator import *

config = ExLlamaV2Config(folder)
model = ExLlamaV2(config)
cache = ExLlamaV2Cache(model, max_seq_len=1024, lazy=True)
model.load_autosplit(cache, progress=False)
tokenizer = ExLlamaV2Tokenizer(config)
generator = ExLlamaV2DynamicGenerator(model=model, cache=cache, tokenizer=tokenizer)

context, answers = torch.empty(1, 0, dtype=torch.long), []
for question in ("Hello?", "And then?", "Why?"):
    asked = f"\\nUser: {question}\\nBot:"
    context = torch.cat([context, tokenizer.encode(asked, add_bos=not answers)], dim=-1)
    job = ExLlamaV2DynamicJob(
        input_ids=context, max_new_tokens=12, seed=1,
        gen_settings=ExLlamaV2Sampler.Settings(temperature=0.9, top_p=0.8),
        stop_conditions=[tokenizer.eos_token_id, "User:"],
    )
    generator.enqueue(job)
    answer, eos = "", False
    while not eos:
        for result in generator.iterate():
            if result["stage"] == "streaming":
                answer += result.get("text", "")
                if "token_ids" in result:
                    context = torch.cat([context, result["token_ids"]], dim=-1)
                eos = result["eos"]
                last = result
    answers.append(answer)
"""


def test_a_chat_over_star_imports_reads_only_what_is_new(folder) -> None:
    names = {"folder": str(folder), "torch": torch}

    exec(CHAT, names)

    assert len(names["answers"]) == 3
    assert all(names["answers"])
    assert names["last"]["cached_tokens"] > names["last"]["prompt_tokens"] // 2
