"""Write a small Llama-shaped model inflated to the cost of a large one (``outrider.bench.inflate``), and print its folder.

    python bench/inflate.py src/outrider/family/target big --size 1b --context 4096

Without OUT the folder is in the cache, where ``outrider bench --inflate`` finds it.
"""

from __future__ import annotations

import argparse

from outrider.bench.inflate import inflate, inflated
from outrider.types import OutriderError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a Llama-shaped Hugging Face folder")
    parser.add_argument("out", nargs="?", help="the new folder (default: the cache folder)")
    parser.add_argument("--size", default="1b", help="350m, 1b, 8b, ... (default 1b)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (with OUT only)")
    parser.add_argument("--context", type=int, help="context length that the config declares (with OUT only)")
    args = parser.parse_args()
    try:
        if args.out:
            print(inflate(args.source, args.out, args.size, seed=args.seed, context=args.context))
        else:
            print(inflated(args.source, args.size))
    except OutriderError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
