"""A paged cache in a whole model: what its views promise."""

from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import SIGMAS, error, near, terms_of
from caches import FORMATS, Sequences
from paged import TOKENS, Pool, assert_same, lost
from tiny import make_tiny

from exl2flow.core.errors import ConfigError
from exl2flow.engine.cache.paged import cache_format
from exl2flow.engine.cache.views import PromptView, Segment
from exl2flow.inference import LoadedModel, load_model
from exl2flow.kernels import CACHE_FORMATS, PAGE_TOKENS, AttentionRule, LayerStore
from exl2flow.kernels.reference.cache import attend_step, read_cache
from exl2flow.kernels.reference.ops import Ops
from exl2flow.model import RopeTable, RopeTables

FAMILIES: dict[str, dict[str, object]] = {"llama": {}, "mistral": {"sliding_window": 40}}
of_families = pytest.mark.parametrize("family", FAMILIES)
of_formats = pytest.mark.parametrize(
    ("family", "name"),
    [*(("llama", name) for name in FORMATS), ("mistral", "fp16"), ("mistral", "q4")],
)
LENGTHS = (5, 300, 1, 7, 4, 260, 40)  # of prompts; several fall into one group


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    folder = tmp_path_factory.mktemp("models")
    for family, windows in FAMILIES.items():
        make_tiny(family, folder / family, max_position_embeddings=512, **windows)
    return {family: load_model(folder / family, device="cpu") for family in FAMILIES}


@pytest.fixture
def model(models: dict[str, LoadedModel], family: str) -> LoadedModel:
    return models[family]


def random_ids(model: LoadedModel, count: int) -> torch.Tensor:
    return torch.randint(0, model.spec.vocab_size, (count,))


@pytest.fixture
def most(model: LoadedModel, name: str) -> float:
    """Return what a cache of the format changes in a logit, at most: all elements are rounded."""
    ids = random_ids(model, 300)
    with torch.inference_mode():
        found, exact = (Pool(model, form).prompt(ids).logits for form in (name, "fp32"))
    return float((found - exact).abs().max())


