"""Makes models/qwen3_*/float64.npz and float64_grads.safetensors: transformers' values with every cast to float32 lifted to float64.

    pip install torch==2.13.0 transformers==5.24.0 safetensors && python tests/golden/float64_routers.py

io.npz and grads.safetensors of these two families were computed in float64 but for one thing: their routers call
`softmax(..., dtype=torch.float)`, which stayed in float32. Neither torch nor transformers is a dependency: the tests read the files.
"""

import pathlib

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

softmax, to = torch.nn.functional.softmax, torch.Tensor.to
lift = lambda value: torch.float64 if value is torch.float32 else value
torch.nn.functional.softmax = lambda x, dim=None, dtype=None, **rest: softmax(x, dim=dim, dtype=torch.float64)
torch.Tensor.to = lambda self, *args, **named: to(self, *map(lift, args), **{name: lift(value) for name, value in named.items()})
torch.Tensor.float = lambda self: to(self, torch.float64)

for folder in sorted((pathlib.Path(__file__).parent / "models").glob("qwen3_*")):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    golden = np.load(folder / "io.npz")
    tokens_BL = torch.tensor(golden["input_ids"]).long()
    logits_BLV = model(input_ids=tokens_BL).logits
    loss = torch.nn.functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())
    loss.backward()
    np.savez(folder / "float64.npz", logits=logits_BLV.detach().numpy(), loss=loss.item())
    fused = {name: weight.grad for name, weight in model.named_parameters()}
    grads = {}
    for name, grad in fused.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(zip(*grad.chunk(2, 1), strict=True)):
                grads |= {name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"): each for part, each in (("gate", gate), ("up", up))}
        elif name.endswith("experts.down_proj"):
            grads |= {name.replace("down_proj", f"{expert}.down_proj.weight"): each for expert, each in enumerate(grad)}
        else:
            grads[name] = grad
    save_file(
        {name: np.ascontiguousarray(grad.float().numpy().astype(np.float32)) for name, grad in grads.items()},
        folder / "float64_grads.safetensors",
    )
    print(folder.name, np.abs(logits_BLV.detach().numpy() - golden["logits"]).max() / np.abs(golden["logits"]).max())
