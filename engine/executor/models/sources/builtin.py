"""The built-in checkpoint: llama shape, seeded random weights, a real byte-level BPE tokenizer.

Its answers are random words, but it is a checkpoint like any other: config, safetensors, tokenizer, chat template.  It
is made in seconds without a download.  Tests use it, and `quire serve` if the demo model cannot be fetched:

    python -m quire.engine.executor.models.sources.builtin [DIRECTORY]     makes it if absent, prints its directory

If it exists already this takes milliseconds: torch and transformers are imported only to make it.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from quire.engine.common.errors import OperatorError
from quire.engine.executor.disk_cache import cache_directory, describe_failure, make_readable
from quire.engine.executor.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

NAME = "quire-builtin"
VERSION = 1  # part of the directory's name: raise it when the checkpoint changes
VOCAB = 4096
CORPUS_BYTES = 4 << 20  # bytes of the standard library's sources: enough for the vocabulary, trained in a second or two
BOS, EOS, TURN = "<|begin|>", "<|end|>", "<|turn|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def train_tokenizer(vocab_size: int, corpus_bytes: int = CORPUS_BYTES) -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the standard library; special tokens come first (ids 0, 1, 2), then the 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    bpe.train_from_iterator(
        _corpus(corpus_bytes),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[BOS, EOS, TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _corpus(size: int) -> list[str]:
    """Return source texts in a fixed order, `size` bytes in total."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        texts.append(text[:size])
        size -= len(texts[-1])
        if size <= 0:
            break
    return texts


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write everything that `from_pretrained` reads.  The directory is complete or absent, even with several
    writers."""
    from transformers import GenerationConfig

    from quire.engine.executor.models.progress_bars import no_bars

    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id
        )
        with no_bars():
            model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        make_readable(draft)
        try:
            draft.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was faster, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def builtin(directory: Path | None = None) -> Path:
    """Return the directory of the built-in checkpoint, made on first use.  Its content is equal for equal Python and
    torch versions.

    Raises ModelLoadError when it cannot be written."""
    directory = directory or cache_directory() / f"{NAME}-{VERSION}"
    if not directory.is_dir():
        try:
            _make(directory)
        except ModuleNotFoundError as error:
            raise ModelLoadError(
                f"making the built-in model needs {error.name}: pip install 'quire[engine]'"
            ) from error
        except OSError as error:
            raise ModelLoadError(describe_failure("the built-in model", directory.parent, error)) from error
    return directory


def _make(directory: Path) -> None:
    """Write the checkpoint into `directory`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_tokenizer(VOCAB)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    save_checkpoint(model, tokenizer, directory)


if __name__ == "__main__":
    try:
        print(builtin(Path(sys.argv[1]) if len(sys.argv) > 1 else None), flush=True)
    except OperatorError as error:
        print(f"quire: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
