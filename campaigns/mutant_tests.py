"""Which tests `mutants.py` runs for a file, beside those of its name and its folder."""

TABLES = "tests/unit/test_documented_options.py"  # of every option: name, default, group, words
OPTIONS = "core/options"
BOUNDS, CONFIG = "tests/unit/core/options/test_bounds.py", "tests/unit/core/options/test_config.py"
MORE = {
    f"{OPTIONS}/base.py": [CONFIG, BOUNDS, TABLES],
    f"{OPTIONS}/chat.py": [BOUNDS, TABLES],
    f"{OPTIONS}/comparison.py": [CONFIG, TABLES],
    f"{OPTIONS}/config.py": [
        CONFIG,
        BOUNDS,
        "tests/unit/core/options/test_presets.py",
        "tests/unit/test_documented_presets.py",
        TABLES,
    ],
    f"{OPTIONS}/generation.py": [BOUNDS, TABLES],
    f"{OPTIONS}/groups.py": [CONFIG, BOUNDS, TABLES],
    f"{OPTIONS}/measure.py": [CONFIG, TABLES],
    f"{OPTIONS}/publication.py": [BOUNDS, CONFIG, TABLES],
    f"{OPTIONS}/refine.py": ["tests/unit/quant/forecast/test_plan.py", BOUNDS, TABLES],
    f"{OPTIONS}/sampling.py": [
        "tests/unit/engine/sampling/test_sampling.py",
        BOUNDS,
        TABLES,
    ],
    f"{OPTIONS}/serving.py": [
        "tests/unit/serve/test_configuration.py",
        "tests/unit/test_documented_serving.py",
        TABLES,
    ],
    f"{OPTIONS}/given.py": [CONFIG, "tests/unit/test_documented_types.py"],
    f"{OPTIONS}/sweep.py": [CONFIG, TABLES],
    f"{OPTIONS}/validation.py": [CONFIG, BOUNDS, TABLES],
    f"{OPTIONS}/watch.py": ["tests/unit/flows/test_watch.py"],
    "core/device_name.py": ["tests/unit/core/options/test_devices.py"],
    "core/reports.py": ["tests/unit/inference/report/test_record.py"],
    "core/store/crew_member.py": ["tests/unit/core/store/test_crew.py"],
    "core/store/need.py": ["tests/unit/quant/forecast/test_needs.py"],
    "core/store/outline.py": ["tests/hub/test_outline.py"],
    "core/store/shard_index.py": ["tests/unit/model/files/test_weights.py"],
    "core/requests/conversation.py": [
        "tests/unit/engine/chat/test_history.py",
        "tests/unit/engine/chat/test_files.py",
    ],
    "core/requests/request.py": ["tests/unit/engine/generate/test_prompt.py"],
    "core/store/files.py": [
        "tests/unit/core/store/test_folders.py",
        "tests/unit/core/store/test_power_cuts.py",
    ],
    "core/store/source.py": ["tests/hub/test_fetch.py", "tests/hub/test_card.py"],
    "core/store/stage.py": [
        "tests/unit/core/store/test_changed_sources.py",
        "tests/unit/core/store/test_damage.py",
        "tests/unit/quant/test_interrupts.py",
    ],
    "core/store/store.py": [
        "tests/unit/core/store/test_locks.py",
        "tests/unit/core/store/test_kept_stages.py",
        "tests/unit/core/store/test_folders.py",
        "tests/unit/core/store/test_cleaning.py",
    ],
    "core/store/manifest.py": [
        "tests/unit/core/store/test_kept_stages.py",
        "tests/unit/core/store/test_store.py",
    ],
    "model/files/exl2.py": [
        "tests/property/test_quant_params.py",
        "tests/property/test_packing.py",
    ],
    "engine/cache/page_pool.py": [
        "tests/property/test_pages.py",
        "tests/unit/engine/generate/test_prompt_cache.py",
    ],
    "engine/generate/scheduler.py": [
        "tests/unit/engine/generate/test_generator.py",
        "tests/unit/engine/generate/test_rewinds.py",
        "tests/unit/engine/generate/test_scores.py",
        "tests/property/test_generator.py",
    ],
    "engine/filters/phases.py": ["tests/unit/engine/filters/test_phases.py"],
}
