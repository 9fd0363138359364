"""Run by vLLM's Python: load a draft with vLLM's own code and write its weights, without running a model.

python vllm_load.py TARGET HEAD METHOD TOKENS OUT.safetensors
"""

import sys


def main() -> None:
    import torch
    from safetensors.torch import save_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader, get_model

    torch.accelerator.empty_cache = lambda: None  # as in vLLM's CPU worker: without an accelerator the original raises
    # After loading, vLLM packs the weights for CPU kernels and drops them. Weights before packing are compared.
    base_loader.process_weights_after_loading = lambda *_: None
    initialize = base_loader.initialize_model

    def unfilled(*args: object, **options: object) -> torch.nn.Module:
        """What no file fills stays NaN: vLLM allocates parameters without values."""
        model = initialize(*args, **options)
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
        return model

    base_loader.initialize_model = unfilled
    target, head, method, tokens, out = sys.argv[1:]
    speculative = {"method": method, "model": head, "num_speculative_tokens": int(tokens)}
    args = EngineArgs(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        speculative_config=speculative,
    )
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.named_parameters()}
    held["tag"] = torch.tensor(list(type(model).__name__.encode()))
    save_file(held, out)


if __name__ == "__main__":
    main()
