"""Small PyTorch models for the tests of torch_bridge: plain, tied, with frozen parameters and with an unused layer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

BATCH, STEPS = 12, 4  # samples of a step over all ranks
WORDS, WIDTH = 11, 8  # vocabulary and width of the model of tokens


class Toy(nn.Module):
    """Two hidden layers with a normalisation and a buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.rand(1))
        self.register_buffer("flags", torch.rand(3) > 0.5)  # bool: gloo cannot send it

    def hidden(self, x):
        return self.two(torch.relu(self.one(x)))

    def forward(self, x):
        return self.three(torch.relu(self.norm(self.hidden(x)))) * self.scale


class Tied(Toy):
    """Two modules share one weight."""

    def __init__(self):
        super().__init__()
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.two.weight

    def hidden(self, x):
        return self.again(torch.relu(super().hidden(x)))


class Frozen(Toy):
    """A frozen weight, a frozen bias and a frozen parameter that no layer uses."""

    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.rand(2), requires_grad=False)
        self.two.weight.requires_grad_(False)
        self.one.bias.requires_grad_(False)


class Unused(Toy):
    """A layer that no rank uses, and one that only the samples whose first feature is above 0 use."""

    def __init__(self):
        super().__init__()
        self.never, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def hidden(self, x):
        y = super().hidden(x)
        return y + self.sometimes(y) * (x[:, :1] > 0) if (x[:, 0] > 0).any() else y


MODELS = {model.__name__: model for model in (Toy, Tied, Frozen, Unused)}


class Words(nn.Module):
    """A model of tokens with a block that may be checkpointed; tied: the head has the embedding's weight."""

    def __init__(self, tied=False, checkpoint=False):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.checkpoint = checkpoint
        if tied:
            self.head.weight = self.embedding.weight

    def block(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.checkpoint:
            return self.head(checkpoint(self.block, x, use_reentrant=False))
        return self.head(self.block(x))


def batches():
    """STEPS of (x (BATCH, 6), y (BATCH, 3)). The first half of a batch has first features below 0."""
    generator, device = torch.Generator("cpu").manual_seed(1), torch.get_default_device()
    for _ in range(STEPS):
        x, y = (torch.randn(BATCH, n, generator=generator, device="cpu") for n in (6, 3))
        x[: BATCH // 2, 0], x[BATCH // 2 :, 0] = -x[: BATCH // 2, 0].abs(), x[BATCH // 2 :, 0].abs()
        yield x.to(device), y.to(device)


def rows():
    """The samples of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)


def build(model, seed):
    """A model on the default device, whose parameters depend on the seed and not on the device."""
    torch.manual_seed(seed)
    device = torch.get_default_device()
    with torch.device("cpu"):
        return model().to(device)


def on_gpu(function, *args):
    """The result of a function whose new tensors are on this rank's GPU, with its tensors on the CPU."""
    with torch.device("cuda"):
        return tree_map(lambda x: x.cpu() if torch.is_tensor(x) else x, function(*args))
