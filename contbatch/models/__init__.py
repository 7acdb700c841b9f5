"""Real models: loading them and running scheduled batches on them. The only part of the package that imports torch.

`load_model` finds and loads, `ModelExecutor` runs, `list_models` says what has a name.
"""

from contbatch.models.chat import ChatTemplate
from contbatch.models.checkpoint import Checkpoint, LoadedModel, read_folder, write_folder
from contbatch.models.config import ModelConfig
from contbatch.models.device import available_devices
from contbatch.models.gguf_file import read_gguf
from contbatch.models.llama import Llama
from contbatch.models.registry import ModelInfo, cache_folder, list_models, load_model
from contbatch.models.rope import RopeScaling
from contbatch.models.runner import ModelExecutor
from contbatch.models.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Checkpoint",
    "Llama",
    "LoadedModel",
    "ModelConfig",
    "ModelExecutor",
    "ModelInfo",
    "RopeScaling",
    "Tokenizer",
    "available_devices",
    "cache_folder",
    "list_models",
    "load_model",
    "read_folder",
    "read_gguf",
    "write_folder",
]
