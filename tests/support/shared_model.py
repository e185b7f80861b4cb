"""One of several processes that share models: `python shared_model.py RANK COUNT FOLDER DEVICE`.

FOLDER has a model in each folder; results go to `RANK.pt`. DEVICE is cpu, cuda:0 (of all, through
gloo) or cuda (one each, through NCCL). With a fifth argument, rank 1 ends without a word at that
place: load, prompt or step.
"""

import os
import sys
from pathlib import Path

import checkout  # noqa: F401  # the package in a bare checkout
import torch

from exl2flow.core.errors import Exl2FlowError
from exl2flow.inference import Generator, LoadedModel, Request, SamplingSettings, load_model
from exl2flow.model.tensor_parallel.ranks import Ranks

IDS = [5, 6, 250, 7, 8, 9, 13, 14, 15] * 4
SEEN, SEEN_BY_GPU = 8, 100  # tokens that are read one by one


@torch.inference_mode()
def results(model: LoadedModel) -> dict[str, object]:
    """Return logits of a prompt, and of steps behind it, and ids of texts."""
    whole = model.decoder.forward(torch.tensor([IDS, IDS[::-1]])).cpu()
    generator = Generator(model, slots=2, tokens=512)
    count = SEEN_BY_GPU if model.decoder.embedding.weight.is_cuda else SEEN
    settings = (SamplingSettings.greedy(), SamplingSettings(temperature=1.5))
    ids, logits = list[list[int]](), list[torch.Tensor]()
    for each in settings:
        request = Request(IDS, max_new_tokens=count, settings=each, seed=1, stops=(), logits=True)
        events = [*generator.stream(request)]
        ids.append([token for event in events for token in event.ids])
        logits += [x for event in events for x in event.logits if x is not None]
    requests = [Request(IDS, max_new_tokens=SEEN, settings=each, stops=()) for _ in range(2)]
    seedless = [[*generator.stream(request)] for request in requests]
    return {
        "prompt": whole,
        "steps": torch.stack(logits).cpu(),
        "ids": ids,
        "seedless": [[token for event in events for token in event.ids] for events in seedless],
    }


def main(rank: int, count: int, folder: Path, device: str, dies_in: str = "") -> None:
    torch.set_num_threads(1)
    models = sorted(path.parent for path in folder.glob("[!.]*/config.json"))

    def dies(place: str) -> None:
        if rank == 1 and place == dies_in:
            os._exit(9)

    where = None if device == "cpu" else torch.device(device if ":" in device else f"cuda:{rank}")
    backend = "gloo" if ":" in device else None
    method = f"file://{folder / 'meeting'}"
    try:
        with Ranks.join(method, rank=rank, count=count, device=where, backend=backend) as ranks:
            dies("load")
            made = {}
            for path in models:
                model = load_model(path, device=str(where or "cpu"), ranks=ranks)
                model.decoder.forward(torch.tensor([IDS]))
                dies("prompt")
                model.decoder.forward(torch.tensor([[5]]))
                dies("step")
                made[path.name] = results(model)
                if where is not None:
                    again = results(model)
                    assert all(
                        torch.equal(again[x], made[path.name][x]) for x in ("prompt", "steps")
                    )
        torch.save(made, folder / f"{rank}.pt")
    except Exl2FlowError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(3)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
