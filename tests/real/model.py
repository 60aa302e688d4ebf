"""Makes the tiny model that the real server serves: `python -m tests.real.model FOLDER`.

Random weights, the same every time. Its tokenizer is the harness's own, so client and server share one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.tokenizer import SmallTokenizer

CONTEXT = 4096
SPREAD = 0.2
"""Of the weights. With the usual 0.02 one token follows every prompt."""

EOS_FACTOR = 3
"""The end-of-answer token's row of the head is so much longer: greedy answers end by themselves now and then."""


def make(folder: Path) -> None:
    """Writes a folder that `--model-path` takes. Imports torch and transformers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = SmallTokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=SPREAD,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= EOS_FACTOR
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
