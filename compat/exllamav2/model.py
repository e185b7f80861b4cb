"""Configuration, model and LoRA; a model is on one GPU unless it is split, or on the CPU."""

import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.nn.functional import pad

from exl2flow.compat.exllamav2.cache import ExLlamaV2Cache
from exl2flow.compat.exllamav2.tensors import unpadded
from exl2flow.core.errors import ConfigError
from exl2flow.core.store.model_files import weights_size
from exl2flow.engine import Adapter, LoadedModel, load_model
from exl2flow.engine.loading.layer_split import Split
from exl2flow.model import resolve

log = logging.getLogger(__name__)


class ExLlamaV2Config(SimpleNamespace):
    """A model folder and how to load it; attributes without a counterpart have no effect."""

    def __init__(self, model_dir: str | None = None) -> None:
        super().__init__(
            model_dir=model_dir,
            max_batch_size=1,
            max_input_len=2048,
            max_attention_size=2048**2,
            max_output_len=None,
            scale_pos_emb=1.0,
            scale_alpha_value=1.0,
            alt_rope_method=None,
            yarn_rope_factor=None,
            no_flash_attn=False,
            no_xformers=False,
            no_sdpa=False,
            no_graphs=False,
            load_in_q4=False,
            fasttensors=False,
        )
        if model_dir is not None:
            self.prepare()

    def prepare(self, no_tensors: bool = False) -> None:
        spec = resolve(Path(str(self.model_dir)))
        attention, eos = spec.attending[0], spec.eos_token_ids
        vars(self).update(
            max_seq_len=spec.max_positions,
            vocab_size=spec.vocab_size,
            head_dim=attention.head_dim,
            hidden_size=spec.hidden_size,
            num_hidden_layers=spec.num_layers,
            intermediate_size=spec.widest_mlp,
            num_attention_heads=attention.num_heads,
            num_key_value_heads=attention.num_kv_heads,
            bos_token_id=spec.bos_token_id,
            eos_token_id=eos[0] if eos else None,
            scale_pos_emb=attention.rope.position_scale,
            original_max_seq_len=attention.rope.original_max_positions,
            _read=attention.rope.position_scale,
        )

    def set_low_mem(self) -> None:
        self.max_input_len, self.max_attention_size = 1024, 1024**2
        vars(self).update(max_output_len=min(self.max_output_len or 1024, 1024))

    def arch_compat_overrides(self, quiet: bool = False, warn_only: bool = False) -> None:
        """Do nothing: the model determines its kernels."""


