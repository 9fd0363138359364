"""Run by vLLM's Python: read exported folders as ``vllm serve --config`` does and print the result for each as a JSON line.

python vllm_read.py FOLDER...
"""

import json
import os
import sys


def main() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for folder in sys.argv[1:]:
        os.chdir(folder)
        parser = FlexibleArgumentParser()
        ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
        args = parser.parse_args(["serve", "--config", "vllm.yaml"])
        args.model = getattr(args, "model_tag", None) or args.model
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        drafting = config.speculative_config
        read = {
            "model": config.model_config.model,
            "max_len": config.model_config.max_model_len,
            "max_batch": config.scheduler_config.max_num_seqs,
            "host": args.host,
            "kv_memory": config.cache_config.kv_cache_memory_bytes,
            "additional": config.additional_config,
            "method": drafting and drafting.method,
            "k": drafting and drafting.num_speculative_tokens,
            "window": drafting and [drafting.prompt_lookup_min, drafting.prompt_lookup_max],
            "rule": drafting and drafting.rejection_sample_method,
        }
        print(json.dumps(read), flush=True)


if __name__ == "__main__":
    main()
