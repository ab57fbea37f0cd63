"""Where models come from: the catalogue, the cache, GGUF conversion. Importing this loads no torch."""

from distserve.models.fetch import fetch
from distserve.models.gguf import convert_gguf
from distserve.models.resolve import resolve, tokenizer_folder

__all__ = ["convert_gguf", "fetch", "resolve", "tokenizer_folder"]
