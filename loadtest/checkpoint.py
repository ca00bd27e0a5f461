"""The models of the load tests: random weights, a real tokenizer, and answers whose length the client chooses.

This module creates the 42M model of the measurements on a CPU.  For shapes of `shapes.py` it writes the tensors that
must not be random (`--load random`).
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

VOCAB = 16_000
SOURCES = 200  # source files that train the tokenizer: enough for VOCAB tokens
COUNTDOWN = "countdown.json"  # file of a model's directory: see countdown_heads()
LONGEST = 4096  # maximum tokens of an answer that a countdown can end
EMBEDDING_STD = 8.0  # standard deviation of the embedding in countdown models; random layers add about 10 to it at most
HEAD_STD = 0.02


def make_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCAB tokens on the standard library's sources and write it."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    trainer = ByteLevelBPETokenizer()
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))[:SOURCES]
    trainer.train([str(path) for path in sources], vocab_size=VOCAB, special_tokens=["<|end|>"])
    words = PreTrainedTokenizerFast(tokenizer_object=trainer._tokenizer, bos_token="<|end|>", eos_token="<|end|>")
    if len(words) != VOCAB:
        raise RuntimeError(f"the tokenizer learned {len(words)} tokens of {VOCAB}: too little text in SOURCES files")
    words.save_pretrained(directory)
    return words


def make_llama_42m(directory: Path, context: int = 4096, *, countdown: bool = False) -> None:
    """Write a checkpoint: hidden 512, 8 layers, 8 heads on 4 KV heads, intermediate 1,536, byte-level BPE tokenizer.

    Clients measure when text arrives, and a greedy model with random weights repeats a few tokens.  So every token that
    the model can choose must have text.  All other tokens (single bytes of longer characters, the end of sequence) have
    zeros in the last layer, so their logit is 0, and the largest of 16,000 logits is never 0.  `logit_bias` can still
    force them.

    `countdown`: the last token of a prompt decides how long the greedy answer is (countdown_heads())."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        dtype="bfloat16",
    )
    words = make_tokenizer(directory)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    spoken, mute = split_by_text(words)
    with torch.no_grad():
        if countdown:
            ids = write_countdown(directory, 0, spoken)
            embedding, head = countdown_heads(VOCAB, config.hidden_size, ids, mute)
            model.model.embed_tokens.weight.copy_(embedding)
            model.lm_head.weight.copy_(head)
        else:
            model.lm_head.weight[mute] = 0
    model.save_pretrained(directory)


def make_shape(directory: Path, config: dict[str, Any]) -> None:
    """Write a model shape for `--load random` whose answers end by themselves (countdown_heads()).

    `config`: the config.json of a llama with an output layer of its own.  The directory gets a tokenizer of VOCAB
    tokens, which are the only ones in answers, and the two tensors of the embedding and of the output layer.  The
    engine fills all other weights with random values on its device."""
    import torch
    from safetensors.torch import save_file

    if config["tie_word_embeddings"]:
        raise ValueError("a countdown needs an output layer of its own: tie_word_embeddings must be false")
    directory.mkdir(parents=True, exist_ok=True)
    vocab, end = int(config["vocab_size"]), int(config["eos_token_id"])
    spoken, mute = split_by_text(make_tokenizer(directory))
    ids = write_countdown(directory, end, [token for token in spoken if token != end])
    embedding, head = countdown_heads(vocab, int(config["hidden_size"]), ids, [*mute, *range(VOCAB, vocab)])
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, directory / "heads.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_countdown(directory: Path, end: int, spoken: list[int]) -> list[int]:
    """Write COUNTDOWN and return its ids.  After ids[n] a greedy answer has n more tokens, the end included."""
    ids = [end, *spoken[:LONGEST]]
    (directory / COUNTDOWN).write_text(json.dumps({"ids": ids}) + "\n", encoding="utf-8")
    return ids


def countdown_heads(vocab: int, hidden: int, ids: list[int], mute: list[int]) -> tuple[Tensor, Tensor]:
    """Return embedding and output layer, each [vocab, hidden] of float32, with which a greedy model counts down.

    The server cannot know the length of such an answer, and still computes the complete model:

        prompt ... ids[3]  ->  ids[2]  ->  ids[1]  ->  ids[0], the end of sequence

    Embeddings are large compared with what the layers of a random model add to them.  So the last hidden state still
    points along the embedding of the last token.  The output row of ids[n - 1] is parallel to the embedding of ids[n],
    so its logit is about sqrt(hidden) standard deviations above those of the other tokens.
    `mute`: tokens that an answer must not contain; they get rows of zeros."""
    import torch

    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab, hidden, generator=generator).mul_(EMBEDDING_STD)
    head = torch.randn(vocab, hidden, generator=generator).mul_(HEAD_STD)
    head[mute] = 0
    head[ids[:-1]] = embedding[ids[1:]] * (HEAD_STD / EMBEDDING_STD)
    return embedding, head


def read_countdown(directory: Path) -> list[int]:
    """Return the ids of a model's COUNTDOWN; [] without one: `logit_bias` must end its answers."""
    path = directory / COUNTDOWN
    return list(map(int, json.loads(path.read_text(encoding="utf-8"))["ids"])) if path.exists() else []


def prepare(directory: Path, *, countdown: bool = False) -> tuple[int, int]:
    """Return the model's vocabulary size and end-of-sequence id.  Makes the 42M model if the directory holds none."""
    if not (directory / "config.json").exists():
        print(f"making the 42M model in {directory}", flush=True)
        make_llama_42m(directory, countdown=countdown)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    end = config.get("eos_token_id") or 0
    return int(config["vocab_size"]), int(end[0] if isinstance(end, list) else end)


def split_by_text(words: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the token ids whose text a server can send at once, and all other token ids."""
    spoken: list[int] = []
    mute: list[int] = []
    for token in range(len(words)):
        (spoken if has_text(words.decode([token], skip_special_tokens=True)) else mute).append(token)
    return spoken, mute


def has_text(decoded: str) -> bool:
    """Return whether a server can send the text at once: an incomplete character waits for its other bytes."""
    return bool(decoded) and "\ufffd" not in decoded