@of_formats
@torch.inference_mode()
def test_passes_with_a_cache_predict_what_full_passes_do(model: LoadedModel, name: str) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (2, TOKENS))
    exact = model.decoder.forward(ids).double()
    expected, size = torch.log_softmax(exact, dim=-1), float(exact.square().mean().sqrt())
    cache = Sequences(model.spec, batch=2, tokens=TOKENS, name=name)

    pieces = [ids[:, :100], ids[:, 100:250], *ids[:, 250:].split(1, dim=1)]
    logits = torch.cat([cache.read(model.decoder.forward, piece) for piece in pieces], dim=1)

    found = torch.log_softmax(logits.double(), dim=-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    # half the variance of the logits' errors: of sums, and of what each layer reads from its cache
    of_sums = (SIGMAS * error(terms_of(model.spec, TOKENS)) * size) ** 2 / 2
    form = CACHE_FORMATS[name]
    of_steps = model.spec.num_layers * (lost(form.keys) + lost(form.values)) * size**2 / 2
    assert 0 <= float(kl) < of_sums + of_steps


@of_formats
@torch.inference_mode()
def test_prompts_of_one_pass_are_read_as_each_alone(
    model: LoadedModel, name: str, most: float
) -> None:
    prompts = [random_ids(model, count) for count in LENGTHS]
    together, alone = Pool(model, name), Pool(model, name)
    pages = [together.pages(len(ids)) for ids in prompts]

    found = together.read([(p, 0, ids) for p, ids in zip(pages, prompts, strict=True)])

    for p, logits, ids in zip(pages, found, prompts, strict=True):
        text = together.text(p, len(ids), logits)
        assert_same(model.spec, text, alone.prompt(ids), most)


@of_formats
@torch.inference_mode()
def test_a_prompt_may_be_cut_anywhere(model: LoadedModel, name: str, most: float) -> None:
    ids, whole = random_ids(model, 300), Pool(model, name)
    expected = whole.prompt(ids)

    for cuts in ((1,), (40, 41), (255, 257), (256,), (100, 200, 280)):
        parts = Pool(model, name)
        pages = parts.pages(300)
        found = [parts.read([(pages, b, ids[b:e])])[0] for b, e in pairwise((0, *cuts, 300))]
        assert_same(model.spec, parts.text(pages, 300, torch.cat(found)), expected, most)


@of_formats
@torch.inference_mode()
def test_ends_of_some_prompts_and_beginnings_of_others_share_a_pass(
    model: LoadedModel, name: str, most: float
) -> None:
    prompts = [random_ids(model, count) for count in LENGTHS]
    pool, alone = Pool(model, name), Pool(model, name)
    pages = [pool.pages(len(ids)) for ids in prompts]
    cuts = [len(ids) // 2 * (index % 2) for index, ids in enumerate(prompts)]
    pool.read([(p, 0, i[:c]) for p, i, c in zip(pages, prompts, cuts, strict=True) if c])

    found = pool.read([(p, c, i[c:]) for p, i, c in zip(pages, prompts, cuts, strict=True)])

    for p, logits, ids, cut in zip(pages, found, prompts, cuts, strict=True):
        whole = alone.prompt(ids)
        expected = whole._replace(logits=whole.logits[cut:])
        assert_same(model.spec, pool.text(p, len(ids), logits), expected, most)


@of_formats
@torch.inference_mode()
def test_a_prompt_changes_nothing_of_its_neighbours(model: LoadedModel, name: str) -> None:
    prompts = [random_ids(model, count) for count in (5, 7, 4)]
    pool = Pool(model, name)
    pages = [pool.pages(len(ids)) for ids in prompts]

    def read() -> list[torch.Tensor]:
        found = pool.read([(p, 0, ids) for p, ids in zip(pages, prompts, strict=True)])
        kept = [pool.stored(p, len(ids)) for p, ids in zip(pages, prompts, strict=True)]
        return [found[0], found[2], *kept[0], *kept[2]]

    before = read()
    prompts[1] = (prompts[1] + 1) % model.spec.vocab_size

    assert all(map(torch.equal, before, read()))
    unused = [rows.data.view(-1, PAGE_TOKENS, rows.data.shape[1]) for rows in pool.rows()]
    others = sorted({*range(pool.cache.pages + 1)} - {page for p in pages for page in p})
    assert all((pages[others] == 255).all() for pages in unused)


@pytest.mark.parametrize("name", FORMATS)
@torch.inference_mode()
def test_a_token_of_a_prompt_sees_itself_as_it_is_stored(tmp_path: Path, name: str) -> None:
    model = load_model(make_tiny("qwen3", tmp_path / "tiny"), device="cpu")
    dim, cache = model.spec.attentions[0].head_dim, Pool(model, name).cache
    view = PromptView(cache, [Segment(pages=[3], begin=0, end=1)])
    q, k, v = (torch.randn(1, heads, 1, dim) for heads in (4, 2, 2))

    table = RopeTable(cos=torch.ones(1, dim // 2), sin=torch.zeros(1, dim // 2))
    found = view.layer(1).attend(q, k, v, table=table, rule=AttentionRule(scale=1.0))

    _, stored = read_cache(cache.stores[1], view.slots)
    expected = stored.float()[0].repeat_interleave(2, dim=0)[None, :, None]
    torch.testing.assert_close(found, expected, **near(expected, 1))


@of_formats
@torch.inference_mode()
def test_steps_of_several_sequences_are_those_of_each_alone(
    model: LoadedModel, name: str, most: float
) -> None:
    prompts = [random_ids(model, count) for count in (5, 256, 300, 60)]
    pool = Pool(model, name)
    pages = [pool.pages(len(ids) + 1) for ids in prompts]
    pool.read([(p, 0, ids) for p, ids in zip(pages, prompts, strict=True)])
    held = [(p, len(ids), [7]) for p, ids in zip(pages, prompts, strict=True)]

    order = (2, 0, 3, 1)
    logits = pool.step([held[index] for index in order])
    together = [
        pool.text(held[i][0], held[i][1] + 1, x) for i, x in zip(order, logits, strict=True)
    ]

    for index, text in zip(order, together, strict=True):
        logits = pool.step([held[index]])[0]
        alone = pool.text(held[index][0], held[index][1] + 1, logits)
        assert_same(model.spec, text, alone, most)


@of_formats
@torch.inference_mode()
def test_a_step_predicts_what_a_prompt_does(model: LoadedModel, name: str, most: float) -> None:
    ids, pool = random_ids(model, TOKENS), Pool(model, name)
    whole = pool.prompt(ids)
    pages, begin = pool.pages(TOKENS), TOKENS - 30
    pool.read([(pages, 0, ids[:begin])])

    found = [pool.step([(pages, at, [int(ids[at])])])[0] for at in range(begin, TOKENS)]

    text = pool.text(pages, TOKENS, torch.cat(found))
    assert_same(model.spec, text, whole._replace(logits=whole.logits[begin:]), most)


def begun(pool: Pool, prompts: list[torch.Tensor], begins: list[int]) -> list[list[int]]:
    """Return the pages of prompts, with room for 9 more tokens, after their beginnings are read."""
    pages = [pool.pages(len(ids) + 9) for ids in prompts]
    pool.read([(p, 0, ids[:b]) for p, ids, b in zip(pages, prompts, begins, strict=True) if b])
    return pages


@pytest.mark.parametrize("count", [2, 8])
@of_formats
@torch.inference_mode()
def test_a_step_of_several_tokens_is_as_many_steps(
    model: LoadedModel, name: str, count: int, most: float
) -> None:
    prompts = [random_ids(model, length) for length in (5, 252, 256, 60)]
    lengths, new = [len(ids) for ids in prompts], random_ids(model, 4 * count + 4).view(4, -1)
    texts = []
    for counts in ([count, 1], [1] * (count + 1)):
        pool, found = Pool(model, name), []
        pages = begun(pool, prompts, lengths)
        for at, part in zip(accumulate([0, *counts]), new.split(counts, dim=1), strict=False):
            held = [length + at for length in lengths]
            found.append(pool.step(list(zip(pages, held, part.tolist(), strict=True))))
        logits, ends = torch.cat(found, dim=1), [length + count + 1 for length in lengths]
        texts.append([pool.text(*text) for text in zip(pages, ends, logits, strict=True)])

    for several, single in zip(*texts, strict=True):
        assert_same(model.spec, several, single, most)


@of_formats
@torch.inference_mode()
def test_short_ends_share_steps_and_are_read_as_one_by_one_and_as_whole_prompts(
    model: LoadedModel, name: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = (3, 8, 3, 1, 70, 9, 9)  # 9 take two steps, 70 are too many; the last is a prompt
    prompts = [random_ids(model, count) for count in (30, 261, 300, 41, 259, 50, 9)]
    begins = [len(ids) - end for ids, end in zip(prompts, ends, strict=True)]
    pools, steps = [Pool(model, name) for _ in range(3)], []
    pages = [begun(pool, prompts, begins) for pool in pools[:2]]
    together, alone = (
        [(p, b, ids[b:]) for p, ids, b in zip(of_pool, prompts, begins, strict=True)]
        for of_pool in pages
    )

    def seen(q: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        steps.append(tuple(q.shape[:2]))
        return attend_step(q, *others, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Ops, "attend_step", staticmethod(seen))
        found = pools[0].read(together)

    assert steps == [(1, 1), (2, 3), (2, 8), (1, 1)] * model.spec.num_layers
    single = [pools[1].read([part])[0] for part in alone]
    for index, ids in enumerate(prompts):
        text, other = (
            pool.text(of_pool[index], len(ids), logits[index])
            for pool, of_pool, logits in zip(pools, pages, (found, single), strict=False)
        )
        whole = pools[2].prompt(ids)
        assert_same(model.spec, text, other, most)
        expected = whole._replace(logits=whole.logits[begins[index] :])
        assert_same(model.spec, text, expected, most)


@of_families
@torch.inference_mode()
def test_rewound_positions_are_written_again(model: LoadedModel) -> None:
    ids = torch.randint(0, model.spec.vocab_size, (1, 60))
    cache, again = (Sequences(model.spec, tokens=64, name="q4") for _ in range(2))
    cache.read(model.decoder.forward, ids[:, :40])
    cache.read(model.decoder.forward, torch.randint(0, model.spec.vocab_size, (1, 20)))
    cache.length = 40

    again.read(model.decoder.forward, ids[:, :40])
    found, expected = (c.read(model.decoder.forward, ids[:, 40:]) for c in (cache, again))

    assert torch.equal(found, expected)


@of_formats
@torch.inference_mode()
def test_copied_pages_serve_another_sequence(model: LoadedModel, name: str) -> None:
    pool, ids = Pool(model, name), random_ids(model, 300)
    pages, other = pool.pages(300), pool.pages(300)
    pool.read([(pages, 0, ids)])
    expected = pool.step([(pages, 290, [9])])

    for source, target in zip(pages, other, strict=True):
        pool.cache.copy(torch.tensor([[source], [target]]))

    assert torch.equal(pool.step([(other, 290, [9])]), expected)


@of_families
@pytest.mark.parametrize(("name", "first"), [("fp32", []), ("q8", [[0, 1, 2, 256, 257, 258]])])
@torch.inference_mode()
def test_a_prompt_reads_only_what_its_own_pass_lacks(
    model: LoadedModel, name: str, first: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    def seen(store: LayerStore, slots: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        is_run = isinstance(slots, slice)  # without a copy, if it is stored as it is read
        assert is_run is (name == "fp32")
        read.append([*range(slots.start, slots.stop)] if is_run else slots.tolist())
        return read_cache(store, slots)

    monkeypatch.setattr(Ops, "read_cache", staticmethod(seen))
    pool, ids, longer = Pool(model, name), random_ids(model, 3), random_ids(model, 65)

    pool.read([([0], 0, ids), ([1], 0, ids)])
    assert read == first * model.spec.num_layers
    read.clear()
    pool.read([([1], 3, longer)])

    assert read == [list(range(256, 256 + 68))] * model.spec.num_layers


def test_a_smaller_format_takes_less_memory(models: dict[str, LoadedModel]) -> None:
    order = ("fp32", "fp16", "q8", "fp8", "q8/q6", "q6", "q6/q4", "q4")
    sizes = [Pool(models["llama"], name).cache.nbytes for name in order]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)


def test_an_unknown_format_is_named() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ConfigError, match="no cache format `q5`; choose one of fp16, fp8, q8, q6"):
        cache_format("q5", cpu)
    assert cache_format("fp32", cpu) is CACHE_FORMATS["fp32"]
    with pytest.raises(ConfigError, match="no cache format `fp32`"):
        cache_format("fp32", cuda)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + 0.5 * i for i in range(8)],
    },
}


@pytest.mark.parametrize("name", ROPES)
@torch.inference_mode()
def test_prompts_cut_at_the_switch_are_read_as_one_by_one(name: str, tmp_path: Path) -> None:
    positions = {"max_position_embeddings": 32} if name == "dynamic" else {}
    make_tiny("llama", tmp_path / "tiny", rope=ROPES[name], **positions)
    model = load_model(tmp_path / "tiny", device="cpu", max_tokens=48)
    ids, pool = random_ids(model, 48), Pool(model, "fp32")
    single = pool.pages(48)
    steps = [pool.step([(single, place, [int(ids[place])])])[0] for place in range(48)]
    expected = torch.cat(steps)
    bound = near(expected, terms_of(model.spec, 48))

    for cut in (0, 20, 31, 32, 33, 47):
        pages = pool.pages(48)
        found = [pool.read([(pages, b, ids[b:e])])[0] for b, e in pairwise((0, cut, 48)) if e > b]
        torch.testing.assert_close(torch.cat(found), expected, **bound)

    [table] = pool.angles.tables
    [plain] = RopeTables.of(model.spec, 32, torch.device("cpu")).tables
    assert torch.equal(table.cos[:32], plain.cos)