class ExLlamaV2:
    """A model, empty until it is loaded; `native` is ours."""

    def __init__(self, config: ExLlamaV2Config, lazy_load: bool = False) -> None:
        self.config = config
        self._native: LoadedModel | None = None

    @property
    def native(self) -> LoadedModel:
        if self._native is None:
            raise ConfigError("the model is not loaded; call `load()` or `load_autosplit(cache)`")
        return self._native

    loaded = property(lambda self: self._native is not None)

    def load(
        self,
        gpu_split: Sequence[float] | None = None,
        lazy: bool = False,
        stats: bool = False,
        callback: Any = None,
        progress: bool = False,
    ) -> None:
        """Load the model; `lazy`: read its layers from disk in every pass, on one device."""
        folder, split = Path(self.config.model_dir), None
        nbytes = weights_size(folder)
        if gpu_split and torch.cuda.device_count() > 1:
            split = Split(sizes=tuple(int(size * 2**30) for size in gpu_split))
        elif gpu_split is not None and (not gpu_split or gpu_split[0] * 2**30 < nbytes):
            why = f"the weights of `{folder}` take {nbytes / 2**30:.1f} GB on one device"
            raise ConfigError(f"`gpu_split` is {gpu_split}, but {why}; give the first one as much")
        self._load(split, lazy=lazy, callback=_show if progress else callback)

    def _load(
        self,
        split: Split | None,
        *,
        callback: Any,
        lazy: bool = False,
        tensor_parallel: Sequence[int] | None = None,
    ) -> None:
        config, folder = self.config, Path(self.config.model_dir)
        scale, alpha = config.scale_pos_emb / config._read, config.scale_alpha_value
        self._native = None  # first, to have room
        self._native = load_model(
            folder,
            streamed=lazy,
            placement=split,
            tensor_parallel=tensor_parallel,
            progress=callback,
            max_tokens=config.max_seq_len,
            rope_scale=None if scale == 1 else scale,
            rope_alpha=None if alpha == 1 else alpha,
            rope_yarn=config.yarn_rope_factor if config.alt_rope_method == "yarn" else None,
        )

    def load_autosplit(
        self,
        cache: Any,
        reserve_vram: int | Sequence[int] | None = None,
        last_id_only: bool = False,
        callback: Any = None,
        progress: bool = False,
    ) -> None:
        """Split the model among GPUs if there are several, with room for the cache."""
        split = None
        if torch.cuda.device_count() > 1:
            reserve = (reserve_vram,) if isinstance(reserve_vram, int) else reserve_vram
            split = Split(
                reserve=None if reserve is None else tuple(reserve),
                tokens=cache.tokens,
                cache=cache.format,
                slots=cache.batch_size,
            )
        self._load(split, callback=_show if progress else callback)

    def load_tp(
        self,
        gpu_split: Sequence[float] | None = None,
        callback: Any = None,
        progress: bool = False,
        expect_cache_tokens: int = 0,
        expect_cache_base: Any = None,
    ) -> None:
        """Share each layer among the GPUs, or those with a size in `gpu_split`, if several."""
        callback = _show if progress else callback
        sizes = gpu_split or [1.0] * torch.cuda.device_count()
        chosen = [index for index, size in enumerate(sizes) if size]
        self._load(None, callback=callback, tensor_parallel=chosen if len(chosen) > 1 else None)

    def _load_gen(
        self, way: str, *args: Any, callback: Any = None, callback_gen: Any = None, **options: Any
    ) -> Iterator[Any]:
        """Load in a thread, and yield the items of `callback_gen` for each part, then True."""
        parts = SimpleQueue[tuple[int, int] | None]()
        with ThreadPoolExecutor(1) as threads:
            load = partial(getattr(self, way), callback=lambda *part: parts.put(part))
            loading = threads.submit(load, *args, **options)
            loading.add_done_callback(lambda _: parts.put(None))
            for part in iter(parts.get, None):
                if callback is not None:
                    callback(*part)
                yield from callback_gen(*part) if callback_gen is not None else ()
            loading.result()
        yield True

    load_gen = partialmethod(_load_gen, "load")
    load_autosplit_gen = partialmethod(_load_gen, "load_autosplit")
    load_tp_gen = partialmethod(_load_gen, "load_tp")

    def unload(self) -> None:
        self._native = None

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Any = None,
        input_mask: torch.Tensor | None = None,
        preprocess_only: bool = False,
        last_id_only: bool = False,
        loras: Any = None,
        return_last_state: bool = False,
        position_offsets: torch.Tensor | None = None,
        abort_event: Any = None,
        cpu_logits: bool = False,
    ) -> Any:
        """Return logits fp32 (b, t, v) of ids (b, t) that follow the texts of the cache."""
        rows, count = input_ids.shape
        if not count or (abort_event is not None and abort_event.is_set()):
            return None
        cache = ExLlamaV2Cache(self, rows, count) if cache is None else cache
        texts = cache.append(input_ids)
        sequences, used = unpadded(texts, input_mask, position_offsets), adapters(loras)
        last = count if return_last_state or not (last_id_only or preprocess_only) else 1
        computed = cache.generator(min_slots=rows).states
        states = computed.hidden(*sequences, last=last, adapters=used)
        cache.texts[:rows], cache.current_seq_len = texts, len(texts[0])
        if preprocess_only:
            return None
        hidden = torch.stack([pad(x, (0, 0, last - len(x), 0)) for x in states])
        logits = computed.logits(hidden[:, -1:] if last_id_only else hidden)
        logits = logits.cpu() if cpu_logits else logits
        return (logits, hidden) if return_last_state else logits


def _show(done: int, total: int) -> None:
    sys.stderr.write(f"\rloading {done} of {total}" + ("\n" if done == total else ""))


def ExLlamaV2VisionTower(*args: object) -> None:  # a class there
    raise ConfigError("vision towers are not implemented; give embeddings as tensors")


class ExLlamaV2Lora:
    """A LoRA of a loaded model; `native` is ours."""

    def __init__(
        self, model: ExLlamaV2, lora_config_path: str, lora_path: str, lora_scaling: float = 1.0
    ) -> None:
        folder = Path(lora_config_path).parent
        if Path(lora_path).parent != folder:
            raise ConfigError(f"`{lora_config_path}` and `{lora_path}` must be in one folder")
        self.native: Adapter | None = Adapter.load(folder, model.native, scaling=lora_scaling)

    @classmethod
    def from_directory(cls, model: ExLlamaV2, directory: str, lora_scaling: float = 1.0) -> Self:
        return cls(model, f"{directory}/adapter_config.json", f"{directory}/_", lora_scaling)

    def unload(self) -> None:
        self.native = None


def adapters(loras: Any) -> tuple[Any, ...]:
    """Return our adapters of a LoRA, of several, or of None."""
    given = [] if loras is None else [loras] if isinstance(loras, ExLlamaV2Lora) else loras
    return tuple(lora.native for lora in given)
