"""All readers, by the names that the campaign and the corpus give them."""

import model_readers
import own_readers
import server_readers
import text_readers
from reader import Reader

READERS: dict[str, type[Reader]] = {
    "safetensors-header": model_readers.Headers,
    "safetensors-body": model_readers.Bodies,
    "config": model_readers.Config,
    "index": model_readers.Index,
    "tokenizer-json": text_readers.TokenizerJson,
    "tokenizer-model": text_readers.Pieces,
    "tekken": text_readers.Tekken,
    "generation-config": text_readers.GenerationConfig,
    "tokenizer-config": text_readers.TokenizerConfig,
    "added-tokens": text_readers.AddedTokens,
    "chat-template": text_readers.Template,
    "measurement": model_readers.Measurement,
    "measurement-parts": model_readers.PartMeasurement,
    "parquet": model_readers.Parquet,
    "gptq": model_readers.Gptq,
    "exl2": model_readers.Exl2,
    "manifest": own_readers.Manifest,
    "checkpoint": own_readers.Checkpoint,
    "entries": own_readers.Entries,
    "digests": own_readers.Digests,
    "provenance": own_readers.Provenance,
    "session": text_readers.Chat,
    "lora-config": model_readers.LoraConfig,
    "lora": model_readers.Lora,
    "lora-pickle": model_readers.LoraPickle,
    "record": own_readers.Record,
    "score": own_readers.ScoreFile,
    "experts": model_readers.Experts,
    "states": model_readers.States,
    "request": server_readers.RequestBody,
    "keys": server_readers.KeyFile,
    "page": server_readers.PageFile,
}
