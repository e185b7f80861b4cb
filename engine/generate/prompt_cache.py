"""`PromptCache`: options of the tiers below a generator's cache, and what their pages depend on."""

from dataclasses import dataclass
from pathlib import Path

import torch

from exl2flow import kernels
from exl2flow.core.errors import ConfigError
from exl2flow.core.options.environment import virtual_architecture
from exl2flow.core.store.files import digest, digest_of
from exl2flow.core.store.model_files import weight_files
from exl2flow.core.store.source import digests
from exl2flow.engine.cache.page_files import NAME_LENGTH, SCHEMA, PageFiles, secret_of
from exl2flow.engine.cache.tiers import PageBytes, Tiers
from exl2flow.engine.generate.device_slots import DeviceSlots
from exl2flow.engine.generate.sequence_states import STATE_MEMORY
from exl2flow.engine.loading.load import LoadedModel

DIGESTS = "digests.json"  # of weight files, by size and times
DISK_SIZE = 20 * 10**9
SOURCES = {".py", ".cu", ".cuh", ".h"}
ARITHMETIC = ("kernels", "model/layers")  # folders whose sources decide on bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCache:
    """Keeps pages that leave a generator's cache, which hold prompts; and snapshots of states.

    ram: bytes of host memory for pages at most; disk: folder for them, which processes may share;
    disk_size: bytes of its files at most; states: bytes of host memory for snapshots at most, of a
    model whose layers have states. Raises `ConfigError` for a number out of range.
    """

    ram: int = 0
    disk: Path | None = None
    disk_size: int = DISK_SIZE
    states: int = STATE_MEMORY

    def __post_init__(self) -> None:
        for name in ("ram", "disk_size", "states"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"`{name}` of a prompt cache is {value}; it must be 0 or more")

    def start(
        self, model: LoadedModel, device_slots: DeviceSlots, draft: LoadedModel | None
    ) -> Tiers | None:
        """Return the tiers of a generator, if there are any; changed weight files are read once.

        Raises:
            ConfigError: several processes share the model, it has layers with a state, or the
                folder cannot be used.
        """
        if not self.ram and self.disk is None:
            return None
        if model.spec.deltas:
            raise ConfigError(
                f"`{model.spec.source_dir}` has layers with a state, so pages cannot be kept; "
                "leave `--cache-ram` and `--cache-disk` out"
            )
        if model.ranks is not None:
            raise ConfigError("processes that share a model keep no prompts; leave `keep` out")
        files = None
        if self.disk is not None:
            secret_of(self.disk)  # makes the folder
            namespace = _namespace(self.disk, model, device_slots, draft)
            files = PageFiles(self.disk, namespace, size=self.disk_size)
        pages = PageBytes(device_slots.stored, device_slots.cache.page_tokens)
        return Tiers(pages, ram=self.ram, files=files)


def _namespace(
    folder: Path, model: LoadedModel, device_slots: DeviceSlots, draft: LoadedModel | None
) -> str:
    """Return a name for everything but ids, adapters and salts that stored bits depend on."""
    device, package = device_slots.cache.device, Path(kernels.__file__).parents[1]
    files = [one for part in ARITHMETIC for one in (package / part).rglob("*")]
    sources = sorted(one for one in files if one.suffix in SOURCES)
    architecture: object = "cpu"
    if device.type == "cuda":
        architecture = virtual_architecture() or torch.cuda.get_device_capability(device)
    values = {
        "schema": SCHEMA,
        "models": [_model(folder, one) for one in (model, draft) if one is not None],
        "format": repr(device_slots.cache.form),
        "page_tokens": device_slots.cache.page_tokens,
        "sources": {str(one.relative_to(package)): digest(one) for one in sources},
        "torch": torch.__version__,
        "device": architecture,
        "layers": [str(x.shape[1:]) for x in device_slots.stored],
    }
    return digest_of(values)[:NAME_LENGTH]


def _model(folder: Path, model: LoadedModel) -> dict[str, object]:
    """Return what the values of a model's pages depend on; where its files are does not matter."""
    source = model.spec.source_dir.resolve()
    weights = digests(weight_files(source), folder / DIGESTS)
    return {
        "weights": {path.name: sha256 for path, sha256 in weights.items()},
        "config": digest(source / "config.json"),
        "rope": [repr(attention.rope) for attention in model.spec.attending],
        "dtype": str(model.decoder.embedding.weight.dtype),
    }
