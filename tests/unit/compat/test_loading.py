"""Configuration, models, tokenizers, caches and the arguments of scripts."""

import argparse
import shutil

import pytest
import torch
from cut import halves
from devices import devices

from exl2flow.compat.exllamav2 import (
    ExLlamaV2,
    ExLlamaV2Cache,
    ExLlamaV2Cache_8bit,
    ExLlamaV2Cache_Q4,
    ExLlamaV2Cache_TP,
    ExLlamaV2Config,
    ExLlamaV2Tokenizer,
    ExLlamaV2VisionTower,
    SeqTensor,
    Timer,
    model_init,
)
from exl2flow.compat.exllamav2.generator import ExLlamaV2DynamicGenerator, ExLlamaV2MMEmbedding
from exl2flow.core.errors import ConfigError, SourceModelError
from exl2flow.engine.loading.layer_split import Split
from exl2flow.inference import load_model


def test_fields_changed_after_construction_count(folder) -> None:
    config = ExLlamaV2Config()
    config.model_dir = str(folder)
    config.prepare()
    model = ExLlamaV2(config)
    config.max_seq_len, config.scale_pos_emb, config.scale_alpha_value = 512, 2.0, 1.5
    config.arch_compat_overrides()
    config.set_low_mem()

    model.load()

    assert model.native.max_tokens == 512
    assert model.native.spec.attentions[0].rope.position_scale == 2.0
    assert config.max_input_len == config.max_output_len == 1024
    model.unload()
    with pytest.raises(ConfigError, match="not loaded"):
        model.forward(torch.tensor([[1]]))


def test_loading_step_by_step_tells_of_each_part(config) -> None:
    def told(done: int, total: int):
        yield f"{done} of {total}"

    model, calls = ExLlamaV2(config), []
    for way, options in (
        (model.load_gen, {}),
        (model.load_autosplit_gen, {"cache": ExLlamaV2Cache(model, lazy=True)}),
        (model.load_tp_gen, {"gpu_split": [20]}),
    ):
        model.unload()
        steps = way(**options, callback=lambda *part: calls.append(part), callback_gen=told)
        *parts, last = steps

        assert parts == [f"{done} of {len(parts)}" for done in range(1, len(parts) + 1)]
        assert last is True
        assert model.loaded
    assert calls == [(done, len(parts)) for done in range(1, len(parts) + 1)] * 3


def test_loading_step_by_step_tells_what_is_wrong(config) -> None:
    model = ExLlamaV2(config)

    with pytest.raises(ConfigError, match="one device"):
        [*model.load_gen(gpu_split=[0, 20])]
    assert not model.loaded


@pytest.mark.parametrize("how", ["load", "lazy", "split", "autosplit", "tp"])
def test_all_ways_to_load_run_on_one_device(config, tokenizer, how, capsys) -> None:
    model, calls = ExLlamaV2(config), []
    cache = ExLlamaV2Cache(model, max_seq_len=512, lazy=True)
    match how:
        case "load":
            model.load(callback=lambda done, total: calls.append((done, total)))
            assert calls[-1][0] == calls[-1][1] == len(calls)
        case "lazy":
            model.load(lazy=True)
        case "split":
            model.load(gpu_split=[20, 24], progress=True)
            assert "loading 6 of 6\n" in capsys.readouterr().err
        case "autosplit":
            model.load_autosplit(cache, reserve_vram=[0])
        case "tp":
            model.load_tp(expect_cache_tokens=512)
            cache = ExLlamaV2Cache_TP(model, base=ExLlamaV2Cache_Q4, max_seq_len=512)

    generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)

    assert generator.generate("A", 4, completion_only=True) is not None


@pytest.mark.parametrize(
    ("load", "split"),
    [
        (lambda model, _: model.load([1, 0, 0.5]), Split(sizes=(2**30, 0, 2**29))),
        (lambda model, _: model.load(), None),
        (
            lambda model, cache: model.load_autosplit(cache, [5, 6]),
            Split(reserve=(5, 6), tokens=512, cache="q4", slots=2),
        ),
        (
            lambda model, cache: model.load_autosplit(cache, 7),
            Split(reserve=(7,), tokens=512, cache="q4", slots=2),
        ),
    ],
)
def test_several_gpus_share_a_model_as_it_is_told(config, monkeypatch, load, split) -> None:
    model, given = ExLlamaV2(config), []
    cache = ExLlamaV2Cache_Q4(model, batch_size=2, max_seq_len=256, lazy=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        "exl2flow.compat.exllamav2.model.load_model",
        lambda folder, *, placement, **options: given.append(placement),
    )

    load(model, cache)

    assert given == [split]


