"""How text is split before byte-level BPE, by the name that a GGUF file gives it (`tokenizer.ggml.pre`).

GGUF carries vocabulary and merges and only names the splitting; transformers' converter uses GPT-2's for all.
A wrong split still round-trips, so nobody notices but the model: "1234" as one token where it was trained on digits.
"""

from typing import Any

from distserve.errors import ModelUnsupported

# Contractions, letters with one leading other character, digits (up to N at a time), punctuation, line ends, blanks.
_LETTERS_AND_DIGITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pre_tokenizer(name: str, model: str) -> Any:
    """The tokenizers.pre_tokenizers object for a name. Raises ModelUnsupported for one that is not known."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2" | "gpt2":
            return gpt2
        case "smollm" | "starcoder" | "refact" | "command-r":
            return Sequence([Digits(individual_digits=True), gpt2])
        case "llama-bpe" | "llama3" | "qwen2":
            pattern = _LETTERS_AND_DIGITS.format(digits="" if name == "qwen2" else "{1,3}")
            bare = ByteLevel(add_prefix_space=False, use_regex=False)
            return Sequence([Split(Regex(pattern), behavior="isolated"), bare])
    raise ModelUnsupported(
        f"{model} splits text by the rule {name!r} (tokenizer.ggml.pre), known are gpt-2, smollm, starcoder, refact, "
        "command-r, llama-bpe and qwen2: use the model's Hugging Face folder instead",
        model=model,
        feature=f"pre-tokenizer {name}",
    )
