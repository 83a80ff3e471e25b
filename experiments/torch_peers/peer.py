"""The other side: training steps of transformers' model of a small config's sizes, in PyTorch on the CPU. Prints one json.

    python peer.py {qwen3_moe|kimi_linear} [--steps 7]

Run by run.py, in a Python that has torch and transformers and needs no moejax.
"""

import argparse
import json
import os
import time

import torch
import transformers

ROWS, LENGTH, VOCABULARY = 4, 1024, 4096
BOTH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 2 * LENGTH,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZES = {
    "qwen3_moe": {"head_dim": 64, "num_experts": 32, "intermediate_size": 512},
    "kimi_linear": {
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "intermediate_size": 512,
        "num_local_experts": 32,
        "n_shared_experts": 1,
    },
}
"""Those of configs/NAME_small_cpu.py, in transformers' words."""


def step_seconds(family: str, steps: int) -> tuple[int, list[float]]:
    """Parameters, and the time of each step: forward, backward, AdamW."""
    config = transformers.AutoConfig.for_model(family, **BOTH, **SIZES[family])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    took = []
    for _ in range(steps):
        tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
        began = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - began)
    return sum(parameter.numel() for parameter in model.parameters()), took


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=SIZES)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    parameters, took = step_seconds(options.family, options.steps)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"parameters": parameters, "tokens": ROWS * LENGTH, "step_s": took, **versions}))
