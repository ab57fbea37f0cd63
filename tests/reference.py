"""What stock transformers answers: the reference of every equality test."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


class Reference:
    """A model folder run by transformers' own `generate`, float32, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)  # the cluster under test computes beside it: spinning threads would starve both
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int, *, stop_at_eos: bool = False) -> list[int]:
        """The next tokens, exactly num_tokens of them unless eos may stop."""
        ids = torch.tensor([prompt])
        end = {} if stop_at_eos else {"eos_token_id": None}
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
            **end,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens

    @torch.inference_mode()
    def gap(self, tokens: list[int]) -> float:
        """How far the best logit after these tokens lies above the second: below 1e-3 a mismatch says nothing."""
        best = self.model(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2).values
        return float(best[0] - best[1])

    def explain(self, prompt: list[int], expected: list[int], got: list[int]) -> str:
        """Where two answers part, and how close the choice was there."""
        at = next(
            (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got))
        )
        gap = self.gap(prompt + expected[:at])
        pair = f"{got[at : at + 1]} for {expected[at : at + 1]}"
        return f"prompt of {len(prompt)}: token {at} differs, {pair}, gap {gap:.2e}"
