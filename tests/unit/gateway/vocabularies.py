"""Small real tokenizers of the families that models use."""

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The capital of France is Paris, and the quick brown fox jumps over the lazy dog.",
    "Stop here. STOP now! User: hello Assistant: hi there, how are you?",
    "Größe, naïve, 你好世界, こんにちは, 🙂🎉 and other letters",
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it; a token may hold a part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think> é", special=False)])  # written as it is, not byte by byte
    return tokenizer


def _sentencepiece_vocab() -> list[tuple[str, float]]:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    pieces += [(f"<0x{b:02X}>", -20.0) for b in range(256)]
    words = ["▁", "▁The", "▁capital", "▁of", "▁France", "▁is", "▁Par", "is", "▁hello", "lo", "▁▁"]
    pieces += [(word, -2.0) for word in words]
    pieces += [(c, -8.0) for c in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?:é你"]
    return pieces


def _llama_2(tokenizer: Tokenizer, *, strip: bool) -> Tokenizer:
    """Normaliser and decoder of Llama 2's conversion: `▁` before the text, byte fallback, one space stripped."""
    steps: list[object] = [normalizers.Replace(" ", "▁")]
    if strip:
        steps.insert(0, normalizers.Prepend("▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def unigram_fallback() -> Tokenizer:
    """SentencePiece Unigram with byte fallback, leading space stripped."""
    return _llama_2(Tokenizer(models.Unigram(_sentencepiece_vocab(), unk_id=0, byte_fallback=True)), strip=True)


@cache
def bpe_fallback() -> Tokenizer:
    """SentencePiece BPE with byte fallback, nothing stripped (Gemma's way)."""
    vocab = {piece: i for i, (piece, _) in enumerate(_sentencepiece_vocab())}
    model = models.BPE(vocab=vocab, merges=[("l", "o")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return _llama_2(Tokenizer(model), strip=False)


@cache
def metaspace() -> Tokenizer:
    """A Metaspace decoder, which looks at whether a token is the first."""
    tokenizer = Tokenizer(models.Unigram(_sentencepiece_vocab(), unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """WordPiece: `##` joins to the word before."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return tokenizer


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