@pytest.mark.parametrize(
    "load",
    [
        lambda model, cache, told: [*model.load_autosplit_gen(cache, callback=told)],
        lambda model, _, told: model.load([0.001, 20], callback=told),
    ],
)
def test_programs_have_the_same_texts_on_several_devices(
    config, model, tokenizer, monkeypatch, load
) -> None:
    def load_split(folder, *, placement, **options):
        assert isinstance(placement, Split)
        first, second = (torch.device("cpu", index) for index in range(2))
        return load_model(folder, device="cpu", placement=halves(first, second, 2), **options)

    def text(model, cache) -> str:
        generator = ExLlamaV2DynamicGenerator(model, cache, tokenizer)
        return generator.generate("The quick", 3, completion_only=True, seed=1)

    split, told = ExLlamaV2(config), []
    cache = ExLlamaV2Cache_Q4(split, max_seq_len=256, lazy=True)
    with devices(), monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 2)
        patch.setattr("exl2flow.compat.exllamav2.model.load_model", load_split)
        load(split, cache, lambda *part: told.append(part))
        found = text(split, cache)

    assert split.native.decoder.placement.is_split
    assert told == [(part, 6) for part in range(1, 7)]
    assert found == text(model, ExLlamaV2Cache_Q4(model, max_seq_len=256))


def test_what_needs_more_devices_or_images_is_refused(model) -> None:
    with pytest.raises(ConfigError, match="one device"):
        model.load(gpu_split=[0, 20])
    with pytest.raises(ConfigError, match="vision"):
        ExLlamaV2VisionTower(model.config)
    with pytest.raises(SourceModelError):
        ExLlamaV2Config("/nowhere")


def test_tokenizer_pads_on_the_left_and_decodes(tokenizer) -> None:
    texts = ["The quick brown fox", "A"]
    ids, offsets = tokenizer.encode(texts, return_offsets=True)

    assert (ids[1, : ids.shape[1] - 1] == tokenizer.pad_token_id).all()
    assert offsets.tolist() == [[0], [1 - ids.shape[1]]]
    assert tokenizer.decode(ids) == texts
    assert tokenizer.padding_mask(ids).isinf().sum() == ids.shape[1] - 1
    assert tokenizer.encode("A", add_bos=True, add_eos=True)[0, [0, -1]].tolist() == [0, 1]
    assert tokenizer.encode("</s>", encode_special_tokens=True).tolist() == [[1]]
    assert tokenizer.encode("</s>").shape[1] > 1
    assert tokenizer.decode(torch.tensor([0, 40, 1, 5000, -1])) == tokenizer.decode(
        torch.tensor([40])
    )
    assert tokenizer.decode(torch.tensor([0, 1]), decode_special_tokens=True) == "<s></s>"
    pieces = tokenizer.get_id_to_piece_list()
    assert len(pieces) == tokenizer.get_vocab_size() == tokenizer.actual_vocab_size
    assert tokenizer.get_piece_to_id_dict()["f"] == tokenizer.single_id("f")
    assert tokenizer.get_id_to_piece_list(include_special_tokens=True)[1] == tokenizer.eos_token
    assert tokenizer.single_token(3).tolist() == [[3]]
    assert tokenizer.num_tokens("A") == 1
    assert tokenizer.cached_encode_str("A").tolist() == [[tokenizer.single_id("A")]]
    assert pieces[tokenizer.newline_token_id] == "\n"
    assert tokenizer.unk_token is None
    assert tokenizer.tokenizer.vocab_size() == len(tokenizer.tokenizer_model.vocab)


def test_tries_and_prefixes_lead_to_ids(tokenizer) -> None:
    pieces = tokenizer.get_id_to_piece_list()
    token = next(i for i, piece in enumerate(pieces) if len(piece) == 3)

    node, folded = tokenizer.get_char_trie(), tokenizer.get_char_trie_ci()
    for character in pieces[token]:
        node, folded = node.children[character], folded.children[character.lower()]

    assert token in node.leaf
    assert token in folded.leaf
    assert node.leaf == [i for i, piece in enumerate(pieces) if piece == pieces[token]]
    begun = tokenizer.get_prefix_to_ids_dict()[pieces[token][:1]]
    assert token in begun
    assert begun == [i for i, p in enumerate(pieces) if p.startswith(pieces[token][:1])]


