"""Inputs that a stranger might send: changed bytes, JSON, tensors and safetensors headers."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors.torch import load, save

Tensors = dict[str, torch.Tensor]
Change = Callable[[random.Random, bytes], bytes]

STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    255,
    2**31 - 1,
    2**31,
    2**63,
    2**64,
    10**400,
    -(2**63),
    0.5,
    -0.0,
    1e-300,
    1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "\ud800",
    "\0",
    "x" * 10_000,
    "../../../../etc/passwd",
    "/",
    "[",
    "{{ 1 }}",
    "🙂",
    "@deep",
    [],
    {},
    [[]],
    [0],
    ["a"],
    [None],
    {"a": 1},
    {"": {}},
    {"__class__": 1},
)
WORDS = (0, 1, 2, 7, 8, 95, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1)
DEEP = 20_000  # levels of nesting


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return bytes with one to eight flips, cuts, copies and numbers in odd places."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        place = rng.randrange(len(found) + 1)
        length = rng.choice((1, 2, 4, 8, rng.randrange(1, 65)))
        match rng.randrange(8):
            case 0 if place < len(found):
                found[place] ^= 1 << rng.randrange(8)
            case 1 if place < len(found):
                found[place] = rng.choice((0, 0xFF, 0x7F, 0x80, rng.randrange(256)))
            case 2:
                del found[place : place + length]
            case 3:
                found[place:place] = found[place : place + length] * rng.choice((1, 1, 2, 100))
            case 4:
                size = rng.choice((1, 2, 4, 8))
                word = rng.choice(WORDS) % 256**size
                found[place : place + size] = word.to_bytes(size, rng.choice(("little", "big")))
            case 5:
                found[place:place] = rng.randbytes(length)
            case 6 if rng.random() < 0.3:
                del found[place:]
            case _:
                start = rng.randrange(len(found) + 1)
                found[place : place + length] = found[start : start + length]
    return bytes(found)


def changed_json(rng: random.Random, data: bytes) -> bytes:
    """Return a JSON file in which some values are strange, moved or gone, at any depth."""
    whole = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place: Any = whole
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            key = rng.choice(keys) if keys else None
            inside = place[key] if keys else None
            if isinstance(inside, dict | list) and inside and rng.random() < 0.7:
                place = inside
                continue
            break
        _change(rng, place, key, inside)
    return json.dumps(whole).replace('"@deep"', "[" * DEEP + "]" * DEEP).encode()


def _change(rng: random.Random, place: Any, key: Any, inside: object) -> None:
    """Change an item of a list or an object."""
    value = json.loads(json.dumps(rng.choice(STRANGE)))
    kind = rng.randrange(8)
    if isinstance(place, list) and (key is None or kind == 0):
        place.insert(0, value)
    elif key is None or kind == 0:
        place[rng.choice(("new", "", "\ud800", "0"))] = value
    elif kind == 1:
        del place[key]
    elif kind == 2:
        other = rng.choice([*place] if isinstance(place, dict) else [*range(len(place))])
        place[key], place[other] = place[other], place[key]
    elif kind == 3 and isinstance(inside, str):
        place[key] = changed_bytes(rng, inside.encode(errors="replace")).decode(errors="replace")
    elif kind == 4 and isinstance(inside, int | float):
        place[key] = rng.choice(
            (inside + 1, inside - 1, -inside, inside * 2, inside // 3, 0.3, 1e9)
        )
    elif kind == 5 and isinstance(inside, list):
        place[key] = inside * rng.choice((2, 3, 50))
    else:
        place[key] = value


def changed_tensor(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of another shape, another dtype, or with other content."""
    count = len(tensor) if tensor.dim() else 0
    match rng.randrange(10):
        case 0 if count:
            return tensor[:0]
        case 1 if count:
            return tensor[: rng.randrange(1, count + 1)]
        case 2 if tensor.numel():
            return tensor.flatten()[0].clone()
        case 3:
            return tensor.flatten()
        case 4:
            return tensor[None]
        case 5 if count:
            return torch.cat([tensor, tensor])
        case 6:
            dtypes = (torch.int32, torch.int16, torch.float16, torch.float32, torch.int64)
            return tensor.to(rng.choice(dtypes))
        case 7:
            return torch.zeros_like(tensor)
        case 8 if tensor.dim() == 2:
            return tensor.t().contiguous()
        case _:
            changed = tensor.clone().flatten()
            values = (-1, 0, 1, 2, 7, 8, 31, 32, 95, 96, 127, 32767, -32768, float("nan"), 65504)
            for _ in range(rng.choice((1, 1, 2, 8)) if len(changed) else 0):
                value = torch.tensor(rng.choice(values)).to(changed.dtype)
                changed[rng.randrange(len(changed))] = value
            return changed.view(tensor.shape)


def changed_tensors(rng: random.Random, data: bytes) -> bytes:
    """Return a safetensors file some of whose tensors are changed or gone."""
    tensors = load(data)
    for name in rng.sample(sorted(tensors), min(len(tensors), rng.choice((1, 1, 2, 3)))):
        if rng.random() < 0.05:
            del tensors[name]
        elif rng.random() < 0.05:
            tensors[f"{name}.new"] = tensors.pop(name)
        else:
            tensors[name] = changed_tensor(rng, tensors[name]).contiguous()
    return save(tensors)


def changed_header(rng: random.Random, data: bytes) -> bytes:
    """Return a safetensors file with another header: its JSON, its bytes or its length."""
    length = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + length], data[8 + length :]
    header = rng.choice((changed_json, changed_bytes))(rng, header)
    stated = rng.choice((*[len(header)] * 9, rng.choice((*WORDS, 2**63, 2**64 - 1))))
    return stated.to_bytes(8, "little") + header + body


def changed_body(rng: random.Random, data: bytes) -> bytes:
    """Return a safetensors file with the same header and other content."""
    begin = 8 + int.from_bytes(data[:8], "little")
    return data[:begin] + changed_bytes(rng, data[begin:])


def assembled(parts: Sequence[str]) -> Change:
    """Return what joins parts of a language in any order, in place of or behind what there is."""

    def change(rng: random.Random, data: bytes) -> bytes:
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 8)))
        return rng.choice((b"", data)) + text.encode(errors="surrogatepass")

    return change
