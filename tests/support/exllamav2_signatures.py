"""exllamav2 0.3.2's signatures, for the arguments that programs give.

A row is a name and its parameters with their defaults, in order: `=` before a default, `*args`.
"""

SIGNATURES = {
    "ExLlamaV2Config": "model_dir=None",
    "ExLlamaV2Config.prepare": "no_tensors=False",
    "ExLlamaV2Config.arch_compat_overrides": "quiet=False, warn_only=False",
    "ExLlamaV2.load": "gpu_split=None, lazy=False, stats=False, callback=None, progress=False",
    "ExLlamaV2.load_autosplit": (
        "cache, reserve_vram=None, last_id_only=False, callback=None, progress=False"
    ),
    "ExLlamaV2.load_tp": (
        "gpu_split=None, callback=None, progress=False, expect_cache_tokens=0, "
        "expect_cache_base=None"
    ),
    "ExLlamaV2.forward": (
        "input_ids, cache=None, input_mask=None, preprocess_only=False, last_id_only=False, "
        "loras=None, return_last_state=False, position_offsets=None, abort_event=None, "
        "cpu_logits=False"
    ),
    **dict.fromkeys(
        (
            "ExLlamaV2Cache",
            "ExLlamaV2Cache_8bit",
            "ExLlamaV2Cache_Q4",
            "ExLlamaV2Cache_Q6",
            "ExLlamaV2Cache_Q8",
        ),
        "model, batch_size=1, max_seq_len=-1, copy_from=None, lazy=False, "
        "num_key_value_heads=None, fixed_device=None",
    ),
    "ExLlamaV2Cache.copy_states": (
        "target, from_column, from_columns, to_column, to_columns, from_row, from_rows, to_row, "
        "to_rows"
    ),
    "ExLlamaV2Cache.all_tensors": "",
    "ExLlamaV2Cache_TP": "model, base=ExLlamaV2Cache, batch_size=1, max_seq_len=-1",
    "ExLlamaV2Tokenizer": "config, lazy_init=True",
    "ExLlamaV2Tokenizer.encode": (
        "text, add_bos=False, add_eos=False, encode_special_tokens=False, return_offsets=False, "
        "embeddings=None"
    ),
    "ExLlamaV2Tokenizer.decode": "ids, decode_special_tokens=False",
    "ExLlamaV2Tokenizer.get_id_to_piece_list": "include_special_tokens=False",
    "ExLlamaV2Tokenizer.get_char_trie": "",
    "ExLlamaV2Tokenizer.get_char_trie_ci": "",
    "ExLlamaV2Lora.from_directory": "model, directory, lora_scaling=1.0",
    "ExLlamaV2BaseGenerator": "model, cache, tokenizer",
    "ExLlamaV2BaseGenerator.generate_simple": (
        "prompt, gen_settings, num_tokens, seed=None, token_healing=False, "
        "encode_special_tokens=False, decode_special_tokens=False, loras=None, stop_token=-1, "
        "add_bos=False, abort_event=None, input_embeddings=None, completion_only=False, "
        "filters=None, filter_prefer_eos=False"
    ),
    "ExLlamaV2DynamicGenerator": (
        "model, cache, tokenizer, max_batch_size=None, max_seq_len=None, max_chunk_size=None, "
        "max_q_size=8, draft_model=None, draft_cache=None, num_draft_tokens=4, "
        "use_ngram_draft=False, max_ngram=4, max_sampling_threads=16, min_sampling_threads=3, "
        "paged=True, filter_background_eval=True, **kwargs"
    ),
    "ExLlamaV2DynamicGenerator.generate": (
        "prompt, max_new_tokens, min_new_tokens=0, seed=None, gen_settings=None, "
        "token_healing=False, encode_special_tokens=False, decode_special_tokens=False, "
        "stop_conditions=None, add_bos=False, abort_event=None, completion_only=False, "
        "filters=None, filter_prefer_eos=False, return_last_results=False, embeddings=None, "
        "banned_strings=None, **kwargs"
    ),
    "ExLlamaV2DynamicGenerator.enqueue": "job",
    "ExLlamaV2DynamicGenerator.cancel": "job",
    "ExLlamaV2DynamicGenerator.set_loras": "loras",
    "ExLlamaV2DynamicGenerator.iterate": "",
    "ExLlamaV2DynamicGenerator.clear_queue": "",
    "ExLlamaV2DynamicGenerator.num_remaining_jobs": "",
    "ExLlamaV2DynamicGenerator.warmup": "",
    "ExLlamaV2DynamicGenerator.reset_page_table": "",
    "ExLlamaV2DynamicGenerator.print_page_list": "short=True",
    "ExLlamaV2DynamicGenerator.defrag_cache": "",
    "ExLlamaV2DynamicJob": (
        "input_ids, max_new_tokens, min_new_tokens=0, max_skips=4, gen_settings=None, seed=None, "
        "stop_conditions=None, decode_special_tokens=False, return_top_tokens=0, "
        "return_logits=False, return_probs=False, filters=None, filter_prefer_eos=False, "
        "token_healing=False, identifier=None, banned_strings=None, embeddings=None, **kwargs"
    ),
    "ExLlamaV2DynamicGeneratorAsync": "*args, **kwargs",
    "ExLlamaV2DynamicGeneratorAsync.enqueue": "job",
    "ExLlamaV2DynamicGeneratorAsync.cancel": "job",
    "ExLlamaV2DynamicGeneratorAsync.close": "",
    "ExLlamaV2DynamicJobAsync": "generator, *args, **kwargs",
    "ExLlamaV2DynamicJobAsync.cancel": "",
    "ExLlamaV2StreamingGenerator": (
        "model, cache, tokenizer, draft_model=None, draft_cache=None, num_speculative_tokens=5"
    ),
    "ExLlamaV2StreamingGenerator.begin_stream_ex": (
        "input_ids, gen_settings, token_healing=False, loras=None, input_mask=None, "
        "position_offsets=None, return_probabilities=False, return_top_tokens=0, "
        "return_logits=False, abort_event=None, input_embeddings=None, "
        "decode_special_tokens=False, banned_strings=None, filters=None, "
        "filter_prefer_eos=False, **kwargs"
    ),
    "ExLlamaV2StreamingGenerator.stream_ex": "ban_tokens=None",
    "ExLlamaV2StreamingGenerator.stream": "ban_tokens=None",
    "ExLlamaV2StreamingGenerator.ngram_preload": "input_ids",
    "ExLlamaV2Sampler.Settings": (
        "temperature=0.8, temperature_last=False, smoothing_factor=0.0, min_temp=0.0, "
        "max_temp=0.0, temp_exponent=1.0, top_k=50, top_p=0.8, top_a=0.0, min_p=0.0, tfs=0.0, "
        "typical=0.0, skew=0.0, token_repetition_penalty=1.025, token_repetition_range=-1, "
        "token_repetition_decay=0, token_frequency_penalty=0.0, token_presence_penalty=0.0, "
        "mirostat=False, mirostat_tau=1.5, mirostat_eta=0.1, mirostat_mu=None, token_bias=None, "
        "cfg_scale=None, post_sampling_hooks=(), dry_allowed_length=2, dry_base=1.75, "
        "dry_multiplier=0.0, dry_sequence_breakers=None, dry_range=0, dry_max_ngram=20, "
        "xtc_probability=0.0, xtc_threshold=0.1, xtc_ignore_tokens=None"
    ),
    "ExLlamaV2Sampler.sample": (
        "logits, settings, sequence_ids, random, tokenizer, prefix_token=None, "
        "return_top_tokens=0, blocked_tokens=None, filters=None, filter_prefer_eos=False"
    ),
    "ExLlamaV2Sampler.Settings.greedy": "**kwargs",
    "ExLlamaV2Sampler.Settings.disallow_tokens": "tokenizer, tokens",
    "ExLlamaV2Sampler.Settings.allow_tokens": "tokenizer, tokens",
    "ExLlamaV2Filter": "model, tokenizer",
    "ExLlamaV2PrefixFilter": "model, tokenizer, prefix_strings",
    "ExLlamaV2SelectFilter": "model, tokenizer, options, case_insensitive=False",
    "ExLlamaV2MMEmbedding": (
        "model, embeddings, text_alias=None, thw_grid=None, pre_tokens=0, post_tokens=0"
    ),
}
ATTRIBUTES = {  # of objects, with their first values
    "ExLlamaV2Config": {
        "max_batch_size": 1,
        "max_input_len": 2048,
        "max_attention_size": 2048**2,
        "max_output_len": None,
        "scale_pos_emb": 1.0,
        "scale_alpha_value": 1.0,
        "load_in_q4": False,
        "no_flash_attn": False,
        "no_xformers": False,
        "no_sdpa": False,
        "no_graphs": False,
    },
    "ExLlamaV2StreamingGenerator": {
        "speculative_ngram": False,
        "speculative_ngram_min": 1,
        "speculative_ngram_max": 5,
        "speculative_ngram_max_inf": 3,
        "speculative_ngram_threshold": 1,
        "speculative_prob_threshold": 0.25,
    },
}