def test_aliases_of_embeddings_become_their_ids(model, tokenizer) -> None:
    one, two = (ExLlamaV2MMEmbedding(model, torch.zeros(n, 64), f"<{n}>") for n in (2, 3))

    ids = tokenizer.encode("A<3>f<2>A", embeddings=[one, two])

    a, f = tokenizer.single_id("A"), tokenizer.single_id("f")
    first = [*range(two.first_index, two.first_index + 3)]
    assert ids[0].tolist() == [a, *first, f, one.first_index, one.first_index + 1, a]
    assert one.last_index - one.first_index == 2


def test_caches_have_the_sizes_of_the_model(model) -> None:
    cache = ExLlamaV2Cache(model)

    assert (cache.max_seq_len, cache.current_seq_len, cache.batch_size) == (1024, 0, 1)
    assert ExLlamaV2Cache_8bit(model).footprint()[0] == cache.footprint()[0] // 4  # of fp32
    assert cache.clone().footprint() == cache.footprint()
    assert sum(x.nbytes for x in cache.all_tensors()) > cache.footprint()[0]  # a spare page
    cache.current_seq_len = 5
    cache.reset()
    assert cache.current_seq_len == 0
    with pytest.raises(ConfigError, match="max_seq_len"):
        ExLlamaV2Cache(model, max_seq_len=0)


def test_small_tools_count_and_grow() -> None:
    with Timer() as timer:
        grown = SeqTensor((1, 0), torch.long, 1)
        for index in range(3):
            grown.append(torch.tensor([[index]]))

    assert timer.interval >= 0
    assert grown.torch().tolist() == [[0, 1, 2]]
    assert len(grown) == 3


def test_scripts_load_a_model_by_their_arguments(folder, capsys) -> None:
    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    args = parser.parse_args(["-m", str(folder), "-l", "512", "-rs", "2", "-lm", "-nfa", "-cq4"])

    model_init.check_args(args)
    model_init.print_options(args)
    model, tokenizer = model_init.init(args, allow_auto_split=True, max_output_len=16)

    assert isinstance(tokenizer, ExLlamaV2Tokenizer)
    assert model.native.max_tokens == 512
    assert (model.config.max_output_len, model.config.max_input_len) == (16, 1024)
    assert (args.cache_q4, args.cache_q8) == (True, False)
    assert str(folder) in capsys.readouterr().out


@pytest.mark.parametrize("is_first", [True, False])
def test_scripts_may_define_the_options_of_caches(folder, is_first: bool) -> None:
    parser = argparse.ArgumentParser()
    if is_first:
        parser.add_argument("-c8", "--cache_8bit", action="store_true")
    model_init.add_args(parser)
    if not is_first:
        parser.add_argument("-c8", "--cache_8bit", action="store_true")

    args = parser.parse_args(["-m", str(folder), "-c8"])

    assert (args.cache_8bit, args.cache_q4) == (True, False)


def test_scripts_load_later_with_a_lazy_cache(folder) -> None:
    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    args = parser.parse_args(["-m", str(folder), "-gs", "auto", "-ry", "2", "-chunk", "512"])

    model, _ = model_init.init(args, allow_auto_split=True)
    assert model.config.max_input_len == 512
    assert not model.loaded
    model.load_autosplit(ExLlamaV2Cache(model, lazy=not model.loaded))
    assert model.loaded
    assert model.native.spec.attentions[0].rope.factor == 2.0

    skipped, _ = model_init.init(args, skip_load=True)
    model_init.post_init_load(skipped, args)
    assert skipped.native


def test_scripts_learn_what_is_missing_before_loading(folder, tmp_path) -> None:
    parser = argparse.ArgumentParser()
    model_init.add_args(parser)
    shutil.copy(folder / "config.json", tmp_path)

    with pytest.raises(ConfigError, match="-m"):
        model_init.check_args(parser.parse_args([]))
    with pytest.raises(SourceModelError, match="tokenizer"):
        model_init.check_args(parser.parse_args(["-m", str(tmp_path)]))
