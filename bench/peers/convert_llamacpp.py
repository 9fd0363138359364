"""Run llama.cpp's `convert_hf_to_gguf.py` for tokenizers it does not know. Prompts are token ids, so no tokenizer is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SOURCE = Path(sys.prefix) / "llama.cpp"
FALLBACK = "gpt-2"  # pre-tokenizer, which splits text before byte-pair merges


def main() -> None:
    """Command line: the converter's own."""
    sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return FALLBACK

    TextModel.get_vocab_base_pre = named
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
