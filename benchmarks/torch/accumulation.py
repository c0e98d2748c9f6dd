"""What does a sum in half precision lose, and which dtype does each layer have under autocast?

sum: 0.01 added 1000 times; the exact result is 10. dtypes: of ToyModel under autocast. layernorm: the largest error of
an output relative to float64, with the mean and the variance in the dtype of the input or in float32. Float16 overflows
where a square exceeds 65,504; bfloat16 loses precision where a large mean is subtracted. Therefore autocast on a GPU
computes LayerNorm in float32. (On the CPU it returns half precision; its kernel has statistics in float32.)

    python -m benchmarks.torch.accumulation               # on a GPU
    python -m benchmarks.torch.accumulation --device cpu  # on the CPU
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.harness.assignment_tables import print_tables
from benchmarks.harness.rows import ROW_FLAGS, run_rows
from benchmarks.harness.script import benchmark
from benchmarks.torch.models import check_device

TERM, COUNT = 0.01, 1000
# {title: (dtype of the sum, dtype of the number, dtype in which the number is added)}
SUMS = {
    "float32 + float32": (torch.float32, torch.float32, torch.float32),
    "float16 + float16": (torch.float16, torch.float16, torch.float16),
    "float32 + float16": (torch.float32, torch.float16, torch.float16),
    "float32 + float16 cast to float32": (torch.float32, torch.float16, torch.float32),
    "bfloat16 + bfloat16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "float32 + bfloat16": (torch.float32, torch.bfloat16, torch.bfloat16),
}
EPS = 1e-5
# {title: (scale, mean) of the rows of `layernorm`}
INPUTS = {"scale 1, mean 0": (1.0, 0.0), "scale 1, mean 30": (1.0, 30.0), "scale 500, mean 0": (500.0, 0.0)}


class ToyModel(nn.Module):
    """The model of the assignment; forward(x) returns ({layer: its output}, logits)."""

    def __init__(self, in_features=5, out_features=3):
        super().__init__()
        self.fc1 = nn.Linear(in_features, 10, bias=False)
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, out_features, bias=False)

    def forward(self, x):
        outputs = {"fc1": self.fc1(x)}
        outputs["relu"] = F.relu(outputs["fc1"])
        outputs["ln"] = self.ln(outputs["relu"])
        return outputs, self.fc2(outputs["ln"])


def sum_row(title, device):
    """{"sum", "error": relative to 10} of one way to sum."""
    sum_dtype, dtype, added = SUMS[title]
    total = torch.tensor(0.0, dtype=sum_dtype, device=device)
    for _ in range(COUNT):
        total += torch.tensor(TERM, dtype=dtype, device=device).to(added)
    return {"sum": total.item(), "error": abs(total.item() / (TERM * COUNT) - 1)}


def dtypes_row(dtype, device):
    """{what: name of its dtype} of one forward and backward pass under autocast."""
    torch.manual_seed(0)
    model = ToyModel().to(device)
    x, targets = torch.randn(8, 5, device=device), torch.zeros(8, dtype=torch.long, device=device)
    with torch.autocast(device, dtype):
        outputs, logits = model(x)
        loss = F.cross_entropy(logits, targets)
        found = {"parameters": model.fc1.weight, **{f"output of {name}": y for name, y in outputs.items()}}
    loss.backward()
    found |= {"logits": logits, "loss": loss, "gradients": model.fc1.weight.grad}
    return {what: str(tensor.dtype).removeprefix("torch.") for what, tensor in found.items()}


def layernorm(x):
    """LayerNorm of the rows of x, every operation in the dtype of x."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + EPS)


def layernorm_row(dtype, title, device):
    """{"own dtype", "float32": largest error of an output} with statistics in the dtype of x, and in float32."""
    scale, mean = INPUTS[title]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(64, 1024, generator=generator) * scale + mean).to(device=device, dtype=dtype)
    exact = layernorm(x.double())

    def error(y):
        return (y.double() - exact).abs().max().item() / exact.abs().max().item()

    return {"own dtype": error(layernorm(x)), "float32": error(layernorm(x.float()).to(dtype))}


@benchmark(common=ROW_FLAGS | dict(device="cuda"))
def main(args):
    check_device(args)
    device = args.device
    cases = {f"sum / {title} / {device}": functools.partial(sum_row, title, device) for title in SUMS}
    for name in ("float16", "bfloat16"):
        dtype = getattr(torch, name)
        cases[f"dtypes / {name} / {device}"] = functools.partial(dtypes_row, dtype, device)
        for title in INPUTS:
            cases[f"layernorm / {name} / {title} / {device}"] = functools.partial(layernorm_row, dtype, title, device)
    print_tables(run_rows(args, cases), "sums", "autocast", "layernorm")
